"""uvicorn's HTTP/1.1 connection with the bounds it lacks.

- A request's head has its time, and bytes that trickle in do not prolong it.
- Connections are counted. Beyond the limit the one that has waited longest for its next request
  makes way, so that idle ones cannot keep others out; where none is idle, some more are let in, of
  which the guard answers `/health` alone, and those beyond are closed.
- What still comes of a body that was refused is read for a while, so that the client can see its
  answer, and no longer.
- Bytes that are no request get an answer in the shape of all others.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fourfold.serve.limits import Limits
from fourfold.serve.protocol import ApiError


def bounded_protocol(limits: Limits) -> type[H11Protocol]:
    class BoundedProtocol(H11Protocol):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._head_timer: asyncio.TimerHandle | None = None
            self._body_timer: asyncio.TimerHandle | None = None
            self._idle_since = time.monotonic()
            self._unwanted_bytes = 0  # of a body whose request is answered

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._make_room()
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            if self._body_timer is not None:
                self._unwanted_bytes += len(data)
                if self._unwanted_bytes > limits.body_bytes:
                    self.transport.abort()
                    return
            super().data_received(data)
            if not self._body_is_unwanted:
                self._end_of_body()
            self._watch_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._idle_since = time.monotonic()
            if self._body_is_unwanted and not self.transport.is_closing():
                self._unwanted_bytes = 0
                self._body_timer = self.loop.call_later(limits.body_seconds, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            self._end_of_body()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.close()  # it has its answer, and this is what follows
                return
            error = ApiError(
                400,
                "not an HTTP/1.1 request, or one whose head is larger than "
                f"{limits.head_bytes} bytes",
            )
            body = json.dumps(error.body).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        # -- room -------------------------------------------------------------------------------

        @property
        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        @property
        def _body_is_unwanted(self) -> bool:
            return self._is_idle and self.conn.their_state is h11.SEND_BODY

        def _make_room(self) -> None:
            others = [
                one
                for one in self.connections
                if isinstance(one, BoundedProtocol)
                and one is not self
                and not one.transport.is_closing()
            ]
            if len(others) < limits.connections:
                return
            idle = [one for one in others if one._is_idle]
            if idle:
                min(idle, key=lambda one: one._idle_since).transport.close()
            elif len(others) >= limits.connections + limits.spare_connections:
                self.transport.abort()

        # -- time -------------------------------------------------------------------------------

        def _watch_head(self) -> None:
            """A timer runs exactly while a head is awaited; bytes do not prolong it."""
            if self.conn.their_state is not h11.IDLE:
                self._stop_head_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.head_seconds, self.transport.close)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _end_of_body(self) -> None:
            if self._body_timer is not None:
                self._body_timer.cancel()
                self._body_timer = None

    return BoundedProtocol
