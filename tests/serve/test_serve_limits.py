"""Bounds of size, number and time, and who is let in."""

from __future__ import annotations

import json
import logging
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from helpers.served import TOKEN, Served, chunks, everything, serving, wait_until

from fourfold.serve.http import client_of
from fourfold.serve.protocol import Limits

LONG = {"prompt": "the", "max_tokens": 250, "min_tokens": 250, "seed": 1}
CHAT = [{"role": "user", "content": "a"}]
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


# Size


def test_a_large_body_is_refused_announced_or_not(served: Served) -> None:
    path, large = f"{served.url}/v1/completions", b" " * ((1 << 20) + 1)
    headers = {"content-type": "application/json"}
    announced = httpx.post(path, content=large, headers=headers)
    chunked = httpx.post(path, content=iter([large[:1000], large[1000:]]), headers=headers)
    for reply in (announced, chunked):
        assert reply.status_code == 413 and "1048576 bytes" in reply.json()["error"]["message"]


def test_a_body_that_was_refused_is_not_read_for_ever(served: Served) -> None:
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    sent, received = 0, b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        # The answer may come in the middle of the body or, to a fast client, with its end.
        with pytest.raises(ConnectionError):
            while sent < 1 << 28:
                connection.sendall(piece)
                sent += len(piece)
                if select.select([connection], [], [], 0)[0]:
                    received += connection.recv(65536)
        received += everything(connection)
    assert received.startswith(b"HTTP/1.1 413")
    # A megabyte, another until it is closed, and what the system holds on both sides.
    assert sent < 1 << 25


