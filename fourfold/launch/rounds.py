"""Where the machines of a run meet: torch's c10d rendezvous, and a report of each in its store.

torch decides who takes part in a round: `DynamicRendezvousHandler` over a `TCPStore` on the machine
that --master names. What is said here beyond that is which process speaks for which machine, how
many ranks it has and in which order they come, so that all number the ranks alike.

Everything that asks the network runs in a thread that can be abandoned: where a cable is pulled,
no answer ever comes.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from fourfold.errors import UserError
from fourfold.launch.diagnosis import ranks
from fourfold.launch.peers import PeerExchange
from fourfold.launch.supervisor import Echo
from fourfold.meeting import Patience, reach, serve
from fourfold.signals import SupervisorSignals

# torch's rendezvous: who has said nothing for KEEP_ALIVE_SECONDS is out; once there are enough,
# others may still come for LAST_CALL_SECONDS.
KEEP_ALIVE_SECONDS = 5
LAST_CALL_SECONDS = 3.0
JOIN_SECONDS = 600.0
STORE_SECONDS = 10.0
OUTCOME = "fourfold/outcome"


@dataclass(frozen=True)
class Machines:
    """How many machines take part, which one this is, and where they meet."""

    fewest: int
    most: int
    node_rank: int | None
    host: str
    port: int

    @property
    def where(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def elastic(self) -> bool:
        return self.fewest < self.most

    def is_host(self) -> bool:
        """Whether the meeting place is on this machine."""
        if self.node_rank is not None:
            return self.node_rank == 0
        try:
            found = socket.getaddrinfo(self.host, 0, type=socket.SOCK_DGRAM)
        except OSError:
            return False
        return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


class MeetingLost(Exception):
    """The place where the machines meet does not answer."""


class MemberLost(Exception):
    """A machine that torch counts among those of a round was lost before it said who it is."""


class MeetingClosed(Exception):
    """The others have ended the run; with which exit code, if they say so."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class RoundMember:
    """A machine of a round: which process speaks for it, and how many ranks it has."""

    index: int
    host: str
    nproc: int
    order: int


@dataclass(frozen=True)
class RendezvousRound:
    token: str
    number: int
    members: list[RoundMember]  # in the order of their ranks
    own: RoundMember

    @property
    def world_size(self) -> int:
        return sum(member.nproc for member in self.members)

    @property
    def first_rank(self) -> int:
        return self.ranks_of(self.own.index).start

    def ranks_of(self, index: int) -> range:
        """Those of the machine that this process speaks for."""
        place = [member.index for member in self.members].index(index)
        first = sum(member.nproc for member in self.members[:place])
        return range(first, first + self.members[place].nproc)


