"""The log lines of FleetX, to the character, and the form of everything else a run has to say.

    [2022-07-27 12:42:46,601] [    INFO] - global step 1, epoch: 0, batch: 0, loss: 11.05201721...

Whatever is not a step or an evaluation goes out under the same prefix, one line each, with
characters that could move a cursor or start a new line escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

COLOURS = {"INFO": "32", "WARNING": "33", "ERROR": "31"}
STAMPS = ("kind", "time", "event")


class LineStyle(Protocol):
    """Whose log lines are printed."""

    def lines(self, record: Mapping[str, Any], colour: bool) -> list[str]:
        """The lines of one record, without their newlines."""
        ...

    def take_loss(self, loss: float) -> None:
        """The loss of a step; every step comes, also those between two lines."""
        ...


class FleetXLines:
    """One line a record; it needs to know no more than the record says."""

    def lines(self, record: Mapping[str, Any], colour: bool) -> list[str]:
        kind, level = record["kind"], record.get("level", "INFO")
        if kind == "train":
            message = train_message(record)
        elif kind in ("eval", "test"):
            message = evaluation_message(record)
        elif kind == "event":
            message = event_message(record)
        else:
            message = escape(record["text"])
        return [log_line(message, record["time"], level, colour)]

    def take_loss(self, loss: float) -> None:
        """FleetX prints the loss of the step it names, whatever came before."""


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
