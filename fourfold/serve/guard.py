"""What every request passes first and every reply last: host, token, time, and headers.

Plain ASGI around the application. Nothing of a request's body is read here.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourfold.serve.limits import Limits
from fourfold.serve.metrics import Metrics
from fourfold.serve.protocol import ApiError

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


class Guard:
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499  # what proxies log where the client has left
        began_reply = False

        async def send_guarded(message: Message) -> None:
            nonlocal status, began_reply
            if message["type"] == "http.response.start":
                status, began_reply = message["status"], True
                headers = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        async def reply(error: ApiError) -> None:
            # uvicorn closes a connection whose reply has begun and is left unfinished.
            if not began_reply:
                response = JSONResponse(error.body, error.status, error.headers)
                await response(scope, receive, send_guarded)

        try:
            self._check(scope)
            # The worker ends late requests itself; this ends clients that do not read.
            async with asyncio.timeout(self._limits.request_seconds + GRACE_SECONDS):
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
            path = scope["path"] if scope["path"] in self._known_paths else "other"
            self._metrics.request(path, status, time.monotonic() - began)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._token is None:
            self._check_host(headers)
        elif scope["path"] not in OPEN_PATHS:
            self._check_token(headers)

    def _check_host(self, headers: Headers) -> None:
        """Without a token only this machine is served: a page elsewhere may point its own name at
        127.0.0.1, and the name is what it cannot hide."""
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if name not in LOOPBACK_NAMES:
            raise ApiError(
                403,
                f"host {host[:80]!r} is not served without a token; use http://127.0.0.1, or start "
                "the server with --token-file",
                code="forbidden_host",
            )

    def _check_token(self, headers: Headers) -> None:
        assert self._token is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the time of the answer tells nothing about the token.
        same = hmac.compare_digest(given.strip().encode(), self._token)
        if not (same and scheme.lower() == "bearer"):
            raise ApiError(
                401,
                "a token is needed: Authorization: Bearer TOKEN",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
