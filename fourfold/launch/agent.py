"""The agent: the supervisor of one machine of a run over several.

Who takes part is torch's own decision: its c10d rendezvous, the one behind `torchrun --nnodes
MIN:MAX`, with its rounds and keep-alives. What runs on a machine is our supervisor's: ranks forked
from a process that has imported everything, watched through their heartbeats. Between the two is
this loop:

    join a round -> plan for the ranks there are -> fork this machine's -> watch -> next round

A round ends for all machines at once, and all say the same: why it ended is written to the store
by whoever finds out first (`peers.RoundEnd`). A machine that is lost is named by the others; one
that wants to join is taken in after a checkpoint. One that cannot reach the meeting place any more
ends its ranks before it does anything else: others may be going on without it.
"""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.errors import USER_ERROR_EXIT, RunError, UserError
from fourfold.launch.diagnosis import (
    RankStack,
    explain,
    explain_hang,
    lost_a_peer,
    ranks,
    root_cause,
    take_stacks,
)
from fourfold.launch.peers import (
    PeerReport,
    RankState,
    RoundEnd,
    states_of,
)
from fourfold.launch.rounds import Machines, Meeting, MeetingClosed, MeetingLost, RendezvousRound
from fourfold.launch.supervisor import FAILED, Echo, Restarts, Watch, tell_of_stop
from fourfold.launch.workers import LOG_NAME, Ending, WorkerGroup, WorkerPlace
from fourfold.meeting import MEETING
from fourfold.signals import SupervisorSignals

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# How long to look for the cause where a rank has only lost its connection.
SEARCH_SECONDS = 8.0
STACKS_SECONDS = 5.0
LINGER_SECONDS = 15.0
# The phases in which a rank can be asked to stop and save.
TRAINING = {"reader", "forward_backward", "optimizer", "evaluate", "save"}


@dataclass(frozen=True)
class WatchLimits:
    hang_seconds: float  # without progress of any rank on any machine
    lost_seconds: float  # without a word from a machine
    stop_seconds: float
    grace_seconds: float = 2.0


# What to run for so many ranks in all; a `UserError` where they cannot run.
Plan = Callable[[int], Callable[[], object]]


def run_agent(
    machines: Machines,
    nproc: int,
    plan: Plan,
    log_dir: Path,
    limits: WatchLimits,
    restarts: Restarts,
    *,
    stopped_code: int = 0,
    threads: int | None = None,
    echo: Echo,
    tell: Echo,
) -> int:
    """Run this machine's part until the run has ended; the exit code, as of `supervise`."""
    with tempfile.TemporaryDirectory(prefix="fourfold-") as aside, SupervisorSignals() as signals:
        agent = Agent(machines, nproc, plan, log_dir, Path(aside), limits, restarts, signals)
        agent.stopped_code, agent.threads = stopped_code, threads
        agent.echo, agent.tell = echo, tell
        return agent.run()


