"""Serving speed: clients that all want text at once from one `fourfold serve`.

One GPT-2 of 124M parameters with random weights; prompts of 64 tokens, 64 new tokens each, sampling
with top_k 50, streamed. Each number of clients sends its requests one after the other per client;
the first token is timed from the moment a request is sent. The server is a process of its own on
the same machine, so clients cost it a little.

    python benchmarks/serve.py [--clients 1 4 16] [--requests 3] [--slots 16] [--weights float32]
                               [--threads 2]

Needs the extras serve, gpt2 and dev.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

VOCAB, PROMPT, NEW, TOP_K = 50304, 64, 64, 50


@dataclass(frozen=True)
class Timed:
    """One request: seconds to its first token, to its end, and tokens."""

    first: float
    whole: float
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = write_run(Path(directory))
        with server(config, options) as url:
            asyncio.run(measure(url, clients=1, requests=1))  # the first request warms up
            results = {}
            for clients in options.clients:
                results[clients] = asyncio.run(measure(url, clients, options.requests))
    report(results, options)


def write_run(directory: Path) -> Path:
    """A random GPT-2 as a Hugging Face directory, and a configuration that serves it."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB)).save_pretrained(directory / "gpt2")
    config = directory / "gpt2.yaml"
    settings = {
        "Global": {"tokenizer": "gpt2"},
        "Engine": {"save_load": {"ckpt_dir": str(directory / "gpt2")}},
    }
    config.write_text(json.dumps(settings))  # JSON is YAML too
    return config


@contextmanager
def server(config: Path, options: argparse.Namespace) -> Iterator[str]:
    words = [
        "--port",
        "0",
        "--slots",
        str(options.slots),
        "-o",
        f"Inference.weights={options.weights}",
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "fourfold", "serve", "-c", str(config), *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
    )
    try:
        assert child.stderr is not None
        for line in child.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"serving .* at (http://\S+)", line):
                yield found[1]
                return
        sys.exit("the server ended before it served")
    finally:
        child.terminate()
        child.wait()


async def measure(url: str, clients: int, requests: int) -> tuple[float, list[Timed]]:
    """Seconds for all requests of all clients, and each of them."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def client(number: int) -> list[Timed]:
            return [await ask(http, number, turn) for turn in range(requests)]

        began = time.perf_counter()
        found = await asyncio.gather(*(client(number) for number in range(clients)))
    return time.perf_counter() - began, [one for each in found for one in each]


async def ask(http: httpx.AsyncClient, client: int, turn: int) -> Timed:
    start = 31 * client + 17 * turn
    body = {
        "prompt": [(start + 7 * place) % 50000 for place in range(PROMPT)],
        "max_tokens": NEW,
        "min_tokens": NEW,
        "top_k": TOP_K,
        "seed": turn,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - began
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                sys.exit(event["error"]["message"])
            tokens = event.get("usage", {}).get("completion_tokens", tokens)
    assert tokens == NEW, tokens
    return Timed(first, time.perf_counter() - began, tokens)


def report(results: dict[int, tuple[float, list[Timed]]], options: argparse.Namespace) -> None:
    print(f"{options.weights}, {options.slots} slots, {options.threads} threads, ", end="")
    print(f"{options.requests} requests a client, load average {os.getloadavg()[0]:.1f}\n")
    print("| clients | tokens/s | first token, median | slowest | tokens/s of one client |")
    print("|---|---|---|---|---|")
    for clients, (seconds, timed) in results.items():
        rate = sum(one.tokens for one in timed) / seconds
        firsts = sorted(1000 * one.first for one in timed)
        each = statistics.median(one.tokens / one.whole for one in timed)
        print(
            f"| {clients} | {rate:.1f} | {statistics.median(firsts):.0f} ms "
            f"| {firsts[-1]:.0f} ms | {each:.1f} |"
        )


if __name__ == "__main__":
    main()
