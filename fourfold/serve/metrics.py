"""Server metrics for Prometheus, counted by the worker and the request side alike."""

from __future__ import annotations

import threading
import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RATE_SECONDS = 10.0


class Metrics:
    """A registry of its own: a process may have several servers, one after the other."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "fourfold_requests",
            "Replies by path and status.",
            ["path", "status"],
            registry=registry,
        )
        self._prompt_tokens = Counter("fourfold_prompt_tokens", "Tokens read.", registry=registry)
        self._new_tokens = Counter(
            "fourfold_generated_tokens", "Tokens written.", registry=registry
        )
        self._cancelled = Counter(
            "fourfold_cancelled_sequences",
            "Sequences ended by their client or the time limit.",
            registry=registry,
        )
        self._running = Gauge(
            "fourfold_sequences_running", "Sequences that hold a slot.", registry=registry
        )
        self._waiting = Gauge(
            "fourfold_sequences_waiting", "Sequences that wait for one.", registry=registry
        )
        self._slots = Gauge("fourfold_slots", "Sequences that can run at once.", registry=registry)
        self._rate = Gauge(
            "fourfold_tokens_per_second", "Over the last ten seconds.", registry=registry
        )
        self._first_token = Histogram(
            "fourfold_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            "fourfold_request_seconds",
            "From the arrival of a request to the end of its reply.",
            buckets=SECONDS,
            registry=registry,
        )
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, int]] = deque()

    def request(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, status).inc()
        self._duration.observe(seconds)

    def prompt(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def step(self, tokens: int) -> None:
        self._new_tokens.inc(tokens)
        with self._lock:
            now = time.monotonic()
            self._recent.append((now, tokens))
            self._forget(now)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def cancelled(self, sequences: int) -> None:
        self._cancelled.inc(sequences)

    def render(self, running: int, waiting: int, slots: int) -> bytes:
        """The text of /metrics; the arguments are the worker's state at this moment."""
        with self._lock:
            self._forget(time.monotonic())
            self._rate.set(sum(tokens for _, tokens in self._recent) / RATE_SECONDS)
        self._running.set(running)
        self._waiting.set(waiting)
        self._slots.set(slots)
        return generate_latest(self._registry)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
