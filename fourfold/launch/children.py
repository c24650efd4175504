"""The processes of one attempt, seen from the supervisor: forked, reaped, signalled, killed.

All ranks and whatever they start are one process group. Its leader is the keeper, a process that
only waits: should the supervisor die, even by SIGKILL, the pipe between them closes and the keeper
kills the group. While the keeper is not reaped the kernel gives its number to nobody else, so
signals to the group cannot go astray.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from fourfold.heartbeat import Board
from fourfold.launch.diagnosis import Ending, Log
from fourfold.launch.kernel import adopt_orphans
from fourfold.launch.worker import Place, run_rank
from fourfold.signals import STACKS_SIGNAL, STOP_SIGNALS

# How long the kernel may take to remove processes that were killed.
REMOVAL_SECONDS = 5.0

LOG_NAME = "attempt_{attempt}/rank_{rank}.log"


class Children:
    """`nproc` forked ranks. Use as a context: at its end nothing of them is left."""

    def __init__(
        self,
        work: Callable[[], None],
        nproc: int,
        attempt: int,
        log_dir: Path,
        store: Path,
        log_name: str = LOG_NAME,
    ) -> None:
        self.board = Board(nproc)
        names = [log_name.format(attempt=attempt, rank=rank) for rank in range(nproc)]
        self.logs = [Log(log_dir / name, attempt) for name in names]
        self.endings: list[Ending] = []
        self.running: dict[int, int] = {}  # rank to process id
        self._disturbed = False
        adopt_orphans(True)
        self._keeper, self._lifeline = _start_keeper(store.parent)
        try:
            for rank, log in enumerate(self.logs):
                place = Place(rank, nproc, attempt, store, log, self.board, os.getpid())
                self.running[rank] = self._fork(work, place)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()
        for log in self.logs:
            log.close()

    @property
    def log_dir(self) -> Path:
        return self.logs[0].path.parent

    @property
    def failures(self) -> list[Ending]:
        """Ranks that did not end well, and not because we made them."""
        return [end for end in self.endings if end.status != 0 and not end.disturbed]

    def reap(self) -> None:
        """Note which ranks have ended since the last call."""
        for rank, pid in list(self.running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.running[rank]
                self.endings.append(self._ending(rank, os.waitstatus_to_exitcode(status)))

    def signal(self, number: int) -> None:
        """Send a signal to the ranks still running, not to what they started."""
        for pid in self.running.values():
            os.kill(pid, number)

    def terminate(self) -> None:
        """Ask the ranks to end; how they do so from now on says nothing about the run."""
        self._disturbed = True
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything that is left, ranks and what they started, and wait until it is gone."""
        self._disturbed = True
        if not self._keeper:
            return
        os.killpg(self._keeper, signal.SIGKILL)
        # Bounded, because a process that waits for a dead file system cannot be killed.
        deadline = time.monotonic() + REMOVAL_SECONDS
        while self._some_are_left() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.close(self._lifeline)
        adopt_orphans(False)
        self._keeper = 0

    def _some_are_left(self) -> bool:
        self.reap()
        if self.running:
            return True
        try:
            while os.waitpid(-self._keeper, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True

    def _fork(self, work: Callable[[], None], place: Place) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        # A stop that arrives before the rank has handlers of its own must wait, not get lost.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            os.close(self._lifeline)
            os.setpgid(0, self._keeper)
            run_rank(work, place)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, self._keeper)  # whoever of the two comes first
        return pid

    def _ending(self, rank: int, status: int) -> Ending:
        return Ending(
            rank=rank,
            status=status,
            noticed=time.monotonic(),
            disturbed=self._disturbed,
            failure=self.board.failure(rank),
            last=self.board.last_beat(rank),
            log=self.logs[rank],
        )


def _start_keeper(leavings: Path) -> tuple[int, int]:
    """The leader of a new process group, and our end of the pipe it watches."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        _keep(theirs, ours, leavings)
    os.close(theirs)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid, ours


def _keep(theirs: int, ours: int, leavings: Path) -> NoReturn:
    try:
        os.setpgid(0, 0)
        for number in (*STOP_SIGNALS, STACKS_SIGNAL):
            signal.signal(number, signal.SIG_IGN)
        os.close(ours)
        os.read(theirs, 1)
        # The supervisor is gone, and would have removed the place where its ranks met.
        shutil.rmtree(leavings, ignore_errors=True)
        os.kill(0, signal.SIGKILL)
    finally:
        os._exit(1)
