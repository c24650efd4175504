"""How evenly the ranks work: who is slow, and what share of a step goes into waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

# A rank this much busier than the middle one, window after window, holds all the others up.
SLOW_FACTOR = 1.2
WINDOWS_TO_BE_SURE = 3


@dataclass(frozen=True)
class RankTimes:
    """A window's steps, over all ranks. Busy is the time a rank was not waiting for others."""

    busy_seconds_least: float
    busy_seconds_median: float
    busy_seconds_most: float
    slowest_rank: int
    communication_share: float  # of a step, mean over ranks
    bubble_share: float  # of a step the pipeline left empty, mean over ranks


@dataclass(frozen=True)
class OwnTimes:
    """One rank's mean step of a window."""

    batch_seconds: float
    communication_seconds: float
    bubble_seconds: float

    def values(self) -> tuple[float, float, float]:
        return (self.batch_seconds, self.communication_seconds, self.bubble_seconds)


def compare_ranks(rows: Sequence[Sequence[float]]) -> RankTimes:
    """`rows` are `OwnTimes.values` of every rank, by rank."""
    times = [OwnTimes(*row) for row in rows]
    busy = [t.batch_seconds - t.communication_seconds - t.bubble_seconds for t in times]
    whole = [max(t.batch_seconds, 1e-9) for t in times]
    return RankTimes(
        busy_seconds_least=min(busy),
        busy_seconds_median=median(busy),
        busy_seconds_most=max(busy),
        slowest_rank=busy.index(max(busy)),
        communication_share=fmean(t.communication_seconds / w for t, w in zip(times, whole)),
        bubble_share=fmean(t.bubble_seconds / w for t, w in zip(times, whole)),
    )


class Stragglers:
    """Tells, once for each, of a rank that stays the slowest by far."""

    def __init__(self) -> None:
        self.suspect: int | None = None
        self.windows = 0
        self.told: set[int] = set()

    def look(self, times: RankTimes) -> str | None:
        """What to say about this window, if anything."""
        slow = times.busy_seconds_most > SLOW_FACTOR * times.busy_seconds_median
        rank = times.slowest_rank if slow else None
        self.windows = self.windows + 1 if rank == self.suspect else 1
        self.suspect = rank
        if rank is None or rank in self.told or self.windows < WINDOWS_TO_BE_SURE:
            return None
        self.told.add(rank)
        return (
            f"rank {rank} holds the others up: busy for {times.busy_seconds_most:.3f} s of a step, "
            f"the middle rank for {times.busy_seconds_median:.3f} s"
        )
