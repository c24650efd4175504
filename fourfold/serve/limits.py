"""What one client may ask for, and for how long: every bound of the server in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Beyond any of these a request is refused, with its number in the message."""

    body_bytes: int = 1 << 20
    sequences: int = 64  # prompts times n of one request
    waiting: int = 128  # sequences without a slot, of all requests
    connections: int = 256
    request_seconds: float = 300.0  # from its first byte to the last of the reply
    head_seconds: float = 10.0
    body_seconds: float = 20.0
    shutdown_seconds: float = 10.0

    # Of single fields; OpenAI's own are lower or the same.
    n: int = 16
    alternatives: int = 20
    stops: int = 16
    stop_characters: int = 256
    messages: int = 1024
