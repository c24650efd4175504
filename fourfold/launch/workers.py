"""Worker processes: the forked ranks of one attempt, and what each does from start to end.

    WorkerGroup      the supervisor's side: forks, reaps, signals and kills the ranks
    run_rank         the rank's side: environment, log, signals, the work, an exit code
    RankLog, Ending  what a rank leaves behind

All ranks and whatever they start form one process group. Its leader is the reaper, a process that
only waits: should the supervisor die, even by SIGKILL, the pipe between them closes and the reaper
kills the group. Until the reaper itself is waited for, the kernel does not reuse its process id, so
signals to the group cannot reach anyone else.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import fcntl
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from fourfold import heartbeat
from fourfold.errors import USER_ERROR_EXIT, UserError, report, told
from fourfold.heartbeat import Beat, Board, Failure
from fourfold.processors import threads_of_rank
from fourfold.signals import STACKS_SIGNAL, STOP_SIGNALS, answer_with_stacks, forget_answers

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# How long the kernel may take to remove processes that were killed.
REMOVAL_SECONDS = 5.0

LOG_NAME = "attempt_{attempt}/rank_{rank}.log"


class WorkerGroup:
    """`nproc` forked ranks. A context manager: at its end none of their processes is left."""

    def __init__(
        self,
        work: Callable[[], object],
        nproc: int,
        attempt: int,
        log_dir: Path,
        store: Path,
        log_name: str = LOG_NAME,
        threads: int | None = None,
        place: WorkerPlace | None = None,
    ) -> None:
        place = place or WorkerPlace(0, nproc, {"FOURFOLD_STORE": str(store)})
        ranks = range(place.first_rank, place.first_rank + nproc)
        self.board = Board(nproc, place.first_rank)
        names = {rank: log_name.format(attempt=attempt, rank=rank) for rank in ranks}
        self.logs = {rank: RankLog(log_dir / name, attempt) for rank, name in names.items()}
        self.endings: list[Ending] = []
        self.running: dict[int, int] = {}  # rank to process id
        self._disturbed = False
        adopt_orphans(True)
        self._reaper, self._lifeline = _start_reaper(store.parent)
        try:
            for rank, log in self.logs.items():
                spec = RankSpec(rank, nproc, attempt, place, log, self.board, os.getpid(), threads)
                self.running[rank] = self._fork(work, spec)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()
        for log in self.logs.values():
            log.close()

    @property
    def log_dir(self) -> Path:
        return next(iter(self.logs.values())).path.parent

    @property
    def failures(self) -> list[Ending]:
        """Ranks that failed by themselves, not because the supervisor ended them."""
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
        """Ask the ranks to end; how they end from now on says nothing about the run."""
        self._disturbed = True
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything that is left, ranks and what they started, and wait until it is gone."""
        self._disturbed = True
        if not self._reaper:
            return
        os.killpg(self._reaper, signal.SIGKILL)
        # Bounded, because a process that waits for a dead file system cannot be killed.
        deadline = time.monotonic() + REMOVAL_SECONDS
        while self._some_are_left() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.close(self._lifeline)
        adopt_orphans(False)
        self._reaper = 0

    def _some_are_left(self) -> bool:
        self.reap()
        if self.running:
            return True
        try:
            while os.waitpid(-self._reaper, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True

    def _fork(self, work: Callable[[], object], spec: RankSpec) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        # A stop that arrives before the rank has handlers of its own must wait, not get lost.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            os.close(self._lifeline)
            os.setpgid(0, self._reaper)
            run_rank(work, spec)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, self._reaper)  # parent and child both do it; one comes first
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