class Meeting:
    """This machine's connection to the others, until it is lost."""

    def __init__(
        self,
        machines: Machines,
        host: str,
        signals: SupervisorSignals,
        tell: Echo,
        server: TCPStore | None = None,
    ) -> None:
        """`server` is that of an earlier meeting of this process. A second one beside it would part
        those that are still connected to the first from all others."""
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
            C10dRendezvousBackend,
        )
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        # Machines that were there before do not publish a shared store again, for which one that
        # comes later would wait in vain (torch 2.13).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.machines, self.host, self.tell = machines, host, tell
        self.server = server or (self._serve() if machines.is_host() else None)
        with self._answering():
            self.store = self._connect(signals)
            backend = C10dRendezvousBackend(self._connect(signals), "fourfold")
            self.handler = DynamicRendezvousHandler.from_backend(
                "fourfold",
                self._connect(signals),
                backend,
                machines.fewest,
                machines.most,
                local_addr=host,
                timeout=RendezvousTimeout(
                    join=timedelta(seconds=JOIN_SECONDS),
                    last_call=timedelta(seconds=LAST_CALL_SECONDS),
                    close=timedelta(seconds=STORE_SECONDS),
                ),
                keep_alive_interval=1,
                keep_alive_max_attempt=KEEP_ALIVE_SECONDS,
            )
            self.exchange = PeerExchange(
                self._connect(signals), host, self.handler.num_nodes_waiting
            )
        self.abandoned = False
        # The machines of the last round by the number of their speaker, with what to call them.
        self._last: dict[int, str] = {}

    def _serve(self) -> TCPStore | None:
        try:
            return serve(self.machines.host, self.machines.port)
        except UserError:
            if self.machines.node_rank is None:
                return None  # another agent of this machine serves it
            raise

    def _connect(self, signals: SupervisorSignals) -> TCPStore:
        """A connection for each that asks: one waits while another one's question is open."""
        machines = self.machines
        store = reach(
            machines.host,
            machines.port,
            JOIN_SECONDS,
            f"{machines.host} at {machines.where}",
            Patience(self.tell),
            lambda: signals.received is not None,
        )
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        return store

    def join(
        self, nproc: int, signals: SupervisorSignals, lost_seconds: float
    ) -> RendezvousRound | None:
        """Wait for a round to take part in; None if a signal came first."""
        self.exchange.wait_for_round()
        patience, found = Patience(self.tell), Joining(self, nproc)
        while found.is_alive() or isinstance(found.error, MemberLost):
            if isinstance(found.error, MemberLost):
                self.tell(f"fourfold: {found.error}")
                found = Joining(self, nproc)
            signals.wait(0.1)
            if signals.received is not None:
                return None
            if self.exchange.broken or self.exchange.quiet_seconds() > lost_seconds:
                raise MeetingLost(self.silence())
            self._tell_of_lost(self._last, lost_seconds)
            patience.waiting(self._missing())
        if isinstance(found.error, BaseException):
            self._explain(found.error)
        assert found.round is not None
        here = {member.index for member in found.round.members}
        self._tell_of_lost(self._last.keys() - here, self.exchange.suspicious_seconds)
        self._last = {
            member.index: f"{member.host} ({ranks([*found.round.ranks_of(member.index)])})"
            for member in found.round.members
        }
        return found.round

    def told_lost(self, indices: Iterable[int]) -> None:
        """These were named when the round ended."""
        for index in indices:
            self._last.pop(index, None)

    def _tell_of_lost(self, members: Iterable[int], seconds: float) -> None:
        """Name those that were lost between two rounds, where no rank misses them: a second fault
        while the run recovers from a first. One that left by itself has said so."""
        exchange = self.exchange
        left = exchange.marks.get("leaving", "")
        for index in [index for index in members if exchange.unheard_seconds(index) > seconds]:
            named = self._last.pop(index)
            if not left or not named.startswith(f"{left} ("):
                self.tell(
                    f"fourfold: {named} has not been heard of for "
                    f"{exchange.unheard_seconds(index):.0f} s, last before this round: the machine,"
                    " its network or its `fourfold train` is gone"
                )

    def silence(self) -> str:
        return (
            f"{self.machines.where}, where the machines meet, does not answer: "
            f"{self.machines.host}, its `fourfold train` or the network to it is gone"
        )

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Torch has two kinds of errors for a connection that was closed."""
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        try:
            yield
        except (RuntimeError, RendezvousConnectionError) as error:
            raise MeetingLost(self.silence()) from error

    def _missing(self) -> str:
        here = [report.host for report in self.exchange.present()]
        busy = [report for report in self.exchange.present() if report.round]
        if len(here) >= self.machines.fewest and busy:
            return f"the next checkpoint of the machines that train at {self.machines.where}"
        missing = max(self.machines.fewest - len(here), 0)
        if not missing:
            return f"the machines at {self.machines.where} to agree ({', '.join(here)} are here)"
        kind = "machine" if self.machines.fewest == 1 else "machines"
        return (
            f"{missing} of {self.machines.fewest} {kind} at {self.machines.where} "
            f"(here: {', '.join(here)})"
        )

    def _explain(self, error: BaseException) -> None:
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousTimeoutError,
        )

        if isinstance(error, RendezvousClosedError):
            raise MeetingClosed(
                f"the other machines have ended the run that met at {self.machines.where}",
                self._outcome(),
            ) from error
        if isinstance(error, RendezvousTimeoutError):
            raise MeetingClosed(
                f"gave up after {JOIN_SECONDS:g} s: still waiting for {self._missing()}"
            ) from error
        with self._answering():
            raise error

    def _outcome(self) -> int:
        try:
            return int(self.store.get(OUTCOME)) if self.store.check([OUTCOME]) else 1
        except (RuntimeError, ValueError):
            return 1

    def abandon(self) -> None:
        """Leave without a word: nobody would hear it."""
        self.abandoned = True
        self.exchange.close(wait_seconds=0.0)
        # A network that comes back must not find a machine that nobody speaks for any more. In a
        # thread, because it waits for the answer to a question.
        threading.Thread(target=self.handler._stop_heartbeats, daemon=True).start()

    def close(self, code: int, seconds: float) -> None:
        """Leave, the run having ended with this code. Whose store it is stays until the others
        have left too, or are gone."""
        self.exchange.say_last(OUTCOME, str(code))
        self.exchange.leave()
        closing = threading.Thread(target=self.handler.shutdown, daemon=True)
        closing.start()
        closing.join(STORE_SECONDS / 2)
        deadline = time.monotonic() + seconds
        while self.server is not None and time.monotonic() < deadline:
            if self.exchange.are_through():
                break
            time.sleep(0.1)
        self.exchange.close()


class Joining(threading.Thread):
    """Joins the next round; in a thread, since the network may never answer."""

    def __init__(self, meeting: Meeting, nproc: int) -> None:
        super().__init__(name="joining", daemon=True)
        self.meeting, self.nproc = meeting, nproc
        self.round: RendezvousRound | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.round = self._join()
        except BaseException as error:
            self.error = error

    def _join(self) -> RendezvousRound:
        meeting = self.meeting
        found = meeting.handler.next_rendezvous()
        if meeting.abandoned:
            meeting.abandon()
            raise RuntimeError("joined too late")
        order = meeting.machines.node_rank
        if order is None:
            order = 0 if meeting.server is not None else 1 + found.rank
        own = RoundMember(meeting.exchange.index, meeting.host, self.nproc, order)
        note = asdict(own)
        if found.rank == 0:
            number = meeting.store.add("fourfold/rounds", 1) - 1
            note |= {"token": secrets.token_hex(8), "number": number}
        found.store.set(f"fourfold/member/{found.rank}", json.dumps(note))
        keys = [f"fourfold/member/{rank}" for rank in range(found.world_size)]
        self._wait_for_all(found.store, keys)
        notes = [json.loads(found.store.get(key)) for key in keys]
        names = ("index", "host", "nproc", "order")
        members = [RoundMember(*(note[name] for name in names)) for note in notes]
        members.sort(key=lambda member: (member.order, member.index))
        return RendezvousRound(notes[0]["token"], notes[0]["number"], members, own)

    def _wait_for_all(self, store: Store, keys: list[str]) -> None:
        """As long as torch takes to miss a machine: the next round then does without it."""
        deadline = time.monotonic() + KEEP_ALIVE_SECONDS
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = sum(not store.check([key]) for key in keys)
                are = "was" if missing == 1 else "were"
                raise MemberLost(
                    f"{missing} of the {len(keys)} machines of a round {are} lost before it began; "
                    "the others meet again"
                )
            time.sleep(0.1)
