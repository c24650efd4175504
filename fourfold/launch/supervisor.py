"""The supervisor: runs the ranks of one machine until all have ended, and restarts them if asked.

The caller has imported what the work needs and run no torch operation, so that forking is safe
and a restart takes tenths of a second. Only the output of rank 0 reaches the console and, after a
failure, the error of the rank that failed first.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from fourfold.errors import USER_ERROR_EXIT, say
from fourfold.heartbeat import STOPPED
from fourfold.launch.diagnosis import (
    STACKS_PLACE,
    explain,
    explain_hang,
    lost_a_peer,
    root_cause,
    take_stacks,
)
from fourfold.launch.workers import LOG_NAME, WorkerGroup
from fourfold.signals import STACKS_SIGNAL, SupervisorSignals

POLL_SECONDS = 0.1
TERMINATE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0

FAILED = 1

Echo = Callable[[str], None]


def supervise(
    work: Callable[[], object],
    nproc: int,
    log_dir: Path,
    *,
    max_restarts: int = 0,
    hang_seconds: float = 600.0,
    stop_seconds: float = 600.0,
    grace_seconds: float = 10.0,
    first_pause_seconds: float = 1.0,
    saved_step: Callable[[], int | None] | None = None,
    copied_step: Callable[[], int | None] | None = None,
    log_name: str = LOG_NAME,
    threads: int | None = None,
    stopped_code: int = 0,
    echo: Echo | None = None,
    tell: Echo | None = None,
) -> int:
    """Run `work` in `nproc` forked ranks until all have ended; the exit code for the command.

    0 when all ranks succeeded (`stopped_code` after a stop that was saved), 2 after a `UserError`,
    128 + n after a stop by signal n that ranks did not survive, else 1. `saved_step` returns the
    step of the last checkpoint, if there is one:
    where the run resumes, and whether it made progress; `copied_step` that of the newest copy in
    this machine's memory, which may be later. `log_name` is where a rank writes below
    `log_dir`, `threads` those of each rank (default: its share of the processors). `echo` gets the
    lines of rank 0 (default: standard output), and `tell` those of the supervisor itself (default:
    standard error).
    """
    assert nproc >= 1 and max_restarts >= 0
    echo = echo or partial(say, stream=sys.stdout)
    tell = tell or partial(say, stream=sys.stderr)
    restarts = Restarts(max_restarts, first_pause_seconds, saved_step, copied_step)
    with tempfile.TemporaryDirectory(prefix="fourfold-") as stores, SupervisorSignals() as signals:
        for attempt in count():
            store = Path(stores) / f"store_{attempt}"
            with WorkerGroup(work, nproc, attempt, log_dir, store, log_name, threads) as workers:
                limits = (hang_seconds, stop_seconds, grace_seconds)
                watch = Watch(workers, signals, echo, tell, *limits)
                code = watch.run()
            if workers.running:
                tell(f"fourfold: processes {[*workers.running.values()]} cannot be killed")
                return FAILED
            if code == 0:
                return stopped_code if watch.was_stopped() else 0
            if code != FAILED or signals.received or not restarts.another(tell):
                return code
            signals.wait_out(restarts.pause_seconds)
            if signals.received:
                return tell_of_stop(signals.received, tell)
    raise AssertionError("count() has no end")


class Restarts:
    """The restart policy: how often a failed run is restarted, from where and how soon.

    Only restarts since the last new checkpoint count: a run that makes progress between failures
    may have any number of them. The pauses double, because a machine's trouble may take a minute
    to pass.
    """

    def __init__(
        self,
        most: int,
        first_pause_seconds: float,
        saved_step: Callable[[], int | None] | None,
        copied_step: Callable[[], int | None] | None = None,
    ) -> None:
        self.most = most
        self.used = 0
        self._first_pause_seconds = first_pause_seconds
        self._saved_step, self._copied_step = saved_step, copied_step
        self._steps = self._look()

    def _look(self) -> tuple[int | None, int | None]:
        """Of the last checkpoint, and of the newest copy if it is later."""
        saved = self._saved_step() if self._saved_step else None
        copied = self._copied_step() if self._copied_step else None
        if copied is not None and copied <= (saved or 0):
            copied = None
        return saved, copied

    @property
    def pause_seconds(self) -> float:
        doubled = 2.0 ** min(self.used - 1, 16)
        return min(self._first_pause_seconds * doubled, LONGEST_PAUSE_SECONDS)

    def another(self, tell: Echo) -> bool:
        """Whether to restart once more; announces it if so."""
        step, copied = steps = self._look()
        if steps != self._steps:
            self.used, self._steps = 0, steps
        if self.used == self.most:
            return False
        self.used += 1
        where = "the beginning" if step is None else f"step {step}"
        if copied is not None:
            where += f", or from copies in memory (up to step {copied} here),"
        tell(
            f"fourfold: restarting all ranks{f' from {where}' if self._saved_step else ''} in "
            f"{self.pause_seconds:g} s (restart {self.used} of {self.most})"
        )
        return True


def tell_of_stop(number: signal.Signals, tell: Echo) -> int:
    """Report a run that was asked to stop and had to be killed; its exit code."""
    tell(f"fourfold: ended by {number.name}; checkpoints saved before that are intact")
    return 128 + number


class Watch:
    """One attempt: waits for its ranks, and ends them on a failure, a hang or a stop signal."""

    def __init__(
        self,
        workers: WorkerGroup,
        signals: SupervisorSignals,
        echo: Echo,
        tell: Echo,
        hang_seconds: float,
        stop_seconds: float,
        grace_seconds: float,
    ) -> None:
        self.workers = workers
        self.signals = signals
        self.tell = tell
        self.hang_seconds = hang_seconds
        self.stop_seconds = stop_seconds
        self.grace_seconds = grace_seconds
        self.hang_timer = HangTimer(workers)
        self.console = RankZeroLines(workers, echo)

    def run(self) -> int:
        """Wait until no rank is running or one has failed; the exit code of the attempt."""
        stopping: float | None = None
        while self.workers.running:
            self._wait()
            if self.workers.failures:
                return self._fail()
            if self.hang_timer.measure() > self.hang_seconds:
                return self._hang(f"no rank has made progress for {self.hang_seconds:g} s")
            if self.signals.wants_stacks:
                self._write_stacks()
            if self.signals.received and stopping is None:
                self.workers.signal(self.signals.received)
                stopping = time.monotonic()
            if stopping is not None and self._stop_is_overdue(stopping):
                return self._stopped()
        self.workers.kill()
        self.console.show(whole_lines=False)
        return 0

    def was_stopped(self) -> bool:
        """Whether ranks that ended well did so because they were asked to, and saved."""
        board = self.workers.board
        return any(board.last_beat(rank).phase == STOPPED for rank in self.workers.logs)

    def _wait(self) -> None:
        self.signals.wait(POLL_SECONDS)
        self.workers.reap()
        self.console.show()

    def _wait_for_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.workers.running and time.monotonic() < deadline and not self.signals.urgent:
            self._wait()

    def _fail(self) -> int:
        """A rank failed: give the others time to notice, end those that do not, and explain."""
        workers = self.workers
        self._wait_for_ends(self.grace_seconds)
        cause = root_cause(workers.failures)
        if lost_a_peer(cause) and workers.running:
            # It waited in vain for a rank that is still running: that one is to blame.
            return self._hang(f"rank {cause.rank} gave up waiting at {cause.last}")
        workers.terminate()
        self._wait_for_ends(min(TERMINATE_SECONDS, self.grace_seconds))
        stop = self.signals.received
        if stop and cause.status in (-stop, 128 + stop):
            return self._stopped()
        workers.kill()
        self.console.show(whole_lines=False)
        for line in explain(cause, workers.endings):
            self.tell(line)
        return USER_ERROR_EXIT if cause.is_user_error else FAILED

    def _hang(self, observed: str) -> int:
        self.console.show()
        stacks = take_stacks(self.workers)
        self.tell(f"fourfold: {observed}")
        for line in explain_hang(stacks, self.workers.log_dir):
            self.tell(line)
        self.workers.kill()
        return FAILED

    def _write_stacks(self) -> None:
        """On request, have every rank write its stacks to its log and continue."""
        self.signals.wants_stacks = False
        self.workers.signal(STACKS_SIGNAL)
        self.tell(STACKS_PLACE.format(directory=self.workers.log_dir))

    def _stop_is_overdue(self, asked: float) -> bool:
        """A rank that takes long to save sends heartbeats meanwhile, which extend its time."""
        if self.signals.urgent:
            return True
        if time.monotonic() - max(asked, self.workers.board.newest()) <= self.stop_seconds:
            return False
        self.tell(f"fourfold: the ranks did not stop within {self.stop_seconds:g} s")
        return True

    def _stopped(self) -> int:
        assert self.signals.received is not None
        self.workers.kill()
        self.console.show(whole_lines=False)
        return tell_of_stop(self.signals.received, self.tell)


class HangTimer:
    """Seconds without a heartbeat of any rank, allowing for a supervisor that was suspended."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._board = workers.board
        self._newest = self._board.newest()
        self._looked = time.monotonic()
        self._seconds = 0.0

    def measure(self) -> float:
        newest, now = self._board.newest(), time.monotonic()
        # A suspended supervisor misses heartbeats, and its ranks may have been suspended too: a gap
        # between two polls counts as little more than the usual one.
        self._seconds += min(now - self._looked, 10 * POLL_SECONDS)
        if newest != self._newest:
            self._seconds = 0.0
        self._newest, self._looked = newest, now
        return self._seconds


class RankZeroLines:
    """Passes on what rank 0 writes, line by line, up to the error that ends it."""

    def __init__(self, workers: WorkerGroup, echo: Echo) -> None:
        self._board = workers.board
        self._log = workers.logs.get(0)  # none where rank 0 is on another machine
        self._offset = self._log.start if self._log else 0
        self._echo = echo

    def show(self, whole_lines: bool = True) -> None:
        """Pass on what is new since the last call; at the end also an unfinished line."""
        if self._log is None:
            return
        failure = self._board.failure(0)
        end = self._log.size() if failure is None else failure.log_offset
        self._offset = min(self._offset, end)  # the file may have been truncated
        text = self._log.read(self._offset, end)
        if whole_lines:
            text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        for line in text.decode(errors="replace").splitlines():
            self._echo(line)
