"""The batch-size schedule: a fixed batch, or one that grows at the start of a run.

The growth is Megatron's `--rampup-batch-size START INCREMENT SAMPLES`: the batch begins at START
and gains INCREMENT each time another equal share of SAMPLES has been read, until it is whole. All
of it is a function of the step, so a run that is resumed, or read on another layout, takes the
same samples at the same step. A run that is resumed with another batch continues at the next
sample: its schedule begins at the step and the sample where the other ended.

Samples may be left out (`LeftOut`): by `Data.dataset.leave_out`, or because a run went back before
a loss spike. The run then counts the samples it reads as before, and those after the gap move up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
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
class LeftOut:
    """Samples that a run does not read: ascending ranges (first, after the last), which neither
    overlap nor touch."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]]) -> LeftOut:
        """Of ranges in any order, which may overlap."""
        joined: list[tuple[int, int]] = []
        for first, stop in sorted((int(first), int(stop)) for first, stop in ranges):
            if first >= stop:
                continue
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((first, stop))
        return cls(tuple(joined))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        """How many samples."""
        return sum(stop - first for first, stop in self.ranges)

    def joined(self, others: Iterable[Sequence[int]]) -> LeftOut:
        return LeftOut.of([*self.ranges, *others])

    def sample_at(self, position: int) -> int:
        """The sample that is read after `position` others."""
        for first, stop in self.ranges:
            if position < first:
                break
            position += stop - first
        return position

    def end_of(self, count: int) -> int:
        """The number after the last of the first `count` samples read."""
        return self.sample_at(count - 1) + 1 if count > 0 else 0

    def samples_at(self, positions: range) -> Sequence[int]:
        """Those read after that number of others."""
        if not self.ranges or self.ranges[0][0] >= positions.stop:
            return positions
        return [self.sample_at(position) for position in positions]

    def to_list(self) -> list[list[int]]:
        return [[first, stop] for first, stop in self.ranges]


def ranges_of(samples: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges (first, after the last)."""
    return list(LeftOut.of((sample, sample + 1) for sample in samples).ranges)


@dataclass(frozen=True)
class BatchSchedule:
    """The batch of every step. Steps count from 0, as the loader's batches do."""

    batch: int
    ramp: Ramp | None = None
    # Where it begins: a run may have taken other batches before.
    first_step: int = 0
    first_sample: int = 0
    left_out: LeftOut = LeftOut()

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

    def samples_of(self, step: int) -> Sequence[int]:
        """The numbers of the samples of a step."""
        return self.left_out.samples_at(range(self.consumed(step), self.consumed(step + 1)))

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
