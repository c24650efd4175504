"""`fourfold serve` from the shell: what it refuses, what it prints, how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.served import TOKEN, chunks, load
from typer.testing import CliRunner

from fourfold.cli import command_line, options
from fourfold.errors import UserError
from fourfold.serve.protocol import Limits
from fourfold.serve.server import make_service

# Data that could tell of the tokenizer is not there.
NO_TEXT = ["-o", "Data.dataset.input_dir=./nowhere"]
BEAMS = ["-o", "Generation.num_beams=2", "-o", "Generation.top_k=0"]


def command(config: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "fourfold", "serve", "-c", str(config), *words]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--host", "::"], "can be reached from other machines"),
        (["--host", "no.such.name.invalid"], "no.such.name.invalid"),
        (["--token-file", "missing"], "--token-file missing: No such file"),
        ([*NO_TEXT, "-o", "Global.tokenizer=null"], "Global.tokenizer is not set"),
        (["-o", "Engine.save_load.ckpt_dir=./nowhere"], "nowhere"),
        (["-o", "Model.num_layers=3"], "of another model"),
        (["-o", "Generation.decode_strategy=beam_search", *BEAMS], "cannot be served"),
        (["-o", "Generation.top_q=1"], "Generation.top_q: unknown key"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_refused(
    config: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOURFOLD_TOKEN", raising=False)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: pytest.fail("it serves"))
    arguments = ["serve", "-c", str(config), "--port", "0", *words]
    with pytest.raises(UserError, match=re.escape(said)):
        CliRunner().invoke(command_line(), arguments, catch_exceptions=False)


@pytest.mark.parametrize("token", ["", "short", "two words of a length", "ünicode-and-long-enough"])
def test_weak_tokens_are_refused(
    config: Path, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(token + "\n")
    arguments = ["serve", "-c", str(config), "--port", "0"]
    with pytest.raises(UserError, match=r"token: a token is one word of at least 16"):
        CliRunner().invoke(
            command_line(), [*arguments, "--token-file", str(file)], catch_exceptions=False
        )
    monkeypatch.setenv("FOURFOLD_TOKEN", token)
    with pytest.raises(UserError, match="FOURFOLD_TOKEN: a token is one word"):
        CliRunner().invoke(command_line(), arguments, catch_exceptions=False)


def test_several_processes_are_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As srun starts them; evaluate too is one process.
    for name, value in {"STEP_NUM_TASKS": "2", "PROCID": "1", "NODELIST": "a[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for verb in ("serve", "evaluate"):
        with pytest.raises(UserError, match=f"{verb} is one process, and SLURM started 2"):
            CliRunner().invoke(command_line(), [verb, "-c", str(config)], catch_exceptions=False)
    assert "WORLD_SIZE" not in os.environ


def test_what_a_request_decides_has_no_effect_in_the_file(config: Path) -> None:
    overrides = ["Generation.num_return_sequences=3", "Generation.seed=7"]
    notices: list[str] = []
    loaded = load(config, *overrides)
    service = make_service(loaded, "a-model", None, 1, Limits(), notices.append)
    assert service.name == "a-model"
    said = [notice for notice in notices if "no effect" in notice]
    assert [notice.split(" ")[0] for notice in said] == [
        "Generation.num_return_sequences",
        "Generation.seed",
    ]


def test_a_missing_extra_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(UserError, match=r"serve needs uvicorn.*pip install 'fourfold\[serve\]'"):
        CliRunner().invoke(command_line(), ["serve", "-c", str(config)], catch_exceptions=False)


def test_a_taken_port_is_one_line_and_exit_code_2(config: Path, taken_port: int) -> None:
    result = subprocess.run(
        command(config, "--port", str(taken_port)), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"fourfold: 127.0.0.1 port {taken_port}: Address already")
    assert result.stderr.count("\n") == 1


@contextmanager
def started(
    config: Path, *words: str, **environment: str
) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address the command prints, and its process."""
    child = subprocess.Popen(
        command(config, "--port", "0", *words),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if found := re.search(r"serving untrained at (http://\S+)", line):
                yield found[1], child
                break
        else:
            raise AssertionError("it ended before it served")
    finally:
        child.kill()
        child.wait()


def test_a_signal_lets_running_replies_finish(config: Path) -> None:
    with started(config, "--slots", "2", FOURFOLD_TOKEN=TOKEN) as (url, child):
        headers = {"authorization": f"Bearer {TOKEN}"}
        body = {"prompt": "the", "max_tokens": 200, "min_tokens": 200, "stream": True}
        client = httpx.Client(base_url=url, headers=headers, timeout=60)
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_text()
            text = next(lines)
            child.send_signal(signal.SIGTERM)
            text += "".join(lines)
        assert text.endswith("data: [DONE]\n\n")
        assert chunks(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert child.wait(30) == 0
        assert child.stderr is not None
        logged = child.stderr.read()
        assert re.search(r"127\.0\.0\.1 POST /v1/completions 200 \S+ s\n", logged)
        assert "Traceback" not in logged
        with pytest.raises(httpx.ConnectError):
            client.get("/health")
