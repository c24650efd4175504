"""What a plan foretold of a run, and how the run compares with it at its end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.metrics import Sinks, Step

WARM_UP_STEPS = 2  # the first steps also allocate, compile and fill caches


@dataclass(frozen=True)
class Expectation:
    step_seconds: float
    bytes_per_rank: float  # of the rank that needs most
    band: float  # share by which the time may be off
    global_batch: int  # of the step foretold; a batch that grows begins with smaller ones

    def line(self) -> str:
        return (
            f"expected: {self.step_seconds:.3g} s a step (±{self.band:.0%}), at most "
            f"{self.bytes_per_rank / 1e9:.2f} GB a process"
        )


@dataclass
class Comparison:
    """Collects what logging windows measured, for one sentence and one event at the end."""

    expected: Expectation
    times: list[float] = field(default_factory=list)  # of a step, one for each window

    def take(self, record: Step) -> None:
        if record.global_batch_size == self.expected.global_batch:
            self.times.append(record.batch_seconds)

    def tell(self, sinks: Sinks, step: int, peaks: Sequence[int], logging_freq: int) -> None:
        """`peaks` are the most bytes that each rank held."""
        left_out = -(-WARM_UP_STEPS // logging_freq)
        times = self.times[left_out:] or self.times[-1:]
        if not times:
            return
        expected, seconds, most = self.expected, statistics.median(times), max(peaks)
        fields: dict[str, Any] = {
            "predicted_step_seconds": expected.step_seconds,
            "measured_step_seconds": seconds,
            "predicted_bytes": round(expected.bytes_per_rank),
            "measured_bytes": most,
        }
        sinks.event("prediction", step=step, **fields)
        sinks.notice(
            f"predicted {expected.step_seconds:.3g} s a step, measured {seconds:.3g} "
            f"({expected.step_seconds / seconds - 1:+.0%}); predicted "
            f"{expected.bytes_per_rank / 1e9:.2f} GB a process, measured at most "
            f"{most / 1e9:.2f}" + (f" ({expected.bytes_per_rank / most - 1:+.0%})" if most else "")
        )
