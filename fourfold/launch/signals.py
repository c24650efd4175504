"""Signals to the supervisor: stop requests are noted, the end of a child wakes it up."""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType


class Signals:
    """A context in which SIGTERM and SIGINT only ask, and `wait` returns when a signal comes.

    A SIGINT after any request means that the person at the keyboard will not wait.
    """

    def __init__(self) -> None:
        self.stop: int | None = None
        self.urgent = False
        self._previous: dict[int, object] = {}
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)

    def __enter__(self) -> Signals:
        self._previous_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        self._awake.close()
        self._wake.close()

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, at most so long."""
        if select.select([self._awake], [], [], seconds)[0]:
            self._awake.recv(4096)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        self.urgent = self.urgent or (self.stop is not None and number == signal.SIGINT)
        self.stop = self.stop or number
