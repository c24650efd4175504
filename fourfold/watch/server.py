"""The page, served and following the runs, until a signal ends it.

The page asks for what is new every two seconds and names the versions it has: runs that have not
changed are left out of the answer. Runs are read when somebody asks, and only then. The rules are
those of `fourfold serve`: this machine alone unless there is a token, nothing from elsewhere,
bounds on everything a client sends. There is nothing here that a client could change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fourfold.errors import UserError
from fourfold.pages import load_page, policy_of
from fourfold.watch.reading import PAGE, RunReader, document_of
from fourfold.watch.run_files import Json

if TYPE_CHECKING:
    from starlette.applications import Starlette

MOST_KNOWN_CHARACTERS = 4096


class Following:
    """What the server answers with. Several browsers may ask at once: one reads at a time, and what
    it made of a run serves the others until the run has something new."""

    def __init__(self, readers: Sequence[RunReader], price: float | None) -> None:
        self._readers = readers
        self._price = price
        self._lock = threading.Lock()
        self._runs: list[Json | None] = [None] * len(readers)

    def news(self, known: Sequence[int]) -> Json:
        with self._lock:
            for reader in self._readers:
                reader.read()
            made = [-1 if run is None else run["version"] for run in self._runs]
            document = document_of(self._readers, self._price, made)
            self._runs = [new or old for new, old in zip(document["runs"], self._runs)]
            # A page that watched other runs at this address before has more versions, or fewer.
            versions = [*known, *(-1 for _ in self._runs)]
            runs = [
                None if run is None or run["version"] == version else run
                for run, version in zip(self._runs, versions)
            ]
            return {**document, "runs": runs}


def parse_known(text: str) -> list[int]:
    """The versions that a page has, as `3,0,12`; anything else asks for everything."""
    words = text[:MOST_KNOWN_CHARACTERS].split(",")
    return [int(word) if word.isascii() and word.isdecimal() else -1 for word in words]


def create_app(following: Following, token: str | None) -> Starlette:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from fourfold.serve import Limits
    from fourfold.serve.http import SecurityMiddleware
    from fourfold.serve.metrics import Metrics
    from fourfold.serve.protocol import ApiError
    from fourfold.serve.server import refuse, refuse_http

    text = load_page(*PAGE)
    policy = f"{policy_of(text, connects=True)}; frame-ancestors 'none'"

    async def page(_: Request) -> Response:
        return Response(text, media_type="text/html", headers={"content-security-policy": policy})

    async def news(request: Request) -> Response:
        known = parse_known(request.query_params.get("known", ""))
        try:
            return JSONResponse(await asyncio.to_thread(following.news, known))
        except UserError as error:
            # A disk that is away for a moment; the page says so and asks again.
            raise ApiError(503, str(error)) from error

    routes = [Route("/", page), Route("/news", news)]
    guard = Middleware(
        SecurityMiddleware,
        token=token,
        limits=Limits(),
        metrics=Metrics(),
        known_paths=[route.path for route in routes],
    )
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: refuse,
        HTTPException: refuse_http,
    }
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


def serve_page(
    readers: Sequence[RunReader],
    *,
    host: str,
    port: int,
    token: str | None,
    price: float | None,
    on_notice: Callable[[str], None],
) -> None:
    from fourfold.serve import Limits
    from fourfold.serve.server import bind, bounded_server, quiet_signals, url_of

    listener = bind(host, port, token, use="read what the runs recorded")
    try:
        server = bounded_server(create_app(Following(readers, price), token), Limits())
        names = ", ".join(reader.name for reader in readers)
        on_notice(f"watching {names} at {url_of(listener)}")
        with quiet_signals():
            server.run(sockets=[listener])
    finally:
        listener.close()
