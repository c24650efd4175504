"""HTTP in bounds: connections, the security middleware, and the reading of request bodies.

    bounded_protocol(limits)     uvicorn's HTTP/1.1 connection with the bounds it lacks
    SecurityMiddleware           size, host, token, time and headers of every request and reply
    read_body(request, ...)      a body within its size and time, parsed

The middleware is plain ASGI around the application. It reads nothing of a request's body, and
nothing of a body or a query goes into the log of requests.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fourfold.serve.metrics import Metrics
from fourfold.serve.protocol import ApiError, Kind, Limits, parse

# Everything a browser could be talked into with these pages or replies is switched off. There are
# no CORS headers, so pages of other origins cannot read a reply.
HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
# The page itself holds no secret, and a supervisor's check has no token.
OPEN_PATHS = {"/", "/health"}
LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}
GRACE_SECONDS = 5.0
SERVER_ERROR = "an error of the server; its log says more"
TOO_LATE = "the model did not answer within the time limit; see the log"
log = logging.getLogger("fourfold.serve")
access_log = logging.getLogger("fourfold.serve.access")


class SecurityMiddleware:
    """The ASGI middleware that every request passes first and every reply last."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        limits: Limits,
        metrics: Metrics,
        known_paths: Iterable[str],
    ) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._limits = limits
        self._metrics = metrics
        self._known_paths = set(known_paths)
        self._under_way = 0
        self._guessing: Counter[str] = Counter()  # wrong tokens waiting for their answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499  # what proxies log where the client has left
        has_begun = is_whole = False

        async def send_guarded(message: Message) -> None:
            nonlocal status, has_begun, is_whole
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                headers = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")

        async def reply(error: ApiError) -> None:
            # uvicorn closes a connection whose reply has begun and is left unfinished.
            if not has_begun:
                response = JSONResponse(error.body, error.status, error.headers)
                await response(scope, receive, send_guarded)

        try:
            await self._check(scope)
            # The worker ends late requests itself; this ends clients that do not read.
            async with asyncio.timeout(self._limits.request_seconds + GRACE_SECONDS):
                with self._counted(scope):
                    await self._app(scope, receive, send_guarded)
        except ApiError as error:
            await reply(error)
        except TimeoutError:
            await reply(ApiError(504, TOO_LATE, code="timeout"))
        except Exception:
            # The traceback goes to the log, never to a client.
            log.exception("a request failed")
            await reply(ApiError(500, SERVER_ERROR))
        finally:
            seconds = time.monotonic() - began
            path = scope["path"] if scope["path"] in self._known_paths else "other"
            self._metrics.request(path, status, seconds)
            access_log.info(
                "%s %s %s %d %.3f s%s",
                (scope.get("client") or ("-",))[0],
                scope["method"][:20],
                scope["path"][:200].encode("unicode_escape").decode(),
                status,
                seconds,
                "" if is_whole else ", unfinished",
            )

    @contextmanager
    def _counted(self, scope: Scope) -> Iterator[None]:
        if self._under_way >= self._limits.connections and scope["path"] != "/health":
            raise ApiError(
                503,
                f"the server is busy with {self._limits.connections} requests, which is its limit; "
                "try again",
                code="overloaded",
                headers={"retry-after": "1", "connection": "close"},
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def _check(self, scope: Scope) -> None:
        self._check_head(scope)
        headers = Headers(scope=scope)
        if self._token is None:
            self._check_host(headers)
        elif scope["path"] not in OPEN_PATHS:
            await self._check_token(headers, client_of(scope))

    def _check_head(self, scope: Scope) -> None:
        """h11 counts heads only while they are incomplete."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
        if size > self._limits.head_bytes:
            raise ApiError(
                431,
                f"the head of the request is larger than the {self._limits.head_bytes} bytes it "
                "may have",
            )

    def _check_host(self, headers: Headers) -> None:
        """Without a token only this machine is served: a page elsewhere may point its own name at
        127.0.0.1 (DNS rebinding), but cannot hide that name."""
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if name not in LOOPBACK_NAMES:
            raise ApiError(
                403,
                f"host {host[:80]!r} is not served without a token; use http://127.0.0.1, or start "
                "the server with --token-file",
                code="forbidden_host",
            )

    async def _check_token(self, headers: Headers, client: str) -> None:
        """A wrong token is answered after a delay, and while many wait no other is checked: so few
        can be tried per second, and the response time reveals nothing."""
        assert self._token is not None
        if self._guessing[client] >= self._limits.guesses:
            raise ApiError(
                429,
                "too many wrong tokens came from this address; try again",
                code="too_many_guesses",
                headers={"retry-after": "1"},
            )
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the response time reveals nothing about the token.
        same = hmac.compare_digest(credentials.strip().encode(), self._token)
        if same and scheme.lower() == "bearer":
            return
        if credentials:
            self._guessing[client] += 1
            try:
                await asyncio.sleep(self._limits.guess_seconds)
            finally:
                self._guessing[client] -= 1
                self._guessing += Counter()  # forgets those at zero
        raise ApiError(
            401,
            "a token is needed: Authorization: Bearer TOKEN",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def client_of(scope: Scope) -> str:
    """The client a request is counted for: its address, or for IPv6 one subscriber's network."""
    address = (scope.get("client") or ("",))[0]
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


# -- bodies -------------------------------------------------------------------------------------


async def read_body(request: Request, kind: type[Kind], limits: Limits) -> Kind:
    # A form of another origin can send any text but this type, which browsers ask us about first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"content-type {content_type[:80]!r}: send application/json")
    data = await _bytes(request, limits)
    # Off the event loop: a million unknown fields take their time.
    return await asyncio.to_thread(parse, kind, data)


async def _bytes(request: Request, limits: Limits) -> bytes:
    too_large = ApiError(413, f"the body is larger than the {limits.body_bytes} bytes it may have")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.body_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                data += part
                if len(data) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {limits.body_seconds:g} seconds",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    return bytes(data)


# -- connections --------------------------------------------------------------------------------


def bounded_protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1 connection with the bounds it lacks.

    - A request's head has its time, and bytes that trickle in do not prolong it.
    - Connections are counted. Beyond the limit the one that has waited longest for its next
      request is closed, so that idle ones cannot keep others out; where none is idle, some more are
      let in, of which the middleware answers `/health` alone, and those beyond are closed.
    - What still comes of a body that was refused is read for a while, so that the client can see
      its answer.
    - Bytes that are no request get an answer in the shape of all others.
    """

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
