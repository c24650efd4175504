"""Signs of life: where each rank of a supervised run stands, in memory its supervisor can read.

The supervisor makes a `Board` before it forks; a forked rank attaches to its row of it and from
then on `beat(step, phase)` costs about a microsecond. Without a board `beat` does nothing. The
memory outlives a rank that dies, so the last beat tells where it was.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_BEAT = struct.Struct("dq24s")  # monotonic seconds, step, phase
_FAILURE = struct.Struct("qd")  # bytes in the log before the error, monotonic seconds
_ROW = 64
assert _BEAT.size + _FAILURE.size <= _ROW


@dataclass(frozen=True)
class Beat:
    """What a rank said last; `seconds` is monotonic time, 0.0 before its first word."""

    seconds: float
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.phase else "its start"


@dataclass(frozen=True)
class Failure:
    """When an error ended a rank, and where in its log that error begins."""

    seconds: float
    log_offset: int


class Board:
    """One row per rank in anonymous shared memory; each row has one writer, its rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._memory = mmap.mmap(-1, ranks * _ROW)

    def beat(self, rank: int, step: int, phase: str) -> None:
        _BEAT.pack_into(self._memory, rank * _ROW, time.monotonic(), step, phase.encode()[:24])

    def last_beat(self, rank: int) -> Beat:
        seconds, step, phase = _BEAT.unpack_from(self._memory, rank * _ROW)
        return Beat(seconds, step, phase.rstrip(b"\0").decode(errors="replace"))

    def newest(self) -> float:
        """Monotonic time of the last beat of any rank."""
        return max(self.last_beat(rank).seconds for rank in range(self.ranks))

    def fail(self, rank: int, log_offset: int) -> None:
        place = rank * _ROW + _BEAT.size
        _FAILURE.pack_into(self._memory, place, log_offset, time.monotonic())

    def failure(self, rank: int) -> Failure | None:
        offset, seconds = _FAILURE.unpack_from(self._memory, rank * _ROW + _BEAT.size)
        return Failure(seconds, offset) if seconds else None


_attached: tuple[Board, int] | None = None


def attach(board: Board, rank: int) -> None:
    """Make this process the writer of row `rank`."""
    global _attached
    _attached = (board, rank)


def is_attached() -> bool:
    """Whether this process is a rank, whose supervisor says what ended it."""
    return _attached is not None


def beat(step: int, phase: str) -> None:
    """Say that this rank lives and what it is about to do, such as "forward_backward"."""
    if _attached is not None:
        board, rank = _attached
        board.beat(rank, step, phase)