def _start_reaper(store_dir: Path) -> tuple[int, int]:
    """The leader of a new process group, and our end of the pipe it watches."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        _reap_group(theirs, ours, store_dir)
    os.close(theirs)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid, ours


def _reap_group(theirs: int, ours: int, store_dir: Path) -> NoReturn:
    try:
        os.setpgid(0, 0)
        for number in (*STOP_SIGNALS, STACKS_SIGNAL):
            signal.signal(number, signal.SIG_IGN)
        os.close(ours)
        os.read(theirs, 1)
        # The supervisor is gone and can no longer remove the store its ranks met at.
        shutil.rmtree(store_dir, ignore_errors=True)
        os.kill(0, signal.SIGKILL)
    finally:
        os._exit(1)


# -- one rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPlace:
    """Which of all ranks of a run are those of this machine, and the variables by which they meet
    the others."""

    first_rank: int
    world_size: int
    variables: dict[str, str]


@dataclass(frozen=True)
class RankSpec:
    """What a rank gets from the supervisor, process `supervisor`."""

    rank: int
    nproc: int
    attempt: int
    place: WorkerPlace
    log: RankLog
    board: Board
    supervisor: int
    threads: int | None = None  # by default its share of the processors

    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank - self.place.first_rank),
            "WORLD_SIZE": str(self.place.world_size),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "FOURFOLD_ATTEMPT": str(self.attempt),
            **self.place.variables,
        }


def run_rank(work: Callable[[], object], spec: RankSpec) -> NoReturn:
    """Run `work` as one rank and end this process: 0, 2 after a `UserError`, 1 after others.

    By `os._exit`: the frames below it on the stack belong to the supervisor and must not be unwound
    here.
    """
    code = 1
    try:
        _set_up(spec)
        code = _exit_code(work, spec)
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    except BaseException as error:
        code = report(error)
    finally:
        os._exit(code)


def _set_up(spec: RankSpec) -> None:
    die_with_parent(spec.supervisor)
    forget_answers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _redirect_output(spec.log, shown=spec.rank == 0)
    os.environ.update(spec.environment())
    heartbeat.attach(spec.board, spec.rank)
    heartbeat.beat(0, "start")
    faulthandler.enable(sys.stderr)
    answer_with_stacks()
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(spec.threads or threads_of_rank(spec.nproc))


def _redirect_output(log: RankLog, shown: bool) -> None:
    # What is shown on the console is read from the log: on a full disk it goes there directly.
    console = os.dup(1) if shown and _is_open(1) else None
    nothing = os.open(os.devnull, os.O_RDONLY)
    # Moved above 2 first: where the supervisor has a closed stream, either may have its number.
    output = fcntl.fcntl(log.descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    # Line-buffered, so that the output of a rank that is killed is complete.
    sys.stdout, sys.stderr = _lines_to(1, console), _lines_to(2, console)


def _lines_to(descriptor: int, console: int | None) -> TextIO:
    raw = LogFile(descriptor, console)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class LogFile(io.FileIO):
    """A log that others see on the console, to which goes what its disk has no room for."""

    def __init__(self, descriptor: int, console: int | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._console = console

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self._console is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with suppress(OSError):
                os.write(self._console, data)
            return memoryview(data).nbytes


def _exit_code(work: Callable[[], object], spec: RankSpec) -> int:
    try:
        work()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        with suppress(OSError):  # the log may be on a disk that is gone
            sys.stdout.flush()
        # Noted before the message is written and any connection closes: this is the order in
        # which ranks failed, and the supervisor finds the message from here on.
        spec.board.fail(spec.rank, spec.log.size(), told(error))
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            return error.code
        return report(error)
    return 0


# -- what a rank leaves behind ------------------------------------------------------------------

# The most of a rank's log that is shown or searched.
MAX_TEXT_BYTES = 1 << 18


class RankLog:
    """What a rank writes in an attempt, kept open from the start.

    Both sides hold the open file, whatever becomes of its name, and a file that can no longer be
    read counts as empty: supervision does not depend on the logs.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        """Begin this attempt's part of a file that may hold earlier ones."""
        self.path = path
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self.descriptor, f"--- attempt {attempt}, {now}\n".encode())
        except OSError as error:
            raise UserError(f"cannot write the log {path}: {error.strerror or error}") from error
        self.start = self.size()

    def size(self) -> int:
        try:
            return os.fstat(self.descriptor).st_size
        except OSError:
            return 0

    def read(self, start: int, stop: int) -> bytes:
        try:
            return os.pread(self.descriptor, max(0, stop - start), start)
        except OSError:
            return b""

    def text(self, start: int) -> str:
        """From byte `start` to the end; only the last part of a very long text."""
        size = self.size()
        return self.read(max(start, size - MAX_TEXT_BYTES), size).decode(errors="replace")

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class Ending:
    """How a rank ended; `status` is its exit code, or minus the signal that killed it.

    `disturbed`: it ended after the supervisor began to end ranks itself.
    """

    rank: int
    status: int
    noticed: float
    disturbed: bool
    failure: Failure | None
    last: Beat
    log: RankLog

    @property
    def moment(self) -> float:
        return self.failure.seconds if self.failure else self.noticed

    @property
    def is_user_error(self) -> bool:
        return self.status == USER_ERROR_EXIT

    def error_text(self) -> str:
        """What the rank said about its end: its error, or the last it wrote before a signal."""
        text = self.log.text(self.failure.log_offset if self.failure else self.log.start)
        return text if text.strip() or self.failure is None else self.failure.words


# -- prctl: no process outlives its parent ------------------------------------------------------

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the request was made


def adopt_orphans(adopt: bool) -> None:
    """Whether orphaned descendants become children of this process, which can then reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process; "?" where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
