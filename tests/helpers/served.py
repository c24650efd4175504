"""A small random model behind a real server, in a thread of this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml

from fourfold import checkpoint
from fourfold.config import Config, load_config
from fourfold.model import GPT, ModelShape, initialize
from fourfold.serve.protocol import Limits
from fourfold.serve.server import Service, bind, make_server, make_service
from fourfold.tokenizer import Tokenizer, train
from helpers.tiny_text_run import sentences

TOKEN = "a-token-of-some-length"


def make_untrained(directory: Path) -> Path:
    """A configuration whose checkpoint holds random weights with opinions."""
    tokenizer = train(sentences(200, seed=1), 300)
    tokenizer.save(directory / "tokenizer.json")
    file = directory / "untrained.yaml"
    content = {
        "Global": {"device": "cpu", "tokenizer": str(directory / "tokenizer.json")},
        "Engine": {"save_load": {"output_dir": str(directory / "output")}},
        "Data": {"dataset": {"max_seq_len": 256}},
        "Model": {
            "vocab_size": 320,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 256,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "use_recompute": False,
            "initializer_range": 0.15,
        },
        "Generation": {"max_dec_len": 12, "top_k": 20},
    }
    file.write_text(yaml.safe_dump(content))
    model = GPT(ModelShape.of(load(file).Model))
    initialize(model, seed=5)
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    prefer_words(model, tokenizer)
    tensors = {f"model.{name}": p.data for name, p in model.named_parameters()}
    checkpoint.save(directory / "output", 1, tensors, {"step": 1})
    return file


def prefer_words(model: GPT, tokenizer: Tokenizer) -> None:
    """Readable texts: a direction all positions have in common, which other bytes are against."""
    model.norm.bias.data[0] = 6.0
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id])
        rows = model.embeddings.word.weight.data
        rows[token_id, 0] = 0.0 if text.isascii() and text.isprintable() else -2.0


def load(file: Path, *overrides: str) -> Config:
    return load_config(file, list(overrides), world_size=1)


@dataclass(frozen=True)
class Served:
    service: Service
    port: int
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **named: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **named)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", body)

    def raw(self, data: bytes, seconds: float) -> bytes:
        """What a plain connection answers to these bytes until it is closed or `seconds` pass."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            try:
                connection.sendall(data)
                return connection.recv(65536)
            except (TimeoutError, ConnectionError):
                return b""

    def until(self, condition: Any) -> None:
        wait_until(lambda: condition(self.service.worker))


def everything(connection: socket.socket) -> bytes:
    """All until the server closes the connection, which it must."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@contextmanager
def serving(
    file: Path,
    *overrides: str,
    token: str | None = None,
    slots: int = 4,
    limits: Limits | None = None,
    step_seconds: float = 0.0,
) -> Iterator[Served]:
    limits = limits or Limits()
    listener = bind("127.0.0.1", 0, token)
    config = load(file, *overrides)
    service = make_service(config, "untrained", token, slots, limits, lambda _: None)
    if step_seconds:
        slow_down(service, step_seconds)
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Served(service, listener.getsockname()[1], thread)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def slow_down(service: Service, seconds: float) -> None:
    """Every step takes longer, with the compiled kernels and without."""
    decoder = service.worker._module.decoder

    def slowed(run: Any) -> Any:
        def slowly(given: Any) -> Any:
            time.sleep(seconds)
            return run(given)

        return slowly

    for name in ("advance", "take_in"):
        setattr(decoder, name, slowed(getattr(decoder, name)))


def chunks(text: str) -> list[dict[str, Any]]:
    """The events of a stream, without its end."""
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [json.loads(event) for event in events if event != "[DONE]"]
