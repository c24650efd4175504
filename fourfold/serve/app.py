"""The HTTP side: routes, and how a job becomes a reply or a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fourfold.serve import asking, bodies
from fourfold.serve.asking import Terms
from fourfold.serve.guard import Guard, client_of
from fourfold.serve.metrics import Metrics
from fourfold.serve.page import load_page
from fourfold.serve.protocol import ApiError, ChatRequest, CompletionRequest
from fourfold.serve.protocol import Request as Asked
from fourfold.serve.replies import ChatReply, Choice, CompletionReply, Json, Reply
from fourfold.serve.worker import Job, Worker

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# OpenAI's clients know by it that a stream ended whole.
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Service:
    """All the routes need."""

    name: str
    created: int
    terms: Terms
    worker: Worker
    metrics: Metrics
    token: str | None


def create_app(service: Service) -> Starlette:
    async def completions(request: Request) -> Response:
        body = await bodies.read(request, CompletionRequest, service.terms.limits)
        check(body, service)
        wanted = await asyncio.to_thread(asking.completion, body, service.terms)
        reply = CompletionReply(wanted, service.name, body.logprobs is not None)
        job = service.worker.submit(wanted, client_of(request.scope))
        return await answer(request, body, reply, job)

    async def chat(request: Request) -> Response:
        body = await bodies.read(request, ChatRequest, service.terms.limits)
        check(body, service)
        wanted = await asyncio.to_thread(asking.chat, body, service.terms)
        reply = ChatReply(wanted, service.name, bool(body.logprobs))
        job = service.worker.submit(wanted, client_of(request.scope))
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
        return Response(text, headers={"content-type": PROMETHEUS})

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
        Guard,
        token=service.token,
        limits=service.terms.limits,
        metrics=service.metrics,
        known_paths=[route.path for route in routes],
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        seconds = service.terms.limits.shutdown_seconds
        await asyncio.to_thread(service.worker.stop, seconds)

    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: refuse,
        HTTPException: refuse_http,
    }
    return Starlette(
        routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan
    )


# Errors


async def refuse(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def refuse_http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]!r}"
    else:
        message = f"{request.method[:20]} {request.url.path[:200]!r}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)


def check(body: Asked, service: Service) -> None:
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
    terms, defaults = service.terms, service.terms.defaults
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "fourfold",
        "max_model_len": terms.positions,
        "defaults": {
            "max_tokens": defaults.max_dec_len,
            "temperature": 0.0
            if defaults.decode_strategy == "greedy_search"
            else defaults.temperature,
            "top_p": defaults.top_p,
            "top_k": defaults.top_k,
        },
    }


# Replies


async def answer(request: Request, body: Asked, reply: Reply, job: Job) -> Response:
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


async def collect(reply: Reply, job: Job) -> Json:
    choices = [Choice() for _ in job.wanted]
    async for piece in job:
        choices[piece.choice].add(piece)
    return reply.whole(choices, job.new_tokens)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(reply: Reply, job: Job, with_usage: bool) -> AsyncIterator[bytes]:
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

    def __init__(self, content: AsyncIterator[bytes], job: Job) -> None:
        super().__init__(content, headers={"x-accel-buffering": "no"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()
