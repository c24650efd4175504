"""The log lines of a run, in the format of FleetX, to the character.

    [2022-07-27 12:42:46,601] [    INFO] - global step 1, epoch: 0, batch: 0, loss: 11.05201721...

On a terminal the prefix is coloured and a progress line stands below the log; elsewhere the lines
are plain. Whatever else has to be said goes out under the same prefix, one line each, with
characters that could move a cursor or start a new line escaped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.live import Live


COLOURS = {"INFO": "32", "WARNING": "33", "ERROR": "31"}
STAMPS = ("kind", "time", "event")


def train_message(record: Mapping[str, Any]) -> str:
    """The text of a training line; `record` has the fields of a `Step`."""
    return (
        "global step {step}, epoch: {epoch}, batch: {batch}, loss: {loss:.9f}, "
        "avg_reader_cost: {reader_seconds:.5f} sec, avg_batch_cost: {batch_seconds:.5f} sec, "
        "speed: {steps_per_second:.2f} step/s, ips_total: {ips_total:.0f} tokens/s, "
        "ips: {ips:.0f} tokens/s, learning rate: {learning_rate:.5e}"
    ).format_map(record)


def evaluation_message(record: Mapping[str, Any]) -> str:
    """The text of an evaluation line; the record's kind is "eval" or "test"."""
    return (
        "[{kind}] epoch: {epoch}, batch: {batch}, loss: {loss:.9f}, "
        "avg_{kind}_cost: {batch_seconds:.5f} sec, speed: {steps_per_second:.2f} step/s"
    ).format_map(record)


def event_message(record: Mapping[str, Any]) -> str:
    fields = [f"{name}: {value}" for name, value in record.items() if name not in STAMPS]
    return escape(f"[{record['event']}] " + ", ".join(fields))


def log_line(message: str, when: str, level: str = "INFO", colour: bool = False) -> str:
    """One whole line, without its newline; `when` is an ISO 8601 time, shown as it stands."""
    moment = datetime.fromisoformat(when)
    stamp = f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}"
    prefix = f"[{stamp}] [{level:>8}]"
    if not colour:
        return f"{prefix} - {message}"
    return f"\x1b[{COLOURS[level]}m{prefix}\x1b[0m - {message}\x1b[0m"


def escape(text: str) -> str:
    """`text` with every unprintable character written as its escape, newlines included."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


class Console:
    """Writes the records of a run as lines to `stream`, standard output unless given.

    With `max_steps` and a terminal, a progress line follows the log.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        max_steps: int | None = None,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = terminal and not os.environ.get("NO_COLOR")
        self._progress = (
            Progress(self._stream, max_steps, start_step, clock)
            if terminal and max_steps is not None
            else None
        )

    def write(self, record: Mapping[str, Any]) -> None:
        kind, level = record["kind"], record.get("level", "INFO")
        if kind == "train":
            message = train_message(record)
        elif kind in ("eval", "test"):
            message = evaluation_message(record)
        elif kind == "event":
            message = event_message(record)
        else:
            message = escape(record["text"])
        self._print(log_line(message, record["time"], level, self._colour))
        if kind == "train" and self._progress:
            self._progress.show(record)

    def close(self) -> None:
        if self._progress:
            self._progress.close()

    def _print(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._progress:
            self._progress.print_above(line)
        else:
            print(line, file=self._stream, flush=True)


class Progress:
    """A line under the log: steps done, loss, tokens/s, time left. Drawn at every record."""

    def __init__(
        self, stream: TextIO, max_steps: int, start_step: int, clock: Callable[[], float]
    ) -> None:
        self._stream = stream
        self._max_steps = max_steps
        self._start_step = start_step
        self._clock = clock
        self._start = clock()
        self._screen: Live | None = None

    def show(self, record: Mapping[str, Any]) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        step = record["step"]
        row = Table.grid(padding=(0, 2))
        row.add_row(
            ProgressBar(total=self._max_steps, completed=step, width=30),
            f"step {step}/{self._max_steps}",
            f"loss {record['loss']:.4f}",
            f"{record['ips_total']:,.0f} tokens/s",
            f"{duration(self._seconds_left(step))} left",
        )
        self._open_screen().update(row, refresh=True)

    def print_above(self, line: str) -> None:
        if self._screen:
            self._screen.console.out(line, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        if self._screen:
            self._screen.stop()
            self._screen = None

    def _seconds_left(self, step: int) -> float:
        # Evaluations and saves are in this mean, so what is left includes theirs.
        done = max(step - self._start_step, 1)
        return (self._clock() - self._start) / done * max(self._max_steps - step, 0)

    def _open_screen(self) -> Live:
        if self._screen is None:
            from rich.console import Console as RichConsole
            from rich.live import Live

            console = RichConsole(file=self._stream, force_terminal=True)
            self._screen = Live(console=console, auto_refresh=False, transient=True)
            self._screen.start()
        return self._screen


def duration(seconds: float) -> str:
    """Hours, minutes, seconds; days when there are any: 1:05:09, 2d 03:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}"