def test_a_connection_goes_on_after_a_body_that_was_refused(served: Served) -> None:
    large = b" " * ((1 << 20) + 5)
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(large) + large)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert everything(connection).endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("pieces", [1, 3], ids=["in one piece", "in pieces"])
def test_a_large_head_is_refused(served: Served, pieces: int) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    for name, size in ((b"x", 70_000), (b"y", 60_000)):
        data = head + name + b": " + b"z" * size + b"\r\nconnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
            try:
                for number in range(pieces):
                    cut = -(-len(data) // pieces)
                    connection.sendall(data[number * cut : (number + 1) * cut])
            except ConnectionError:
                pass  # refused before the last piece
            answer = everything(connection)
        if size > 64 << 10:
            assert answer[9:12] in (b"431", b"400") or not answer, answer[:200]
            if pieces == 1:
                assert answer[9:12] == b"431" and b"65536 bytes" in answer
        else:
            assert answer[9:12] == b"200"
    long_path = httpx.get(f"{served.url}/v1/models/{'m' * 65_500}")
    assert long_path.status_code == 431 and "65536 bytes" in long_path.json()["error"]["message"]


def test_bytes_that_are_no_request_get_an_answer_of_the_usual_shape(served: Served) -> None:
    for data in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
            connection.sendall(data)
            head, _, body = everything(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_prompt_whose_size_says_that_it_cannot_fit_is_not_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = served.service.context.tokenizer
    longest = tokenizer.longest_token_bytes
    assert longest is not None
    fits = "é" * (longest * 256 // 2)  # in as many bytes as 256 of the longest tokens
    assert "the prompt has" in served.complete(prompt=fits).json()["error"]["message"]
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_: pytest.fail("it was encoded"))
    for reply in (
        served.complete(prompt=fits + "é"),
        served.complete(prompt=["a" * 900_000]),
        served.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 900_000}]}
        ),
    ):
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert "the prompt has at least" in reply.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"stop": ["x"] * 17}),
        ("completions", {"stop": "x" * 257}),
        ("completions", {"n": 17}),
        ("completions", {"logprobs": 21}),
        ("completions", {"prompt": ["a"] * 65}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 1025}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_fields_have_their_bounds(served: Served, path: str, fields: dict[str, object]) -> None:
    whole = {"prompt": "a"} if path == "completions" else {"messages": CHAT}
    reply = served.post(f"/v1/{path}", whole | {"max_tokens": 1} | fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"].split(".")[0] in fields


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
            assert "fourfold_sequences_running 1.0\n" in metrics
            assert "fourfold_sequences_waiting 2.0\n" in metrics
            replies = [one.result() for one in running]
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
        assert served.complete(prompt="a", max_tokens=1).status_code == 200


def test_one_client_leaves_places_and_turns_to_others(config: Path) -> None:
    limits = Limits(waiting=8)  # of which two are kept for clients that have none
    with serving(config, slots=1, limits=limits, step_seconds=0.02) as served:
        other = httpx.Client(
            base_url=served.url, transport=httpx.HTTPTransport(local_address="127.0.0.2")
        )
        with other, ThreadPoolExecutor(1) as threads:
            asked = {**LONG, "max_tokens": 40, "min_tokens": 40}
            greedy = threads.submit(served.complete, **asked, n=7)
            served.until(lambda worker: worker.running == 1 and worker.waiting == 6)
            refused = served.complete(prompt="a", max_tokens=1)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            assert "the last 2 of 9 places are kept for others" in refused.text
            body = {"prompt": "a", "max_tokens": 2}
            assert other.post("/v1/completions", json=body, timeout=60).status_code == 200
            # It did not wait for the six that came before it.
            assert not greedy.done() and served.service.worker.waiting > 0
            assert greedy.result().status_code == 200
        assert served.complete(prompt="a", max_tokens=1).status_code == 200


def test_idle_connections_keep_nobody_out(config: Path) -> None:
    with serving(config, limits=Limits(connections=8)) as served:
        address = ("127.0.0.1", served.port)
        idle = [socket.create_connection(address, timeout=20) for _ in range(40)]
        for _ in range(3):
            assert httpx.get(f"{served.url}/health").status_code == 200
            assert httpx.get(f"{served.url}/v1/models").status_code == 200
        assert everything(idle[0]) == b""  # the oldest made way
        for connection in idle:
            connection.close()


def test_busy_connections_leave_health_to_be_asked(config: Path) -> None:
    limits = Limits(connections=2, spare_connections=1)
    body = httpx.Request("POST", "http://x", json={**LONG, "stream": True}).content
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with serving(config, limits=limits, step_seconds=0.02) as served:
        address = ("127.0.0.1", served.port)
        streams = [socket.create_connection(address, timeout=20) for _ in range(2)]
        for connection in streams:
            connection.sendall(request)
        served.until(lambda worker: worker.running == 2)
        assert httpx.get(f"{served.url}/health").status_code == 200
        for reply in (httpx.get(f"{served.url}/v1/models"), served.complete(prompt="a")):
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["code"] == "overloaded"
        for connection in streams:
            connection.close()
        wait_until(lambda: httpx.get(f"{served.url}/v1/models").status_code == 200)


def test_connections_beyond_the_spare_ones_are_closed(config: Path) -> None:
    body = httpx.Request("POST", "http://x", json={**LONG, "stream": True}).content
    limits = Limits(connections=1, spare_connections=0)
    with serving(config, limits=limits, step_seconds=0.02) as served:
        address = ("127.0.0.1", served.port)
        with socket.create_connection(address, timeout=20) as stream:
            stream.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            served.until(lambda worker: worker.running == 1)
            with socket.create_connection(address, timeout=20) as refused:
                assert everything(refused) == b""
        served.until(lambda worker: worker.running == 0)


def test_a_client_that_leaves_frees_its_slot(config: Path) -> None:
    with serving(config, slots=1, step_seconds=0.02) as served:
        for stream in (True, False):
            body = httpx.Request("POST", served.url, json={**LONG, "stream": stream}).content
            with socket.create_connection(("127.0.0.1", served.port)) as connection:
                connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
                served.until(lambda worker: worker.running == 1)
            served.until(lambda worker: worker.running == worker.waiting == 0)
        metrics = httpx.get(f"{served.url}/metrics").text
        assert "fourfold_cancelled_sequences_total 2.0\n" in metrics
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
    with serving(config, token=TOKEN, limits=Limits(guess_seconds=0.01)) as served:
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


def test_guessing_a_token_is_slow(config: Path) -> None:
    limits = Limits(guesses=3, guess_seconds=2.0)
    with serving(config, token=TOKEN, limits=limits) as served:

        def status(token: str | None, address: str = "127.0.0.1") -> int:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
                return client.get(f"{served.url}/v1/models", headers=headers).status_code

        with ThreadPoolExecutor(3) as threads:
            guesses = [threads.submit(status, f"{TOKEN}{number}") for number in range(3)]
            # While three wait for their answer no other token is looked at, right or wrong.
            wait_until(lambda: status(TOKEN) == 429)
            assert not any(guess.done() for guess in guesses)
            assert status("wrong") == 429
            # From elsewhere it is, and the page and the check of health need none.
            assert status(TOKEN, "127.0.0.2") == 200
            assert httpx.get(f"{served.url}/health").status_code == 200
            assert [guess.result() for guess in guesses] == [401] * 3
        assert status(TOKEN) == 200 and status(None) == 401


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a name", "a name"),
    ],
)
def test_a_client_is_its_address_or_its_network(address: str, client: str) -> None:
    assert client_of({"type": "http", "client": (address, 80)}) == client


def test_requests_are_logged_without_what_they_say(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fourfold.serve.access")
    with serving(config, token=TOKEN) as served:
        headers = {"authorization": f"Bearer {TOKEN}"}
        body = {"prompt": "a secret matter", "max_tokens": 2}
        served.post("/v1/completions?api_key=hidden", body, headers=headers)
        served.post("/v1/completions", body)
        httpx.get(f"{served.url}/%1b[31m%0aINFO", headers=headers)
    lines = [record.getMessage() for record in caplog.records]
    ends = [line.rsplit(" ", 2)[0] for line in lines]  # without the time it took
    assert ends == [
        "127.0.0.1 POST /v1/completions 200",
        "127.0.0.1 POST /v1/completions 401",
        "127.0.0.1 GET /\\x1b[31m\\nINFO 404",
    ]
    assert not any(word in caplog.text for word in ("secret", "hidden", TOKEN))


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
