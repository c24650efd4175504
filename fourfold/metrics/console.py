"""The log of a run on a terminal or in a file, in the line style asked for.

On a terminal the prefix of lines that have one is coloured and a progress line stands below the
log; elsewhere the lines are plain.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from fourfold.errors import heard_or_not
from fourfold.metrics.lines import FleetXLines, LineStyle

if TYPE_CHECKING:
    from rich.live import Live


class Console:
    """Writes the records of a run as lines to `stream`, standard output unless given.

    The lines are FleetX's unless another style is given. With `max_steps` and a terminal, a
    progress line follows the log.
    """

    name = "the console"

    def __init__(
        self,
        stream: TextIO | None = None,
        max_steps: int | None = None,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        style: LineStyle | None = None,
    ) -> None:
        self._style = style or FleetXLines()
        self._stream = stream if stream is not None else sys.stdout
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = terminal and not os.environ.get("NO_COLOR")
        self._progress = (
            Progress(self._stream, max_steps, start_step, clock)
            if terminal and max_steps is not None
            else None
        )

    def write(self, record: Mapping[str, Any]) -> None:
        with heard_or_not(self._stream):
            for line in self._style.lines(record, self._colour):
                self._print(line)
            if record["kind"] == "train" and self._progress:
                self._progress.show(record)

    def close(self) -> None:
        if self._progress:
            with heard_or_not(self._stream):
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
