"""Signal handling of a run, the same for a single process, a rank and a supervisor.

    SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2   finish the step, save and end well
    SIGINT after any of these               end at once: the person at the keyboard will not wait
    SIGQUIT                                 write the stacks of all threads and continue

Schedulers differ in what they send before they take a machine away, and a terminal that is closed
sends SIGHUP. Where that is ignored from the start, as under nohup, it stays ignored. Before
training begins there is nothing to save, and every request ends the process at once.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self

from fourfold import storage

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
STACKS_SIGNAL = signal.SIGQUIT
STOP_FILE = "STOP"
SAVE_FILE = "SAVE"


def _heeded() -> list[signal.Signals]:
    """The stop signals that this process handles."""
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not under_nohup]


def answer_with_stacks() -> None:
    """From now on, write the stacks of all threads to standard error on request."""
    # It believes its earlier registration still holds, though a supervisor's handler replaced it.
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.register(STACKS_SIGNAL, sys.__stderr__ or sys.stderr, all_threads=True)


def forget_answers() -> None:
    """In a forked process: drop the parent's handlers; until we have our own, signals end us."""
    signal.set_wakeup_fd(-1)
    for number in (*_heeded(), signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class StopSignals:
    """A context in which stop signals are only recorded: `received` is the first."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in self._listened():
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            # None was set outside Python, which cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous = {}

    def _listened(self) -> list[signal.Signals]:
        # In a thread of another program (Ray's workers), signals are that program's.
        return _heeded() if threading.current_thread() is threading.main_thread() else []

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            self._hurry()
        self.received = self.received or signal.Signals(number)

    def _hurry(self) -> None:
        raise NotImplementedError


class StopRequest(StopSignals):
    """Listens, in a process that trains, for the stop signals and a file named STOP.

    All ranks stop if one is asked to, so the file is looked for by one rank only.
    """

    def __init__(self, output_dir: Path, watches_file: bool = True) -> None:
        super().__init__()
        self._file = output_dir / STOP_FILE
        self._watches_file = watches_file
        self._found_file = False

    def reason(self) -> str | None:
        """Why the run should stop now, or None. A STOP file is used up by asking."""
        if self.received is not None:
            return self.received.name
        # Not Path.exists: that raises where the file system does not answer.
        if self._watches_file and not self._found_file and os.path.exists(self._file):
            self._found_file = True
            with suppress(OSError):
                self._file.unlink()
        return f"the file {self._file}" if self._found_file else None

    def _hurry(self) -> None:
        raise KeyboardInterrupt  # what was committed before stays good


class SaveRequest:
    """A file named SAVE in the run directory asks for a checkpoint now.

    All ranks save if one is asked to, so it is looked for by one rank only, which removes it once a
    checkpoint begun after it appeared is committed.
    """

    def __init__(self, output_dir: Path, watches_file: bool = True) -> None:
        self._file = output_dir / SAVE_FILE
        self._watches_file = watches_file
        self._taken: int | None = None

    def asked(self) -> bool:
        """Whether there is a request that no save has been begun for."""
        stamp = self._stamp()
        return stamp is not None and stamp != self._taken

    def take(self) -> None:
        """A save begins: what is asked for by now is in it."""
        self._taken = self._stamp()

    def committed(self) -> None:
        """The save taken last is committed. One asked for since then stays a request."""
        if self._taken is None:
            return
        if self._stamp() == self._taken:
            address = storage.address_of(self._file)
            with suppress(OSError):
                if address is not None:
                    storage.remove(address)
                self._file.unlink()
        self._taken = None

    def _stamp(self) -> int | None:
        if not self._watches_file:
            return None
        try:
            return os.stat(self._file).st_mtime_ns
        except OSError:
            return None


class SupervisorSignals(StopSignals):
    """The same in a supervisor, which `wait` wakes up for any signal and the end of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.urgent = False
        self.wants_stacks = False
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)

    def __enter__(self) -> Self:
        self._previous_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._awake.close()
        self._wake.close()

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, for at most `seconds`."""
        if select.select([self._awake], [], [], seconds)[0]:
            self._awake.recv(4096)

    def wait_out(self, seconds: float) -> None:
        """Sleep for `seconds`, unless a stop is requested."""
        deadline = time.monotonic() + seconds
        while self.received is None and (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def _listened(self) -> list[signal.Signals]:
        return [*super()._listened(), STACKS_SIGNAL, signal.SIGCHLD]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == STACKS_SIGNAL:
            self.wants_stacks = True
        elif number != signal.SIGCHLD:
            super()._receive(number, frame)

    def _hurry(self) -> None:
        self.urgent = True
