"""Ranks that another launcher started, torchrun, srun or mpirun: what they say when one fails.

No process of ours watches them, so each speaks for itself in the store where they met, and answers
from a thread while its main thread waits in a collective. When an error reaches the top of a rank,
that rank says whose it is before it ends: its own, that of a rank which has said so first, that of
a machine nobody hears any more, or that of a rank which the others wait for.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fourfold import heartbeat
from fourfold.errors import INTERRUPTED_EXIT, USER_ERROR_EXIT, RunError, UserError
from fourfold.launch.diagnosis import (
    LOST_PEER,
    Frame,
    RankStack,
    explain_hang,
    ranks,
)
from fourfold.launch.peers import ENDED, PeerExchange, RankState, RoundEnd
from fourfold.meeting import MEETING, open_store

SEARCH_SECONDS = 8.0
STACKS_SECONDS = 5.0
# How long the rank that serves the store stays for the others to read why it ended.
LINGER_SECONDS = 6.0
POLL_SECONDS = 0.1


@contextmanager
def speaking_for(rank: int, size: int, timeout_seconds: float) -> Iterator[None]:
    """Run this rank's work: an error that only follows from another one is told as that one."""
    if size == 1:
        yield
        return
    store = open_store(rank, size, timeout_seconds)
    voice = Voice(PeerExchange(store, socket.gethostname()), rank, size)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        told = voice.explain(error)
        voice.linger()
        if told is not None:
            raise RunError(told) from error
        raise
    finally:
        voice.exchange.leave()
        voice.exchange.close()


class Voice:
    """One rank among the others."""

    def __init__(self, exchange: PeerExchange, rank: int, size: int) -> None:
        self.exchange, self.rank, self.size = exchange, rank, size
        self.host = socket.gethostname()
        self.serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        self.is_searching = exchange.listens = False
        exchange.enter("ranks", self._state)

    def _state(self) -> dict[int, RankState]:
        last = heartbeat.last_beat()
        if "stacks" not in self.exchange.marks:
            idle = max(0.0, time.monotonic() - last.seconds) if last.seconds else 0.0
            return {self.rank: RankState(last.step, last.phase, idle)}
        self.exchange.has_stacks()
        # One that looks for the cause has waited for others; where it is now says nothing.
        waits = True if self.is_searching else None
        stack = RankStack(self.rank, last, "?", main_frames(), waits=waits)
        return {self.rank: RankState.of(stack)}

    def explain(self, error: BaseException) -> str | None:
        """What to say in place of the error, where it is another's; None where it is our own."""
        words = "".join(traceback.format_exception(error))
        if LOST_PEER.search(words[-20_000:]) is None or isinstance(error, UserError):
            self._confess(error)
            return None
        self.is_searching = self.exchange.listens = True
        end = self._search()
        if end is None:
            return None
        lines = [line.removeprefix("fourfold: ") for line in end.lines]
        last = heartbeat.last_beat()
        seen = f"rank {self.rank} on {self.host} noticed at {last}: {_last_line(error)}"
        return "\n".join([*lines, f"    {seen}"])

    def _confess(self, error: BaseException) -> None:
        last = heartbeat.last_beat()
        said = f"rank {self.rank} on {self.host} failed at {last}: {_last_line(error)}"
        code = 1
        if isinstance(error, UserError):
            said, code = str(error), USER_ERROR_EXIT
        elif isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED_EXIT
        self.exchange.post_end(RoundEnd([f"fourfold: {said}"], code))

    def _search(self) -> RoundEnd | None:
        exchange = self.exchange
        deadline = time.monotonic() + max(SEARCH_SECONDS, 2 * exchange.suspicious_seconds)
        began = time.monotonic()
        while time.monotonic() < deadline:
            if exchange.end is not None:
                return exchange.end
            if exchange.broken or exchange.quiet_seconds() > exchange.suspicious_seconds:
                return RoundEnd([self._without_store()])
            heard = time.monotonic() - began > exchange.suspicious_seconds
            if heard and (silent := exchange.silent(self._others(), exchange.suspicious_seconds)):
                return exchange.post_end(RoundEnd(self._lost(silent)))
            time.sleep(POLL_SECONDS)
        stacks = self._stacks()
        if exchange.end is not None or not any(not stack.waits_for_others for stack in stacks):
            return exchange.end
        return exchange.post_end(RoundEnd(explain_hang(stacks, None)))

    def _others(self) -> list[int]:
        return [index for index in [*self.exchange.seen] if index != self.exchange.index]

    def _without_store(self) -> str:
        where = os.environ[MEETING].rpartition("/")[0]
        return (
            f"fourfold: {where}, where the ranks met, does not answer: its machine, rank 0 or the "
            f"network between it and {self.host} is gone"
        )

    def _lost(self, silent: list[int]) -> list[str]:
        """By host: a machine that is lost has lost all its ranks."""
        hosts: dict[str, dict[int, RankState]] = {}
        for index in silent:
            report = self.exchange.seen[index].report
            hosts.setdefault(report.host or "a machine", {}).update(report.ranks)
        lines = []
        for host, states in sorted(hosts.items()):
            where = max(states.values(), key=lambda s: s.step) if states else "its start"
            lines.append(
                f"fourfold: {ranks(sorted(states)) if states else 'a rank'} on {host} "
                f"{'has' if len(states) == 1 else 'have'} not been heard of for some seconds, last "
                f"at {where}: the machine, its network or the process is gone"
            )
        return lines

    def _stacks(self) -> list[RankStack]:
        self.exchange.mark("stacks", str(self.rank))
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline:
            reports = [seen.report for seen in [*self.exchange.seen.values()]]
            if all(report.has_stacks or report.status == ENDED for report in reports):
                break
            time.sleep(POLL_SECONDS)
        return sorted(
            (
                state.stack_of(rank, seen.report.host)
                for index, seen in [*self.exchange.seen.items()]
                for rank, state in seen.report.ranks.items()
                if index != self.exchange.index and seen.report.status != ENDED
            ),
            key=lambda stack: stack.rank,
        )

    def linger(self) -> None:
        """The store is gone with this process: first let the others read it."""
        self.exchange.listens = True
        self.exchange.leave()
        deadline = time.monotonic() + LINGER_SECONDS
        while self.serves and time.monotonic() < deadline:
            if self.exchange.are_through():
                return
            time.sleep(POLL_SECONDS)


def main_frames() -> list[Frame]:
    """Where the main thread of this process is, innermost first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found


def _last_line(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.partition("\n")[0][:300]
