"""Heartbeats: where each rank of a supervised run is, in memory its supervisor can read.

The supervisor makes a `Board` before it forks; a forked rank attaches to its row of it and from
then on `beat(step, phase)` costs about a microsecond. Inside a phase that may take long, `alive()`
says that it makes progress: after each micro-batch, each file written, each block read. Nothing
beats on a timer, because a rank that hangs would beat too. The memory outlives a rank that dies, so
the last beat shows where it was.

Waiting ranks can receive the beats as well, by `relay`; see `mesh`.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

_BEAT = struct.Struct("dq24s")  # monotonic seconds, step, phase
_FAILURE = struct.Struct("qd")  # bytes in the log before the error, monotonic seconds
_ROW = 64
WORDS_BYTES = 2048
# The last phase of a rank that ended well: asked to stop and saved, or at the end of its work.
STOPPED, FINISHED = "stopped", "finished"
assert _BEAT.size + _FAILURE.size <= _ROW


@dataclass(frozen=True)
class Beat:
    """A rank's last beat; `seconds` is monotonic time, 0.0 before the first."""

    seconds: float
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.phase else "its start"


@dataclass(frozen=True)
class Failure:
    """When an error ended a rank, and where that error begins in its log."""

    seconds: float
    log_offset: int
    words: str = ""  # the error itself, in short: the log may be on a disk that is gone


class Board:
    """One row per rank in anonymous shared memory; each row has one writer, its rank.

    The ranks of a machine are numbered from `first`, the same for one machine alone and of many.
    """

    def __init__(self, ranks: int, first: int = 0) -> None:
        self.ranks = range(first, first + ranks)
        self._memory = mmap.mmap(-1, ranks * _ROW)
        self._words = mmap.mmap(-1, ranks * WORDS_BYTES)

    def beat(self, rank: int, step: int, phase: str) -> None:
        place = self._row(rank)
        _BEAT.pack_into(self._memory, place, time.monotonic(), step, phase.encode()[:24])

    def last_beat(self, rank: int) -> Beat:
        seconds, step, phase = _BEAT.unpack_from(self._memory, self._row(rank))
        return Beat(seconds, step, phase.rstrip(b"\0").decode(errors="replace"))

    def newest(self) -> float:
        """Monotonic time of the last beat of any rank."""
        return max(self.last_beat(rank).seconds for rank in self.ranks)

    def fail(self, rank: int, log_offset: int, words: str = "") -> None:
        text, start = words.encode()[:WORDS_BYTES], (rank - self.ranks.start) * WORDS_BYTES
        self._words[start : start + len(text)] = text
        place = self._row(rank) + _BEAT.size
        _FAILURE.pack_into(self._memory, place, log_offset, time.monotonic())

    def failure(self, rank: int) -> Failure | None:
        offset, seconds = _FAILURE.unpack_from(self._memory, self._row(rank) + _BEAT.size)
        if not seconds:
            return None
        start = (rank - self.ranks.start) * WORDS_BYTES
        words = self._words[start : start + WORDS_BYTES].rstrip(b"\0")
        return Failure(seconds, offset, words.decode(errors="replace"))

    def _row(self, rank: int) -> int:
        return (rank - self.ranks.start) * _ROW


class Relay:
    """Relays that this process makes progress, at most every `every_seconds`."""

    def __init__(self, tell: Callable[[], None], every_seconds: float) -> None:
        self._tell = tell
        self._every_seconds = every_seconds
        self._next = 0.0

    def progress(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_seconds
            self._tell()


_attached: tuple[Board, int] | None = None
_relay: Relay | None = None
_last: tuple[int, str] = (0, "start")
_last_seconds = time.monotonic()


def attach(board: Board, rank: int) -> None:
    """Make this process the writer of row `rank`."""
    global _attached
    _attached = (board, rank)


def is_attached() -> bool:
    """Whether this process is a rank, whose supervisor reports what ended it."""
    return _attached is not None


def relay(tell: Callable[[], None] | None, every_seconds: float = 1.0) -> None:
    """From now on, relay beats by calling `tell`, or (None) no longer."""
    global _relay
    _relay = None if tell is None else Relay(tell, every_seconds)


def beat(step: int, phase: str) -> None:
    """Report that this rank is alive and what it is about to do, such as "forward_backward"."""
    global _last
    _last = (step, phase)
    alive()


def alive() -> None:
    """Report that the phase of the last beat makes progress."""
    global _last_seconds
    _last_seconds = time.monotonic()
    if _attached is not None:
        board, rank = _attached
        board.beat(rank, *_last)
    if _relay is not None:
        _relay.progress()


def last_beat() -> Beat:
    """This process's own, whether or not anybody supervises it."""
    return Beat(_last_seconds, *_last)
