"""The progress of a TrainJob, against a TLS server made here."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fourfold.metrics.progress import CA_CERT, TOKEN, URL, KubeflowProgress
from fourfold.metrics.sinks import Sinks

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

STATUS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/gpt/status"


class StatusServer:
    """Keeps what was posted; answers with `code`, after `pause` seconds."""

    def __init__(self, directory: Path) -> None:
        self.posted: list[tuple[str, str | None, dict[str, Any]]] = []
        self.times: list[float] = []
        self.code, self.pause = 200, 0.0
        self.ca, self.token = directory / "ca.crt", directory / "token"
        self.token.write_text("sesame\n")
        key = directory / "key.pem"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        subprocess.run([*words, "-keyout", key, "-out", self.ca], check=True, capture_output=True)
        keeper = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                keeper.times.append(time.monotonic())
                keeper.posted.append((self.path, self.headers["Authorization"], body))
                time.sleep(keeper.pause)
                self.send_response(keeper.code)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.server.server_port}{STATUS}"

    def sink(self, seconds_between: float = 0.0, **other: str) -> KubeflowProgress:
        files = {"token_file": str(self.token), "ca_file": str(self.ca)} | other
        return KubeflowProgress(self.url, **files, max_steps=200, seconds_between=seconds_between)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    started = StatusServer(tmp_path)
    yield started
    started.server.shutdown()
    started.server.server_close()


def record(step: int, **other: Any) -> dict[str, Any]:
    """The fields of a training record that matter here."""
    fields = {"loss": 4.25, "learning_rate": 1e-4, "grad_norm": None, "batch_seconds": 0.5}
    return {"kind": "train", "step": step, "tokens": 4096, **fields, **other}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_progress_is_posted_in_kubeflows_words(server: StatusServer) -> None:
    variables = {URL: server.url, TOKEN: str(server.token), CA_CERT: str(server.ca)}
    sink = KubeflowProgress.from_environment(variables, max_steps=200)
    assert sink is not None
    sink.write(record(50, loss=float("nan"), mfu=0.31))
    sink.close()
    ((path, authorization, body),) = server.posted
    assert (path, authorization) == (STATUS, "Bearer sesame")
    status = body["trainerStatus"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", status.pop("lastUpdatedTime"))
    metrics = {metric["name"]: metric["value"] for metric in status.pop("metrics")}
    assert metrics == {"learning_rate": "0.0001", "tokens": "4096", "mfu": "0.31"}
    assert status == {"progressPercentage": 25, "estimatedRemainingSeconds": 75}


def test_nobody_asks_outside_a_train_job() -> None:
    assert KubeflowProgress.from_environment({}, 10) is None


def test_an_evaluation_is_added_to_what_is_known(server: StatusServer) -> None:
    sink = server.sink()
    sink.write(record(50))
    sink.write({"kind": "eval", "step": 50, "loss": 4.5})
    sink.write({"kind": "notice", "step": 50, "text": "a word"})
    sink.close()
    names = {metric["name"] for metric in server.posted[-1][2]["trainerStatus"]["metrics"]}
    assert {"loss", "eval_loss"} <= names


def test_steps_faster_than_the_server_wants_are_left_out_and_the_last_is_sent(
    server: StatusServer,
) -> None:
    sink = server.sink(seconds_between=60.0)
    for step in range(1, 201):
        sink.write(record(step))
    wait_for(lambda: len(server.posted) == 1)
    sink.close()
    shown = [body["trainerStatus"]["progressPercentage"] for _, _, body in server.posted]
    assert len(shown) <= 2 and shown[-1] == 100


@pytest.mark.parametrize("fault", ["code", "token", "ca", "gone"])
def test_a_failure_is_said_once_and_ends_nothing(
    fault: str, server: StatusServer, tmp_path: Path
) -> None:
    wrong = str(tmp_path / "missing")
    files = {"token": {"token_file": wrong}, "ca": {"ca_file": wrong}}.get(fault, {})
    sink, said = server.sink(**files), Said()
    sinks = Sinks(said, sink)
    if fault == "code":
        server.code = 403
    if fault == "gone":
        server.server.shutdown()
        server.server.server_close()
    sinks._write("train", record(1))
    wait_for(lambda: sink._problem is not None)
    for step in range(2, 6):
        sinks._write("train", record(step))
    sinks.close()
    (warning,) = [text for text in said.texts if "TrainJob" in text]
    assert warning.startswith("the progress of the TrainJob cannot be written (")
    assert "the run continues" in warning


class Said:
    """A sink that keeps the notices."""

    name = "said"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "notice":
            self.texts.append(record["text"])

    def close(self) -> None:
        pass


def test_a_server_that_does_not_answer_keeps_no_step_waiting(server: StatusServer) -> None:
    server.pause = 2.0
    sink = server.sink()
    sink.write(record(1))
    wait_for(lambda: len(server.posted) == 1)
    began = time.monotonic()
    for step in range(2, 100):
        sink.write(record(step))
    assert len(server.posted) == 1 and time.monotonic() - began < server.pause
    server.pause = 0.0
    sink.close()


def test_a_token_is_not_sent_in_the_clear(server: StatusServer) -> None:
    sink = KubeflowProgress(
        server.url.replace("https", "http"), str(server.token), None, 10, seconds_between=0.0
    )
    sink.write(record(1))
    wait_for(lambda: sink._problem is not None)
    assert "no https:// address" in str(sink._problem)
    sink.close()
    assert server.posted == []
