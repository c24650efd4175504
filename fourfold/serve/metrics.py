"""Server metrics: counters and histograms in the text format of Prometheus."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RATE_SECONDS = 10.0


class Histogram:
    """How often each bound of SECONDS was kept, and the sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        lines, below = [], 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {below}"]


class Metrics:
    """Counted by the worker and the request side alike, so behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = 0
        self._new_tokens = 0
        self._cancelled = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._first_token = Histogram()
        self._duration = Histogram()

    def request(self, path: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[path, status] += 1
            self._duration.add(seconds)

    def prompt(self, tokens: int) -> None:
        with self._lock:
            self._prompt_tokens += tokens

    def step(self, tokens: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._new_tokens += tokens
            self._recent.append((now, tokens))
            self._forget(now)

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_token.add(seconds)

    def cancelled(self, sequences: int) -> None:
        with self._lock:
            self._cancelled += sequences

    def render(self, running: int, waiting: int, slots: int) -> str:
        """The text of /metrics; the arguments are the worker's state at this moment."""
        with self._lock:
            self._forget(time.monotonic())
            rate = sum(tokens for _, tokens in self._recent) / RATE_SECONDS
            requests = [
                f'fourfold_requests_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._requests.items())
            ]
            families = [
                ("requests_total", "counter", "Replies by path and status.", requests),
                _single("prompt_tokens_total", "counter", "Tokens read.", self._prompt_tokens),
                _single("generated_tokens_total", "counter", "Tokens written.", self._new_tokens),
                _single(
                    "cancelled_sequences_total",
                    "counter",
                    "Sequences ended by their client or the time limit.",
                    self._cancelled,
                ),
                _single("sequences_running", "gauge", "Sequences that hold a slot.", running),
                _single("sequences_waiting", "gauge", "Sequences that wait for one.", waiting),
                _single("slots", "gauge", "Sequences that can run at once.", slots),
                _single("tokens_per_second", "gauge", "Over the last ten seconds.", rate),
                (
                    "time_to_first_token_seconds",
                    "histogram",
                    "From the arrival of a request to its first token.",
                    self._first_token.lines("fourfold_time_to_first_token_seconds"),
                ),
                (
                    "request_seconds",
                    "histogram",
                    "From the arrival of a request to the end of its reply.",
                    self._duration.lines("fourfold_request_seconds"),
                ),
            ]
        lines = []
        for name, kind, meaning, samples in families:
            lines += [f"# HELP fourfold_{name} {meaning}", f"# TYPE fourfold_{name} {kind}"]
            lines += samples
        return "\n".join(lines) + "\n"

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()


def _single(name: str, kind: str, meaning: str, value: float) -> tuple[str, str, str, list[str]]:
    return name, kind, meaning, [f"fourfold_{name} {value}"]