class Agent:
    def __init__(
        self,
        machines: Machines,
        nproc: int,
        plan: Plan,
        log_dir: Path,
        aside: Path,
        limits: WatchLimits,
        restarts: Restarts,
        signals: SupervisorSignals,
    ) -> None:
        self.machines, self.nproc, self.plan, self.log_dir = machines, nproc, plan, log_dir
        self.aside, self.limits, self.restarts, self.signals = aside, limits, restarts, signals
        self.stopped_code = 0
        self.threads: int | None = None
        self.echo: Echo = print
        self.tell: Echo = print
        self.host = socket.gethostname()
        self.meeting: Meeting | None = None
        self._server: TCPStore | None = None
        self._was_stopped = False

    def run(self) -> int:
        code: int | None = None
        try:
            while code is None:
                code = self._round()
            return code
        finally:
            if self.meeting is not None:
                ended = FAILED if code is None else code
                self.meeting.close(ended, LINGER_SECONDS if ended else self.limits.stop_seconds)

    def _round(self) -> int | None:
        """One round; the exit code if it was the last."""
        try:
            if self.meeting is None:
                self.meeting = Meeting(
                    self.machines, self.host, self.signals, self.tell, self._server
                )
                self._server = self.meeting.server
            joined = self.meeting.join(self.nproc, self.signals, self.limits.lost_seconds)
            if joined is None:
                return self._stopped_while_waiting()
            code = self._take_part(self.meeting, joined)
        except MeetingLost as lost:
            self.tell(f"fourfold: {lost}")
            if self.meeting is not None:
                self.meeting.abandon()
            self.meeting, code = None, FAILED
        except MeetingClosed as closed:
            self.tell(f"fourfold: {closed}")
            return closed.code
        except RunError:
            if self.signals.received:
                return self._stopped_while_waiting()
            raise
        if code != FAILED:
            return code
        if self.signals.received:
            return tell_of_stop(self.signals.received, self.tell)
        if not self.restarts.another(self.tell):
            return code
        self.signals.wait_out(self.restarts.pause_seconds)
        return None

    def _stopped_while_waiting(self) -> int:
        assert self.signals.received is not None
        if self._was_stopped:
            return self.stopped_code
        return tell_of_stop(self.signals.received, self.tell)

    def _take_part(self, meeting: Meeting, joined: RendezvousRound) -> int | None:
        """This machine's part of a round: the exit code, or None if there is another round."""
        try:
            joined, work = self._plan(joined)
        except UserError as error:
            return self._cannot_start(
                meeting, joined, RoundEnd([f"fourfold: {error}"], USER_ERROR_EXIT)
            )
        if joined.own not in joined.members:
            return self._stand_by(meeting, joined)
        own = joined.own
        self._announce(joined)
        variables = {
            MEETING: f"{self.machines.where}/{joined.token}",
            "FOURFOLD_LAUNCH": f"{self.machines.where}",
            "MASTER_ADDR": self.machines.host,
            "MASTER_PORT": str(self.machines.port),
            "GROUP_RANK": str(joined.members.index(own)),
        }
        place = WorkerPlace(joined.first_rank, joined.world_size, variables)
        log_name = f"{self.host}/{LOG_NAME}"
        store = self.aside / "store"
        try:
            with meeting.exchange.speaking:
                workers = WorkerGroup(
                    *(work, self.nproc, joined.number, self.log_dir, store, log_name, self.threads),
                    place=place,
                )
        except UserError as error:
            # What was possible before may become so again: a disk that is full, for one.
            end = RoundEnd(
                [f"fourfold: {self.host}: {error}"], FAILED if joined.number else USER_ERROR_EXIT
            )
            return self._cannot_start(meeting, joined, end)
        with workers:
            watch = RoundWatch(self, meeting, joined, workers)
            code = watch.run()
        if workers.running:
            self.tell(f"fourfold: processes {[*workers.running.values()]} cannot be killed")
            return FAILED
        self._was_stopped = watch.stopped
        return code

    def _cannot_start(self, meeting: Meeting, joined: RendezvousRound, end: RoundEnd) -> int:
        meeting.exchange.enter(joined.token, dict)
        end = meeting.exchange.post_end(end)
        for line in end.lines:
            self.tell(line)
        meeting.exchange.leave()
        return end.code

    def _plan(self, joined: RendezvousRound) -> tuple[RendezvousRound, Callable[[], object]]:
        """What to run, on as many of the machines as can share it; all decide alike."""
        problem: UserError | None = None
        for count in range(len(joined.members), self.machines.fewest - 1, -1):
            some = replace(joined, members=joined.members[:count])
            try:
                work = self.plan(some.world_size)
            except UserError as error:
                problem = problem or error
                continue
            if problem is not None:
                spare = [member.host for member in joined.members[count:]]
                self.tell(f"fourfold: {', '.join(spare)} cannot be used now: {problem}")
            return some, work
        assert problem is not None
        raise problem

    def _stand_by(self, meeting: Meeting, joined: RendezvousRound) -> int | None:
        """No rank of the round is on this machine; wait for the next one."""
        exchange, members = meeting.exchange, [member.index for member in joined.members]
        exchange.enter(joined.token, dict)
        while self.signals.received is None:
            self.signals.wait(0.1)
            if exchange.broken or exchange.quiet_seconds() > self.limits.lost_seconds:
                raise MeetingLost(meeting.silence())
            if exchange.end is not None:
                for line in exchange.end.lines:
                    self.tell(line)
                exchange.leave()
                return exchange.end.code
            gone = exchange.silent(members, self.limits.lost_seconds)
            if gone or exchange.have_left(members, joined.token):
                return None
        return self.stopped_code

    def _announce(self, joined: RendezvousRound) -> None:
        own = joined.own
        mine = ranks([*range(joined.first_rank, joined.first_rank + own.nproc)])
        others = [member.host for member in joined.members if member != own]
        if others:
            self.tell(
                f"fourfold: {own.host} has {mine} of {joined.world_size}; with {', '.join(others)}"
            )


# -- one round, as this machine sees it ------------------------------------------------------------


