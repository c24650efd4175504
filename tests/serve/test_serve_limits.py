"""Bounds of size, number and time, and who is let in."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from served import TOKEN, Served, chunks, everything, serving, wait_until

from fourfold.serve.limits import Limits

LONG = {"prompt": "the", "max_tokens": 250, "min_tokens": 250, "seed": 1}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


# Size


def test_a_large_body_is_refused_announced_or_not(served: Served) -> None:
    path, large = f"{served.url}/v1/completions", b" " * ((1 << 20) + 1)
    headers = {"content-type": "application/json"}
    announced = httpx.post(path, content=large, headers=headers)
    chunked = httpx.post(path, content=iter([large[:1000], large[1000:]]), headers=headers)
    for reply in (announced, chunked):
        assert reply.status_code == 413 and "1048576 bytes" in reply.json()["error"]["message"]


def test_a_form_of_another_page_is_refused(served: Served) -> None:
    reply = httpx.post(
        f"{served.url}/v1/completions",
        content=b'{"prompt": "a"}',
        headers={"content-type": "text/plain"},
    )
    assert reply.status_code == 415
    assert not any(name.startswith("access-control") for name in reply.headers)


# Number


def test_a_full_queue_refuses_and_recovers(config: Path) -> None:
    limits = Limits(waiting=2)
    with serving(config, slots=1, limits=limits, step_seconds=0.02) as served:
        with ThreadPoolExecutor(3) as threads:
            asked = {**LONG, "max_tokens": 60, "min_tokens": 60}
            running = [threads.submit(served.complete, **asked) for _ in range(3)]
            served.until(lambda worker: worker.waiting == 2)
            refused = served.complete(prompt="a", max_tokens=1)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            metrics = httpx.get(f"{served.url}/metrics").text
            assert "fourfold_sequences_running 1\n" in metrics
            assert "fourfold_sequences_waiting 2\n" in metrics
            replies = [one.result() for one in running]
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
        assert served.complete(prompt="a", max_tokens=1).status_code == 200


def test_connections_are_counted(config: Path) -> None:
    with serving(config, limits=Limits(connections=4)) as served:
        address = ("127.0.0.1", served.port)
        idle = [socket.create_connection(address) for _ in range(5)]
        assert httpx.get(f"{served.url}/health").status_code == 503
        for connection in idle:
            connection.close()
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200)


def test_a_client_that_leaves_frees_its_slot(config: Path) -> None:
    with serving(config, slots=1, step_seconds=0.02) as served:
        for stream in (True, False):
            body = httpx.Request("POST", served.url, json={**LONG, "stream": stream}).content
            with socket.create_connection(("127.0.0.1", served.port)) as connection:
                connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
                served.until(lambda worker: worker.running == 1)
            served.until(lambda worker: worker.running == worker.waiting == 0)
        metrics = httpx.get(f"{served.url}/metrics").text
        assert "fourfold_cancelled_sequences_total 2\n" in metrics
        assert served.complete(prompt="a", max_tokens=2).status_code == 200


def test_a_stop_string_ends_one_text_and_no_other(config: Path) -> None:
    with serving(config, step_seconds=0.02) as served, ThreadPoolExecutor(1) as threads:
        asked = {"prompt": "a dog", "temperature": 0, "max_tokens": 8, "min_tokens": 8}
        text = served.complete(**asked).json()["choices"][0]["text"]
        running = threads.submit(served.complete, **{**LONG, "max_tokens": 60, "min_tokens": 60})
        served.until(lambda worker: worker.running == 1)
        stopped = served.complete(**asked, stop=text[2]).json()["choices"][0]
        assert stopped["text"] == text[: text.find(text[2])]
        assert running.result().json()["usage"]["completion_tokens"] == 60


# Time


def test_a_late_request_is_ended(config: Path) -> None:
    with serving(config, limits=Limits(request_seconds=0.3), step_seconds=0.02) as served:
        reply = served.complete(**LONG)
        assert reply.status_code == 504 and reply.json()["error"]["code"] == "timeout"
        events = chunks(served.complete(**LONG, stream=True).text)
        assert events[0]["choices"] and events[-1]["error"]["code"] == "timeout"
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="not done within"):
            list(client.completions.create(
                model="untrained", prompt="the", max_tokens=250, stream=True,
                extra_body={"min_tokens": 250},
            ))  # fmt: skip
        served.until(lambda worker: worker.running == 0)


def test_slow_heads_and_bodies_are_cut_off(config: Path) -> None:
    limits = Limits(head_seconds=0.3, body_seconds=0.3)
    begun = {b"": b"", b"GET /health HTT": b"", HEAD + b"content-length: 50\r\n\r\n{": b"408"}
    with serving(config, limits=limits) as served:
        for data, answer in begun.items():
            with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
                connection.sendall(data)
                received = everything(connection)
                assert answer in received and bool(answer) == bool(received)
        # The second request of a connection has no more time than the first.
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += connection.recv(65536)
            connection.sendall(b"GET /hea")
            assert everything(connection) == b""
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200)


# Who


def test_a_token_opens_all_but_the_page_and_health(config: Path) -> None:
    with serving(config, token=TOKEN) as served:
        paths = ["/", "/health", "/metrics", "/v1/models", "/v1/completions", "/nothing"]
        for given in (None, "", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer é"):
            headers = [] if given is None else [(b"authorization", given.encode())]
            found = [httpx.get(served.url + path, headers=headers).status_code for path in paths]
            assert found == [200, 200, 401, 401, 401, 401], given
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=TOKEN)
        assert client.completions.create(model="untrained", prompt="the").choices
        with pytest.raises(openai.AuthenticationError, match="a token is needed"):
            client.with_options(api_key="another").models.list()
        # With a token any name of the machine may be used.
        assert httpx.get(f"{served.url}/health", headers={"host": "box.lan"}).status_code == 200


def test_without_a_token_only_this_machines_names_are_served(served: Served) -> None:
    for host, status in [
        ("evil.example", 403),
        ("localhost:1", 200),
        ("[::1]:8000", 200),
        ("", 403),
    ]:
        reply = httpx.get(f"{served.url}/v1/models", headers={"host": host})
        assert reply.status_code == status, host


def test_every_reply_carries_the_headers(served: Served) -> None:
    replies = [
        httpx.get(served.url + path) for path in ("/", "/health", "/v1/models", "/nothing")
    ] + [served.complete(prompt=3), served.complete(prompt="a", stream=True)]
    for reply in replies:
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert "server" not in reply.headers
