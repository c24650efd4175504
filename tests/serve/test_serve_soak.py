"""A minute of everything at once: nothing is lost, nothing grows, nobody sees an error of ours."""

from __future__ import annotations

import json
import random
import re
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from helpers import tiny_text_run
from helpers.served import Served, everything, serving
from test_serve_hostile import mutated

from fourfold.serve.protocol import Limits

SECONDS = 60.0
CLIENTS = 12
REQUESTS = 20_000  # of all clients, whatever the time
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WORDS = tiny_text_run.TEXT.split()
# What a client may be told: served, refused by its own fault, busy, late.
EXPECTED = {200, 400, 403, 404, 405, 408, 413, 415, 429, 431, 504}


class Crowd:
    """Clients of every kind, each with its own random numbers, until the time or count is over."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.statuses: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._end = time.monotonic() + SECONDS
        self._left = threading.Semaphore(REQUESTS)

    def client(self, seed: int) -> None:
        source = random.Random(seed)
        kinds: list[Callable[[random.Random], None]] = [
            self.whole, self.stream, self.cut_stream, self.left_alone, self.malformed,
            self.slow_body, self.long_prompt, self.judged, self.reset, self.chat,
        ]  # fmt: skip
        while time.monotonic() < self._end and self._left.acquire(blocking=False):
            kind = source.choice(kinds)
            self.kinds[kind.__name__] += 1
            try:
                kind(source)
            except (httpx.RemoteProtocolError, httpx.ReadError, ConnectionError):
                self.statuses[0] += 1  # closed for a reason of connections, which is allowed
            except Exception as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")

    def body(self, source: random.Random, **fields: object) -> dict[str, object]:
        return {
            "prompt": " ".join(source.choices(WORDS, k=source.randint(1, 30))),
            "max_tokens": source.randint(1, 60),
            "seed": source.randrange(1000),
            **fields,
        }

    def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        reply = self.served.post(path, body)
        self.statuses[reply.status_code] += 1
        return reply

    def raw(self, body: dict[str, object]) -> bytes:
        data = json.dumps(body).encode()
        return HEAD + b"content-length: %d\r\n\r\n" % len(data) + data

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.served.port), timeout=60)

    # -- kinds ----------------------------------------------------------------------------------

    def whole(self, source: random.Random) -> None:
        reply = self.post("/v1/completions", self.body(source, n=source.randint(1, 3)))
        if reply.status_code == 200:
            assert all(choice["finish_reason"] for choice in reply.json()["choices"])

    def chat(self, source: random.Random) -> None:
        messages = [{"role": "user", "content": self.body(source)["prompt"]}]
        self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 20})

    def stream(self, source: random.Random) -> None:
        reply = self.post("/v1/completions", self.body(source, stream=True))
        if reply.status_code == 200:
            assert reply.text.endswith("data: [DONE]\n\n") or '"error"' in reply.text

    def cut_stream(self, source: random.Random) -> None:
        with self.connect() as connection:
            connection.sendall(self.raw(self.body(source, stream=True, min_tokens=1)))
            connection.recv(source.randint(1, 2000))

    def left_alone(self, source: random.Random) -> None:
        """The reply is never waited for."""
        with self.connect() as connection:
            connection.sendall(self.raw(self.body(source, max_tokens=200)))

    def reset(self, source: random.Random) -> None:
        with self.connect() as connection:
            connection.sendall(self.raw(self.body(source, stream=True)))
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def malformed(self, source: random.Random) -> None:
        data = mutated(source, self.raw(self.body(source)))
        with self.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = everything(connection)
        self.statuses[int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0] += 1

    def slow_body(self, source: random.Random) -> None:
        data = self.raw(self.body(source))
        with self.connect() as connection:
            connection.sendall(data[: -source.randint(1, 40)])
            answer = everything(connection)
        self.statuses[int(answer[9:12]) if answer else 0] += 1

    def long_prompt(self, source: random.Random) -> None:
        length = source.choice([5_000, 300_000, 1_100_000])
        assert (
            self.post("/v1/completions", {"prompt": "the cat " * (length // 8)}).status_code != 200
        )

    def judged(self, source: random.Random) -> None:
        self.post("/v1/completions", self.body(source, echo=True, logprobs=2, max_tokens=0))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
def test_a_minute_of_every_kind_of_client(config: Path) -> None:
    limits = Limits(waiting=24, connections=32, request_seconds=20, body_seconds=1, head_seconds=2)
    with serving(config, slots=4, limits=limits) as served:
        asked = {"prompt": "the dog", "seed": 4, "max_tokens": 30}
        before = served.complete(**asked).json()["choices"][0]["text"]
        crowd = Crowd(served)
        threads = [threading.Thread(target=crowd.client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        sizes = []
        while any(thread.is_alive() for thread in threads):
            assert httpx.get(f"{served.url}/health", timeout=30).status_code == 200
            sizes.append(resident_bytes())
            time.sleep(1.0)
        for thread in threads:
            thread.join()
        print(dict(crowd.statuses), dict(crowd.kinds), [size >> 20 for size in sizes[::10]])
        assert crowd.wrong == []
        assert set(crowd.statuses) - {0} <= EXPECTED, crowd.statuses
        assert crowd.statuses[200] > 100 and min(crowd.kinds.values()) > 5
        # Everything that was begun is let go of.
        served.until(lambda worker: worker.running == worker.waiting == 0)
        worker = served.service.worker
        assert not worker._jobs and not worker._sequences and not worker._writers
        assert not worker._to_score and not worker._to_write
        metrics = httpx.get(f"{served.url}/metrics").text
        assert "fourfold_sequences_running 0.0\n" in metrics
        assert "fourfold_sequences_waiting 0.0\n" in metrics
        assert not re.search(r'status="5(?!04)', metrics), metrics
        # In the last half of the time no more memory is held than in the first.
        half = len(sizes) // 2
        assert max(sizes[half:]) < max(sizes[:half]) + (32 << 20)
        assert served.complete(**asked).json()["choices"][0]["text"] == before
