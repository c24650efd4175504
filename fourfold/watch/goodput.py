"""Where the time of a run went, to the second: the parts add up to the wall clock.

    spend(entries)     Spending: seconds by part, from the first record to the last

Records have the time at which they were written, and those of training the mean seconds of each
phase of a step. So the time between two training records is split by their phases, and what is
between the last record of one start and the first of the next is a restart. A run that continues
from a checkpoint drops the records of the steps after it and notes until when there were any
(`metrics/jsonl.py`): that time is lost work. What no record explains is `other`, which is small.

The time before the first record, in which the first process starts, is not in any record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.metrics.jsonl import LOST_STEPS, RUN

# In the order in which they are shown; what they mean is told in docs/watch.md.
PARTS = (
    "training",
    "evaluation",
    "saving",
    "waiting",
    "starting",
    "restarts",
    "lost work",
    "other",
)


@dataclass(frozen=True)
class Window:
    """A training record: the steps up to `step`, and the mean seconds of one of them."""

    step: int
    time: float  # seconds since the epoch
    batch: float
    reader: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0


@dataclass(frozen=True)
class Moment:
    """Any other record."""

    kind: str
    step: int
    time: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> float:
        """A field's value, 0 where it has none that is a finite number."""
        value = number_of(self.fields, name)
        return value if value is not None and math.isfinite(value) else 0.0

    @property
    def text(self) -> str:
        return str(self.fields.get("text", ""))

    @property
    def event(self) -> str | None:
        return str(self.fields.get("event")) if self.kind == "event" else None

    @property
    def is_end(self) -> bool:
        """The notice with which a run ends by itself or by a stop."""
        said = self.text if self.kind == "notice" else ""
        return said == "The training process is complete." or said.startswith("stopped by ")

    @property
    def is_opening(self) -> bool:
        """A notice that is written before the record of a start."""
        said = self.text if self.kind == "notice" else ""
        return said.startswith("metrics are served at ") or said.endswith("metrics.jsonl.bak")


Entry = Window | Moment


def number_of(record: Mapping[str, Any], name: str) -> float | None:
    """A field that is a number, whatever wrote the file; NaN and infinities are numbers."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass
class Spending:
    """Seconds by part, and the same times the number of devices, which is what they cost."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    device_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    devices: int = 1
    wall: float = 0.0  # from the first record to the last
    starts: int = 0

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds
        self.device_seconds[part] += seconds * self.devices

    @property
    def goodput(self) -> float | None:
        """The share of the wall clock in which steps were computed that are part of the result."""
        return self.seconds["training"] / self.wall if self.wall > 0 else None


def spend(entries: Sequence[Entry], dropped: Iterable[float] = ()) -> Spending:
    """`dropped` are the times of records that are only in the file as it was before a restart, for
    runs that did not note what they dropped."""
    ledger, dropped = Spending(), sorted(dropped)
    if not entries:
        return ledger
    walk = _Walk(ledger, mark=entries[0].time)
    for entry in entries:
        if isinstance(entry, Window):
            walk.window(entry)
        elif entry.kind == RUN or entry.event == LOST_STEPS:
            walk.begin(entry, dropped)
        else:
            walk.tail.append(entry)
    walk.end_tail()
    ledger.wall = walk.mark - entries[0].time
    return ledger


@dataclass
class _Walk:
    ledger: Spending
    mark: float  # everything up to this time is accounted for
    step: int = 0  # up to which steps are
    is_fresh: bool = True  # no step was recorded since the start
    tail: list[Moment] = field(default_factory=list)  # records since the last training record

    def until(self, time: float) -> float:
        """Seconds from the mark to `time`, which is the mark then. A clock that was set back has
        no seconds."""
        seconds = max(0.0, time - self.mark)
        self.mark += seconds
        return seconds

    def window(self, window: Window) -> None:
        """Split the time since the last training record, or the start, by phases."""
        span, steps = self.until(window.time), max(window.step - self.step, 0)
        parts = {
            "training": steps * max(window.batch - window.reader, 0.0),
            "waiting": steps * window.reader,
            "evaluation": steps * window.evaluate,
            "saving": steps * window.save,
        }
        known = sum(parts.values())
        # Clocks of a millisecond can make the parts longer than the whole.
        share = min(1.0, span / known) if known > 0 else 0.0
        for part, seconds in parts.items():
            self.ledger.add(part, seconds * share)
        self.ledger.add("starting" if self.is_fresh else "other", span - known * share)
        self.step, self.is_fresh, self.tail = window.step, False, []

    def begin(self, start: Moment, dropped: Sequence[float]) -> None:
        """A start, or a step back to a checkpoint: what is before it was lost, or a restart."""
        while self.tail and self.tail[-1].is_opening:
            self.tail.pop()
        self.end_tail()
        begun, lost = self.mark, start.number("until")
        if start.kind == RUN:
            lost = max((time for time in dropped if begun < time < start.time), default=0.0)
        gap = self.until(start.time)
        saved = min(max(start.number("save_seconds"), 0.0), gap)
        work = min(max(lost - begun - saved, 0.0), gap - saved)
        self.ledger.add("saving", saved)
        self.ledger.add("lost work", work)
        self.ledger.add("restarts", gap - saved - work)
        if start.kind == RUN:
            self.ledger.starts += 1
            self.ledger.devices = max(1, int(start.number("world_size")))
        self.step, self.is_fresh = start.step, True

    def end_tail(self) -> None:
        """After the last training record: evaluations have their seconds, the rest was a save; once
        the run has said that it ends, there is nothing."""
        has_ended = False
        for moment in self.tail:
            seconds = self.until(moment.time)
            if moment.kind in ("eval", "test", "task", "samples"):
                times = 2 if "ema_loss" in moment.fields else 1
                evaluated = min(seconds, max(times * moment.number("seconds"), 0.0))
                self.ledger.add("evaluation", evaluated)
                seconds -= evaluated
            rest = "other" if has_ended else "starting" if self.is_fresh else "saving"
            self.ledger.add(rest, seconds)
            has_ended |= moment.is_end
        self.tail = []
