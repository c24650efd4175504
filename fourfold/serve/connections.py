"""uvicorn's HTTP/1.1 connection with the one bound it lacks: the time a request's head may take.

Without it, a few hundred connections that never finish their first line would be all the server
accepts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fourfold.serve.limits import Limits


def timed_protocol(limits: Limits) -> type[H11Protocol]:
    class TimedProtocol(H11Protocol):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """A timer runs exactly while a head is awaited; bytes do not prolong it."""
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.head_seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return TimedProtocol
