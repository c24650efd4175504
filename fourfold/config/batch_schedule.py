"""The batch-size schedule: a fixed batch, or one that grows at the start of a run.

The growth is Megatron's `--rampup-batch-size START INCREMENT SAMPLES`: the batch begins at START
and gains INCREMENT each time another equal share of SAMPLES has been read, until it is whole. All
of it is a function of the step, so a run that is resumed, or read on another layout, takes the
same samples at the same step. A run that is resumed with another batch continues at the next
sample: its schedule begins at the step and the sample where the other ended.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Phase(NamedTuple):
    """Steps in a row with the same batch."""

    first_step: int  # counted from 0
    first_sample: int
    batch: int


@dataclass(frozen=True)
class Ramp:
    start: int
    increment: int
    samples: int  # read until the batch is whole

    def batch_after(self, consumed: int, whole: int) -> int:
        """The batch of the step before which `consumed` samples were read."""
        if consumed > self.samples:
            return whole
        # Divided as Megatron does, in floating point: the steps must fall on the same samples.
        growths = (whole - self.start) // self.increment
        if growths == 0:
            return whole
        return self.start + int(consumed / (self.samples / growths)) * self.increment


@dataclass(frozen=True)
class BatchSchedule:
    """The batch of every step. Steps count from 0, as the loader's batches do."""

    batch: int
    ramp: Ramp | None = None
    # Where it begins: a run may have taken other batches before.
    first_step: int = 0
    first_sample: int = 0

    @cached_property
    def phases(self) -> list[Phase]:
        return list(self._phases())

    def _phases(self) -> Iterator[Phase]:
        step, consumed = self.first_step, self.first_sample
        while self.ramp is not None and consumed <= self.ramp.samples:
            size = self.ramp.batch_after(consumed, self.batch)
            steps = self._steps_alike(self.ramp, consumed, size)
            yield Phase(step, consumed, size)
            step, consumed = step + steps, consumed + steps * size
        yield Phase(step, consumed, self.batch)

    def _steps_alike(self, ramp: Ramp, consumed: int, size: int) -> int:
        """How many steps from here have this batch, before it grows or the ramp ends.

        Found by halving: a ramp may be millions of steps long.
        """

        def grown(steps: int) -> bool:
            read = consumed + steps * size
            return read > ramp.samples or ramp.batch_after(read, self.batch) != size

        last, first = 0, (ramp.samples - consumed) // size + 1
        while first - last > 1:
            middle = (first + last) // 2
            last, first = (last, middle) if grown(middle) else (middle, first)
        return first

    @property
    def batches(self) -> list[int]:
        """The sizes that occur, in order."""
        return list(dict.fromkeys(phase.batch for phase in self.phases))

    def batch_of(self, step: int) -> int:
        return self._phase(step).batch

    def consumed(self, steps: int) -> int:
        """Samples read by the first `steps` steps."""
        assert steps >= self.first_step, "what was read before is not known"
        phase = self._phase(steps)
        return phase.first_sample + (steps - phase.first_step) * phase.batch

    def samples_of(self, step: int) -> range:
        return range(self.consumed(step), self.consumed(step + 1))

    def steps_within(self, samples: int) -> int:
        """How many steps read at most `samples`."""
        index = bisect_right(self.phases, samples, key=lambda phase: phase.first_sample) - 1
        phase = self.phases[max(index, 0)]
        steps = phase.first_step + (samples - phase.first_sample) // phase.batch
        following = self.phases[index + 1 : index + 2]
        return min([steps, *(other.first_step for other in following)])

    def _phase(self, step: int) -> Phase:
        index = bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1
        return self.phases[max(index, 0)]


def growth_problem(ramp: Ramp, whole: int) -> str | None:
    """Why a batch cannot grow so, if it cannot."""
    if ramp.start > whole:
        return f"begins with {ramp.start} samples, more than global_batch_size={whole}"
    if (whole - ramp.start) % ramp.increment:
        below = whole - math.ceil((whole - ramp.start) / ramp.increment) * ramp.increment
        fitting = below if below > 0 else below + ramp.increment
        return (
            f"does not reach global_batch_size={whole} from {ramp.start} in steps of "
            f"{ramp.increment}; begin with {fitting}, or choose an increment that divides "
            f"{whole - ramp.start}"
        )
    return None
