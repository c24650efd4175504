"""The server: from a configuration to a listening socket with routes, until a signal ends it.

    serve(config, name, ...)     checks, binds, loads, serves
    create_app(service)          the Starlette application: routes, replies, streams of events

Whatever can be refused is refused before any weight is read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.generate.module import GenerationModule
from fourfold.serve.http import (
    SecurityMiddleware,
    access_log,
    bounded_protocol,
    client_of,
    read_body,
)
from fourfold.serve.metrics import Metrics
from fourfold.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Limits,
)
from fourfold.serve.replies import ChatReply, CompletionReply, Json, Reply, ReplyChoice
from fourfold.serve.requests import ServingContext, chat_sequences, completion_sequences
from fourfold.serve.worker import CompletionJob, Worker

TOKEN_VARIABLE = "FOURFOLD_TOKEN"
SHORTEST_TOKEN = 16
Notice = Callable[[str], None]


def serve(
    config: Config,
    name: str,
    *,
    host: str,
    port: int,
    token: str | None,
    slots: int,
    limits: Limits,
    logs_requests: bool,
    on_notice: Notice,
) -> bool:
    """Serve the configuration's model until a signal ends it. `name` is the model's for clients.

    Returns False if a model failure ended it instead: clients got an error, and the log says why.
    """
    check_servable(config)
    listener = bind(host, port, token)
    try:
        service = make_service(config, name, token, slots, limits, on_notice)
        server = make_server(service)
        if logs_requests:
            log_requests()
        on_notice(f"{service.context.positions} positions, {slots} slots")
        on_notice(f"serving {name} at {url_of(listener)}")
        with quiet_signals():
            server.run(sockets=[listener])
        return not service.worker.failed
    finally:
        listener.close()


def make_service(
    config: Config,
    name: str,
    token: str | None,
    slots: int,
    limits: Limits,
    on_notice: Notice,
) -> Service:
    module = GenerationModule(config, on_notice)
    for key, is_set, field in (
        ("num_return_sequences", config.Generation.num_return_sequences != 1, "n"),
        ("seed", config.Generation.seed is not None, "seed"),
    ):
        if is_set:
            on_notice(f"Generation.{key} has no effect here; each request sets its own, {field}")
    metrics = Metrics()
    context = ServingContext(
        tokenizer=module.tokenizer,
        defaults=replace(module.options, num_return_sequences=1),
        default_stop=tuple(config.Generation.stop),
        positions=module.decoder.max_positions,
        limits=limits,
    )
    worker = Worker(module, slots, limits, metrics)
    return Service(name, int(time.time()), context, worker, metrics, token)


def make_server(service: Service) -> uvicorn.Server:
    limits = service.context.limits
    settings = uvicorn.Config(
        create_app(service),
        http=bounded_protocol(limits),
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(limits.shutdown_seconds),
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    server = uvicorn.Server(settings)
    # Without its model a server is of no use, and one that ends can be started again.
    service.worker.on_failure = lambda: setattr(server, "should_exit", True)
    return server


def log_requests() -> None:
    """A line for each request on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access_log.addHandler(handler)
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


def check_servable(config: Config) -> None:
    if config.Generation.decode_strategy == "beam_search":
        raise UserError(
            "Generation.decode_strategy='beam_search' cannot be served, since its texts cannot "
            "share a batch; set sampling or greedy_search"
        )


# -- address and token --------------------------------------------------------------------------


