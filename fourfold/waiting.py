"""How long this process stood still for others: in collectives, and in the pipeline's bubble.

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
class Waited:
    """Seconds since the process began."""

    communication: float = 0.0
    bubble: float = 0.0

    def since(self, before: Waited) -> Waited:
        return Waited(self.communication - before.communication, self.bubble - before.bubble)

    def copy(self) -> Waited:
        return Waited(self.communication, self.bubble)


waited = Waited()


@contextmanager
def uncounted() -> Iterator[None]:
    """What is waited for in this block is no part of any step."""
    before = waited.copy()
    try:
        yield
    finally:
        waited.communication, waited.bubble = before.communication, before.bubble


@contextmanager
def communicating() -> Iterator[None]:
    """Count the time of this block as communication."""
    start = time.perf_counter()
    try:
        yield
    finally:
        waited.communication += time.perf_counter() - start
