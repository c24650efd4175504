"""Communication timer: how long this process waited in collectives and in the pipeline's bubble.

On a CPU a collective returns when it is done, so the time inside it is what it costs, including
the wait for ranks that come late. On a GPU these calls only queue work; the figures are then of
the host alone and are not shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class CommTimes:
    """Seconds since the process began."""

    communication: float = 0.0
    bubble: float = 0.0

    def since(self, before: CommTimes) -> CommTimes:
        return CommTimes(self.communication - before.communication, self.bubble - before.bubble)

    def copy(self) -> CommTimes:
        return CommTimes(self.communication, self.bubble)


comm_times = CommTimes()


@contextmanager
def excluded() -> Iterator[None]:
    """Leave what this block waits for out of the count: it is no part of any step."""
    before = comm_times.copy()
    try:
        yield
    finally:
        comm_times.communication, comm_times.bubble = before.communication, before.bubble


@contextmanager
def timed_comm() -> Iterator[None]:
    """Count the time of this block as communication."""
    start = time.perf_counter()
    try:
        yield
    finally:
        comm_times.communication += time.perf_counter() - start
