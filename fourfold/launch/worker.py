"""What a forked rank does, from its first instruction to its last.

It takes its place (environment, log, signals, threads), runs the work and leaves by `os._exit`:
the frames below it on the stack belong to the supervisor and must not be unwound here.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from fourfold import heartbeat
from fourfold.errors import report
from fourfold.launch.diagnosis import Log
from fourfold.launch.kernel import die_with_parent
from fourfold.signals import STOP_SIGNALS, answer_with_stacks, forget_answers


@dataclass(frozen=True)
class Place:
    """Where a rank stands and what it was given by the supervisor, process `supervisor`."""

    rank: int
    nproc: int
    attempt: int
    store: Path
    log: Log
    board: heartbeat.Board
    supervisor: int

    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "FOURFOLD_ATTEMPT": str(self.attempt),
            "FOURFOLD_STORE": str(self.store),
        }


def run_rank(work: Callable[[], None], place: Place) -> NoReturn:
    """Run `work` as one rank and end this process: 0, 2 after a `UserError`, 1 after others."""
    code = 1
    try:
        _take(place)
        code = _exit_code(work, place)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _take(place: Place) -> None:
    die_with_parent(place.supervisor)
    forget_answers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _redirect_output(place.log)
    os.environ.update(place.environment())
    heartbeat.attach(place.board, place.rank)
    heartbeat.beat(0, "start")
    faulthandler.enable(sys.stderr)
    answer_with_stacks()
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        from fourfold.processors import num_processors

        torch.set_num_threads(max(1, num_processors() // place.nproc))


def _redirect_output(log: Log) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    # Aside first: where the supervisor had closed one of the three, either may stand in its place.
    output = fcntl.fcntl(log.descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    # Line by line, so that a rank that is killed has said what it had to say.
    sys.stdout, sys.stderr = _lines_to(1), _lines_to(2)


def _lines_to(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _exit_code(work: Callable[[], None], place: Place) -> int:
    try:
        work()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        sys.stdout.flush()
        # Noted before the message is written and any connection closes: this is the order in
        # which ranks failed, and the supervisor finds the message from here on.
        place.board.fail(place.rank, place.log.size())
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            return error.code
        return report(error)
    return 0
