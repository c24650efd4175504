"""A request's body, read within bounds of size and time, as one of the kinds we know."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from fourfold.serve.limits import Limits
from fourfold.serve.protocol import ApiError, Kind, parse


async def read(request: Request, kind: type[Kind], limits: Limits) -> Kind:
    # A form of another origin can send any text but this type, which browsers ask us about first.
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise ApiError(415, f"content-type {given[:80]!r}: send application/json")
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
