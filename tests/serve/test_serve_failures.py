"""The model or the server's own code fails: who is told what, and what is left running."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.served import Served, chunks, serving, wait_until

from fourfold.generate.session import Session
from fourfold.serve import http, server
from fourfold.serve.protocol import Limits

LONG = {"prompt": "the", "max_tokens": 200, "min_tokens": 200, "seed": 1}


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_failed_step_costs_only_the_requests_in_it(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(config, step_seconds=0.02) as served, ThreadPoolExecutor(2) as threads:
        running = [threads.submit(served.complete, **LONG) for _ in range(2)]
        served.until(lambda worker: worker.running == 2)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "step", broken)
            replies = [one.result() for one in running]
        for reply in replies:
            assert reply.status_code == 500 and "the step failed" in reply.text
        assert "illegal memory access" in caplog.text
        assert served.complete(prompt="a", max_tokens=2).status_code == 200
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert served.service.worker.running == served.service.worker.waiting == 0


@pytest.mark.parametrize("part", ["reserve", "read"])
def test_a_model_that_cannot_start_again_fails_every_request_at_once(
    config: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(config, slots=1, step_seconds=0.02) as served, ThreadPoolExecutor(3) as threads:
        streamed = threads.submit(served.complete, **LONG, stream=True)
        served.until(lambda worker: worker.running == 1)
        queued = threads.submit(served.complete, **LONG)
        served.until(lambda worker: worker.waiting == 1)
        decoder: Any = served.service.worker._module.decoder
        setattr(decoder, part, broken)
        decoder.advance = decoder.take_in = broken
        events = chunks(streamed.result().text)
        assert events[-1]["error"]["message"] == "the model failed; see the log"
        reply = queued.result()
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the model failed; see the log"
        assert "could not be started again" in caplog.text
        # The server ends by itself, so that whoever started it can start it again.
        wait_until(lambda: not served.thread.is_alive())
        assert served.service.worker.failed


def test_a_request_that_arrives_while_the_model_fails_is_answered(config: Path) -> None:
    """Between the thread's last look at its inbox and its end, a job could be left behind."""
    with serving(config) as served:
        worker = served.service.worker
        stop = threading.Event()
        statuses = []

        def ask() -> None:
            while not stop.is_set():
                try:
                    statuses.append(served.complete(prompt="a", max_tokens=1).status_code)
                except httpx.HTTPError:  # the server has ended
                    return

        with ThreadPoolExecutor(4) as threads:
            askers = [threads.submit(ask) for _ in range(4)]
            wait_until(lambda: len(statuses) > 20)
            decoder: Any = worker._module.decoder
            decoder.reserve = decoder.read = decoder.take_in = broken
            for asker in askers:
                asker.result(timeout=60)  # not the 300 seconds a request may take
        assert 500 in statuses and set(statuses) <= {200, 500, 503}


def test_the_command_ends_with_code_1_when_the_model_failed(config: Path) -> None:
    """In a process of its own, whose model fails at the third step and for good."""
    program = textwrap.dedent(
        """
        import sys
        from fourfold.cli import main
        from fourfold.generate.decoder import Decoder

        steps = []

        def fail(*_):
            raise RuntimeError("CUDA error: unspecified launch failure")

        def twice(run):
            def step(self, given):
                steps.append(1)
                if len(steps) > 2:
                    Decoder.read = fail
                    fail()
                return run(self, given)

            return step

        Decoder.advance, Decoder.take_in = twice(Decoder.advance), twice(Decoder.take_in)
        main(sys.argv[1:])
        """
    )
    words = ["serve", "-c", str(config), "--port", "0", "--no-access-log"]
    child = subprocess.Popen(
        [sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stderr is not None
        url = next(
            found[1] for line in child.stderr if (found := re.search(r" at (http://\S+)", line))
        )
        reply = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the model failed; see the log"
        assert child.wait(60) == 1
        logged = child.stderr.read()
        assert "unspecified launch failure" in logged and "POST" not in logged
    finally:
        child.kill()
        child.wait()


def test_an_error_of_the_server_has_the_usual_shape(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "completion_sequences", broken)
    with caplog.at_level(logging.ERROR):
        reply = served.complete(prompt="a")
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "an error of the server; its log says more"
    assert reply.headers["cache-control"] == "no-store"
    assert "illegal memory access" in caplog.text and "illegal" not in reply.text
    assert 'path="/v1/completions",status="500"' in httpx.get(f"{served.url}/metrics").text


def test_a_model_that_hangs_is_told_of_and_not_waited_for(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "GRACE_SECONDS", 0.2)
    release = threading.Event()
    with serving(config, limits=Limits(request_seconds=0.3)) as served:
        decoder: Any = served.service.worker._module.decoder
        read, take_in = decoder.read, decoder.take_in
        decoder.read = lambda prompts: release.wait(60) and read(prompts)
        decoder.take_in = lambda parts: release.wait(60) and take_in(parts)
        try:
            reply = served.complete(prompt="a", max_tokens=1)
            assert reply.status_code == 504
            assert "did not answer" in reply.json()["error"]["message"]
        finally:
            release.set()
