"""What one client may ask for, and for how long: every bound of the server in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Beyond any of these a request is refused, with its number in the message."""

    head_bytes: int = 64 << 10  # request line and headers
    body_bytes: int = 1 << 20
    sequences: int = 64  # prompts times n of one request
    waiting: int = 128  # sequences without a slot, of all requests
    connections: int = 256
    spare_connections: int = 32  # beyond, while all others are busy; only /health is answered
    request_seconds: float = 300.0  # from its first byte to the last of the reply
    head_seconds: float = 10.0
    body_seconds: float = 20.0
    shutdown_seconds: float = 10.0

    # How often a token can be guessed from one address: so many at a time, each so long.
    guesses: int = 8
    guess_seconds: float = 1.0

    # Of single fields; OpenAI's own are lower or the same.
    n: int = 16
    alternatives: int = 20
    stops: int = 16
    stop_characters: int = 256
    messages: int = 1024

    @property
    def kept_for_newcomers(self) -> int:
        """Places of the queue that clients who have texts in it already may not take."""
        return self.waiting // 4
