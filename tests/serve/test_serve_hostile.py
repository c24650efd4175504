"""A thousand requests nobody should send: each is refused or answered, and the server stays."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from helpers.served import Served

PATHS = ["/v1/completions", "/v1/chat/completions"]
COMPLETION = {
    "model": "untrained", "prompt": "the cat", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9,
    "top_k": 3, "n": 1, "seed": 1, "stop": ["x"], "stream": False, "logprobs": 1, "echo": True,
    "repetition_penalty": 1.1, "min_tokens": 1, "user": "é",
}  # fmt: skip
CHAT = {
    "model": "untrained", "max_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": 2,
    "messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}],
    "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
VALUES: list[str] = [
    "null", "true", "-1", "0", "1e400", "-1e400", "NaN", "Infinity", "1.5", "9" * 5000, "-0.0",
    '""', '"x"', '"\\ud800"', '"\\u0000"', '"' + "a" * 100_000 + '"', "[]", "{}", "[[]]", "[null]",
    "[1,[2]]", '[1,"a"]', "[99999999999999999999]", "[-1]", '[""]', '{"a":{"b":[]}}', "[1.0]",
    "[" * 20_000, "[" * 500 + "]" * 500, '[{"role":"user"}]', '[{"role":3,"content":"a"}]',
    '[{"role":"user","content":[{"type":"image_url","image_url":"x"}]}]', "[true]",
    '["' + '","'.join("ab" * 500) + '"]', "2147483647", "9223372036854775807", "1e-300",
]  # fmt: skip
ODD_PATHS = [
    "/v1", "/v1/", "/v1/completions/", "/v1/models/../../etc/passwd", "/%00", "/%ff%fe", "/" * 500,
    "/v1/models/%2e%2e%2f", "/playground.html", "/favicon.ico", "/docs", "/openapi.json",
    "/<script>alert(1)</script>", "/v1/models/" + "m" * 5000, "/?a=" + "b" * 5000, "/health/x",
]  # fmt: skip


def mutated(source: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(source.randint(1, 6)):
        place = source.randrange(len(changed) or 1)
        match source.randrange(5):
            case 0:
                changed[place : place + 1] = bytes([source.randrange(256)])
            case 1:
                del changed[place:]
            case 2:
                changed[place:place] = source.randbytes(source.randint(1, 9))
            case 3:
                del changed[place : place + source.randint(1, 20)]
            case _:
                changed[place:place] = source.choice([b"\xff", b"{", b"]", b'"', b"\x00", b"\\u"])
    return bytes(changed)


def with_value(body: dict[str, Any], name: str, value: str) -> bytes:
    """JSON text with one value as given, which need not be JSON itself."""
    rest = {key: one for key, one in body.items() if key != name}
    return f"{json.dumps(rest)[:-1]}, {json.dumps(name)}: {value}}}".encode()


def bodies(source: random.Random) -> list[tuple[str, bytes]]:
    found = []
    for path, body in zip(PATHS, (COMPLETION, CHAT)):
        plain = json.dumps(body).encode()
        found += [(path, mutated(source, plain)) for _ in range(260)]
        names = [*body, "unknown", "", "__class__"]
        pairs = [(name, value) for name in names for value in VALUES]
        found += [(path, with_value(body, *pair)) for pair in source.sample(pairs, 180)]
        found += [(path, data) for data in (b"", b"null", b"[]", b"3", b'"a"', b"\xef\xbb\xbf{}")]
        found.append((path, json.dumps({f"f{n}": n for n in range(50_000)}).encode()))
        found.append((path, b'{"prompt": [' + b"{}," * 300_000 + b"{}]}"))
        found.append((path, b'{"messages": [' + b"{}," * 300_000 + b"{}]}"))
    return found


def raw_requests(source: random.Random) -> list[bytes]:
    body = json.dumps(COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    found = [
        head + b"content-length: -5\r\n\r\n" + body,
        head + b"content-length: 99999999999999999999999\r\n\r\n" + body,
        head + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + body,
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + body,
        head + b"transfer-encoding: gzip\r\n\r\n" + body,
        head + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: \xff\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nhost: evil.example\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ]
    for _ in range(30):
        cut = source.randrange(len(body))
        found.append(head + b"content-length: %d\r\n\r\n" % len(body) + body[:cut])
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    found += [mutated(source, whole[:150]) + b"\r\n\r\n" for _ in range(40)]
    found += [source.randbytes(source.randint(1, 2000)) for _ in range(20)]
    return found


@pytest.fixture
def text_before(served: Served) -> str:
    return str(served.complete(prompt="the dog", seed=4).json()["choices"][0]["text"])


def test_a_thousand_malformed_requests_leave_it_serving(served: Served, text_before: str) -> None:
    source = random.Random(11)
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=served.url, timeout=120) as client:

        def note(reply: httpx.Response) -> None:
            statuses[reply.status_code] += 1
            assert reply.status_code < 500, (reply.request.content[:300], reply.text)
            if reply.status_code >= 400:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

        headers = {"content-type": "application/json"}
        for path, data in bodies(source):
            note(client.post(path, content=data, headers=headers))
        for path in ODD_PATHS:
            note(client.get(served.url + path))
        for method in ("PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND"):
            note(client.request(method, "/v1/completions"))
        for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/untrained"):
            note(client.post(path, content=b"{}", headers=headers))
    for data in raw_requests(source):
        answer = served.raw(data, seconds=0.05)
        assert not answer.startswith(b"HTTP/1.1 5"), (data[:200], answer[:300])
        statuses[int(answer[9:12]) if answer else 0] += 1
    assert sum(statuses.values()) >= 1000 and statuses[400] > 600, statuses
    served.until(lambda worker: worker.running == worker.waiting == 0)
    assert httpx.get(f"{served.url}/health").status_code == 200
    again = served.complete(prompt="the dog", seed=4).json()["choices"][0]["text"]
    assert again == text_before