class RoundWatch(Watch):
    """Waits for this machine's ranks, and for news of the others'."""

    def __init__(
        self, agent: Agent, meeting: Meeting, joined: RendezvousRound, workers: WorkerGroup
    ) -> None:
        limits = agent.limits
        seconds = (limits.hang_seconds, limits.stop_seconds, limits.grace_seconds)
        super().__init__(workers, agent.signals, agent.echo, agent.tell, *seconds)
        self.agent, self.joined, self.meeting = agent, joined, meeting
        self.exchange = meeting.exchange
        self.machines = agent.machines
        self.others = {m.index: m.host for m in joined.members if m.index != self.exchange.index}
        self.stopped = False
        self.exchange.enter(joined.token, self._states)

    def _states(self) -> dict[int, RankState]:
        return states_of(self.workers.board, self.workers.logs)

    def run(self) -> int | None:  # type: ignore[override]
        """The exit code of the run, or None if there is to be another round."""
        asked: float | None = None
        while self.workers.running:
            self._wait()
            if (end := self._find_end()) is not None:
                return self._end(end)
            if self.signals.wants_stacks:
                self._write_stacks()
            if asked is None and (number := self._stop_signal()) is not None:
                self.workers.signal(number)
                asked = time.monotonic()
            if asked is not None and self._stop_is_overdue(asked):
                return self._stopped()
        self.workers.kill()
        self.console.show(whole_lines=False)
        return self._after_all()

    def _find_end(self) -> RoundEnd | None:
        """Why the round has ended, if it has."""
        exchange, limits = self.exchange, self.agent.limits
        if exchange.end is not None:
            return exchange.end
        if self.workers.failures:
            return self._of_failure()
        self._check_meeting(limits.lost_seconds)
        if silent := exchange.silent(self.others, limits.lost_seconds):
            return self._lost(silent)
        if "stacks" in exchange.marks:
            return self._of_hang("a machine asks where all ranks are")
        if self._idle_seconds() > self.hang_seconds:
            return self._of_hang(f"no rank has made progress for {self.hang_seconds:g} s")
        return None

    def _end(self, end: RoundEnd) -> int:
        """Tell why, as everywhere, and end what is left here."""
        if end is not self.exchange.end:
            used = self.agent.restarts.used
            end = self.exchange.post_end(replace(end, used=used))
        # Where another machine has counted more restarts, so many there were.
        self.agent.restarts.used = max(self.agent.restarts.used, end.used)
        self.workers.kill()
        self.console.show(whole_lines=False)
        for line in end.lines:
            self.tell(line)
        self.meeting.told_lost(end.lost)
        self.exchange.leave()
        return end.code

    def _check_meeting(self, seconds: float) -> None:
        exchange, where = self.exchange, self.machines.where
        if exchange.broken or exchange.quiet_seconds() > seconds:
            self.workers.kill()
            self.console.show(whole_lines=False)
            how = f"has been silent for {seconds:g} s"
            if exchange.broken:
                how = f"was closed ({exchange.broken})"
            raise MeetingLost(
                f"the connection to {where}, where the machines meet, {how}: {self.machines.host}, "
                "its `fourfold train` or the network between it and "
                f"{self.agent.host} is gone. The ranks of {self.agent.host} were ended at "
                f"{self._furthest()}"
            )

    def _furthest(self) -> str:
        beats = [self.workers.board.last_beat(rank) for rank in self.workers.logs]
        return str(max(beats, key=lambda beat: beat.step))

    # -- whose fault ----------------------------------------------------------------------------

    def _of_failure(self) -> RoundEnd:
        """A rank of this machine failed. One that lost its connection follows from another's."""
        self._wait_for_ends(self.grace_seconds)
        cause = root_cause(self.workers.failures)
        if lost_a_peer(cause):
            return self._search(cause)
        lines = explain(cause, self.workers.endings, self.agent.host)
        return RoundEnd(lines, USER_ERROR_EXIT if cause.is_user_error else FAILED)

    def _search(self, cause: Ending) -> RoundEnd:
        deadline = time.monotonic() + max(SEARCH_SECONDS, 2 * self.exchange.suspicious_seconds)
        while time.monotonic() < deadline and not self.signals.urgent:
            self._check_meeting(self.exchange.suspicious_seconds)
            if self.exchange.end is not None:
                return self.exchange.end
            if silent := self.exchange.silent(self.others, self.exchange.suspicious_seconds):
                return self._lost(silent)
            self._wait()
        stacks = self._all_stacks()
        if self.exchange.end is not None:
            return self.exchange.end
        if any(not stack.waits_for_others for stack in stacks):
            observed = f"rank {cause.rank} on {self.agent.host} gave up waiting at {cause.last}"
            return RoundEnd([f"fourfold: {observed}", *explain_hang(stacks, self.agent.log_dir)])
        return RoundEnd(explain(cause, self.workers.endings, self.agent.host))

    def _lost(self, silent: Sequence[int]) -> RoundEnd:
        lines = []
        # Others may be about to follow: what took one has often taken more.
        silent = sorted(
            {*silent, *self.exchange.silent(self.others, self.exchange.suspicious_seconds)}
        )
        for index in silent:
            seen = self.exchange.seen.get(index)
            states = seen.report.ranks if seen else {}
            heard = time.monotonic() - seen.heard if seen else 0.0
            where = max(states.values(), key=lambda s: s.step) if states else "its start"
            who = ranks([*self.joined.ranks_of(index)])
            lines.append(
                f"fourfold: {self.others[index]} ({who}) has not been heard of for {heard:.0f} s, "
                f"last at {where}: the machine, its network or its `fourfold train` is gone"
            )
        return RoundEnd(lines, lost=tuple(silent))

    def _of_hang(self, observed: str) -> RoundEnd:
        self.console.show()
        stacks = self._all_stacks()
        if self.exchange.end is not None:
            return self.exchange.end
        lines = explain_hang(stacks, self.agent.log_dir) if stacks else []
        return RoundEnd([f"fourfold: {observed}", *lines])

    def _all_stacks(self) -> list[RankStack]:
        """The stacks of all ranks on all machines that answer; in the logs of each, and here."""
        if "stacks" not in self.exchange.marks:
            self.exchange.mark("stacks", self.agent.host)
        own = take_stacks(self.workers)
        self.exchange.show_stacks({stack.rank: RankState.of(stack) for stack in own})
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and self.exchange.end is None:
            missing = [i for i in self.others if not self._report_of(i).has_stacks]
            if not missing or self.exchange.broken:
                break
            self._wait()
        reports = {self.exchange.index: self.agent.host, **self.others}
        found = [
            state.stack_of(rank, host)
            for index, host in reports.items()
            for rank, state in self._report_of(index).ranks.items()
            if self._report_of(index).has_stacks
        ]
        return sorted(found, key=lambda stack: stack.rank)

    def _report_of(self, index: int) -> PeerReport:
        seen = self.exchange.seen.get(index)
        return seen.report if seen else PeerReport("")

    def _idle_seconds(self) -> float:
        """How long no rank of any machine has made progress, as far as is known."""
        own = self.hang_timer.measure()
        now = time.monotonic()
        theirs = [
            seen.report.idle_seconds + now - seen.heard
            for index, seen in [*self.exchange.seen.items()]
            if index in self.others
        ]
        return min([own, *theirs])

    # -- stops ----------------------------------------------------------------------------------

    def _stop_signal(self) -> signal.Signals | None:
        """What to send to the ranks, if they are to stop."""
        if self.signals.received is not None:
            if self.machines.elastic:
                self.exchange.mark("leaving", self.agent.host)
            return self.signals.received
        wanted = self.exchange.nodes_waiting
        if not wanted or not self.machines.elastic or not self._all_train():
            return None
        if 0 not in self.workers.logs or len(self.joined.members) >= self.machines.most:
            return None
        self.exchange.mark("regroup", self.agent.host)
        named = "1 more machine waits" if wanted == 1 else f"{wanted} more machines wait"
        self.tell(f"fourfold: {named} to join; the run saves at this step and takes it in")
        return signal.SIGTERM

    def _all_train(self) -> bool:
        board = self.workers.board
        return all(board.last_beat(rank).phase in TRAINING for rank in self.workers.logs)

    def _after_all(self) -> int | None:
        """All ranks have ended well: because the run is complete, or to stop, or to regroup."""
        self.stopped = self.was_stopped()
        if (end := self._wait_for_others()) is not None:
            return self._end(end)
        if not self.stopped:
            return 0
        again = bool(self.exchange.marks.keys() & {"regroup", "leaving"})
        if again and self.signals.received is None:
            return None
        return self.agent.stopped_code

    def _wait_for_others(self) -> RoundEnd | None:
        """Until all machines have ended the round well; what ended it otherwise."""
        exchange, deadline = self.exchange, time.monotonic() + self.stop_seconds
        exchange.leave()
        while time.monotonic() < deadline and not self.signals.urgent and exchange.end is None:
            if exchange.broken or exchange.quiet_seconds() > exchange.suspicious_seconds:
                break
            if exchange.have_left(self.others, self.joined.token):
                break
            if exchange.silent(self.others, self.agent.limits.lost_seconds):
                break
            self.signals.wait(0.1)
        return exchange.end