def bind(host: str, port: int, token: str | None) -> socket.socket:
    """A socket at the address, which must be this machine's own unless there is a token."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"--host {host}: {error}; name an address of this machine") from None
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    if token is None and not all(address.is_loopback for address in addresses):
        raise UserError(
            f"--host {host} can be reached from other machines, and without a token anyone there "
            f"could use the model; give one with --token-file or {TOKEN_VARIABLE}, or keep to "
            "127.0.0.1"
        )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        listener.close()
        raise UserError(
            f"{host} port {port}: {error.strerror}; choose another with --port, or --port 0 for "
            "any that is free"
        ) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_token(file: Path | None) -> str | None:
    """The token of a file, or of the environment; None where there is neither."""
    if file is None:
        source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        source = str(file)
        try:
            with file.open("rb") as stream:
                token = stream.read(4097).decode("ascii", "replace")
        except OSError as error:
            raise UserError(f"--token-file {file}: {error.strerror}") from None
    token = token.strip()
    plain = token.isascii() and token.isprintable() and " " not in token
    if not (SHORTEST_TOKEN <= len(token) <= 4096 and plain):
        raise UserError(
            f"{source}: a token is one word of at least {SHORTEST_TOKEN} letters, digits and "
            "signs; make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


@contextmanager
def quiet_signals() -> Iterator[None]:
    """uvicorn ends at these signals and raises them once more; by then all is done."""
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


# -- the application ----------------------------------------------------------------------------

# OpenAI's clients know by it that a stream ended whole.
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Service:
    """All the routes need."""

    name: str
    created: int
    context: ServingContext
    worker: Worker
    metrics: Metrics
    token: str | None


def create_app(service: Service) -> Starlette:
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, service.context.limits)
        check(body, service)
        sequences = await asyncio.to_thread(completion_sequences, body, service.context)
        reply = CompletionReply(sequences, service.name, body.logprobs is not None)
        job = service.worker.submit(sequences, client_of(request.scope))
        return await answer(request, body, reply, job)

    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest, service.context.limits)
        check(body, service)
        sequences = await asyncio.to_thread(chat_sequences, body, service.context)
        reply = ChatReply(sequences, service.name, bool(body.logprobs))
        job = service.worker.submit(sequences, client_of(request.scope))
        return await answer(request, body, reply, job)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [describe(service)]})

    async def model(request: Request) -> Response:
        check_name(request.path_params["name"], service)
        return JSONResponse(describe(service))

    async def health(_: Request) -> Response:
        if not service.worker.alive:
            raise ApiError(503, "the server is not ready to write")
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        worker = service.worker
        text = service.metrics.render(worker.running, worker.waiting, worker.slots)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    page, policy = load_page()

    async def playground(_: Request) -> Response:
        return Response(page, media_type="text/html", headers={"content-security-policy": policy})

    routes = [
        Route("/", playground),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    guard = Middleware(
        SecurityMiddleware,
        token=service.token,
        limits=service.context.limits,
        metrics=service.metrics,
        known_paths=[route.path for route in routes],
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        seconds = service.context.limits.shutdown_seconds
        await asyncio.to_thread(service.worker.stop, seconds)

    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: refuse,
        HTTPException: refuse_http,
    }
    return Starlette(
        routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan
    )


# -- errors -------------------------------------------------------------------------------------


async def refuse(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def refuse_http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]!r}"
    else:
        message = f"{request.method[:20]} {request.url.path[:200]!r}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)


def check(body: GenerationRequest, service: Service) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: needs stream: true", param="stream_options")
    if body.model is not None:
        check_name(body.model, service)


def check_name(name: str, service: Service) -> None:
    if name != service.name:
        raise ApiError(
            404,
            f"model {name[:100]!r} is not served here; the one that is: {service.name!r}",
            param="model",
            code="model_not_found",
        )


def describe(service: Service) -> Json:
    """OpenAI's four fields, the length as vLLM names it, and what a request leaves out."""
    context, defaults = service.context, service.context.defaults
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "fourfold",
        "max_model_len": context.positions,
        "defaults": {
            "max_tokens": defaults.max_dec_len,
            "temperature": 0.0
            if defaults.decode_strategy == "greedy_search"
            else defaults.temperature,
            "top_p": defaults.top_p,
            "top_k": defaults.top_k,
        },
    }


# -- replies ------------------------------------------------------------------------------------


async def answer(
    request: Request, body: GenerationRequest, reply: Reply, job: CompletionJob
) -> Response:
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(events(reply, job, with_usage), job)
    collecting = asyncio.ensure_future(collect(reply, job))
    leaving = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)  # nobody is there to read it
        return JSONResponse(collecting.result())
    finally:
        collecting.cancel()
        leaving.cancel()
        job.cancel()


async def collect(reply: Reply, job: CompletionJob) -> Json:
    choices = [ReplyChoice() for _ in job.requests]
    async for piece in job:
        choices[piece.choice].add(piece)
    return reply.whole(choices, job.new_tokens)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(reply: Reply, job: CompletionJob, with_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events: a chunk for each piece. An error ends the stream in place of DONE."""
    try:
        for opening in reply.openings():
            yield event(opening)
        async for piece in job:
            yield event(reply.chunk(piece))
        if with_usage:
            yield event(reply.closing(job.new_tokens))
        yield DONE
    except ApiError as error:
        yield event(error.body)


def event(content: Json) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Frees the job's slots however the stream ends, even one that never began."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], job: CompletionJob) -> None:
        super().__init__(content, headers={"x-accel-buffering": "no"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


# -- the playground -----------------------------------------------------------------------------


def load_page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy. The hashes are those of what is in the file."""
    text = files("fourfold.serve").joinpath("playground.html").read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return text.encode(), policy


def _hash(text: str, tag: str) -> str:
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
