"""Serving speed: clients that all want text at once, from `fourfold serve` and from its peer.

One GPT-2 of 124M parameters with random weights; prompts of 64 tokens, 64 new tokens each,
streamed. Each number of clients sends its requests one after the other per client; the first token
is timed from the moment a request is sent. A server is a process of its own on the same machine, so
clients cost it a little. The peer is `transformers serve`, as it is and with continuous batching,
whichever runs; it takes the most probable tokens, we sample with top_k 50, which costs more.

"own prompt + 2 steps" is what a first token may take: its median for one client alone, and two
steps of the server as busy as it then is (the median time between two tokens of a stream).

    python benchmarks/serve.py [--clients 1 4 16 64] [--requests 3] [--slots 16] [--threads 2]
                               [--weights float32] [--peers plain batching]

Needs the extras serve, gpt2 and dev, and for the peer what `transformers[serving]` needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from fourfold.processors import processor_name

VOCAB, PROMPT, NEW, TOP_K = 50304, 64, 64, 50
# Each is one token of GPT-2 after a blank.
TEXT = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye job
word business issue side kind head house service friend father power hour game line end member law
car city community name"""
WORDS = TEXT.split()


@dataclass(frozen=True)
class Timed:
    """One request: seconds to its first token, to its end, between tokens, and tokens."""

    first: float
    whole: float
    gaps: tuple[float, ...]
    tokens: int


Results = dict[int, tuple[float, list[Timed]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", default=["plain", "batching"])
    parser.add_argument("--peer-clients", type=int, nargs="+", default=[16])
    options = parser.parse_args()
    results: dict[str, Results] = {}
    with tempfile.TemporaryDirectory() as directory:
        config = write_run(Path(directory))
        with fourfold_server(config, options) as url:
            results["fourfold"] = measure_all(url, "gpt2", options.clients, options.requests)
        for peer in options.peers:
            try:
                with transformers_server(Path(directory) / "gpt2", peer, options) as url:
                    name = str(Path(directory) / "gpt2")
                    found = measure_all(url, name, options.peer_clients, options.requests)
                    results[f"transformers serve, {peer}"] = found
            except (OSError, httpx.HTTPError, RuntimeError) as error:
                print(f"transformers serve, {peer}, does not run: {error}", file=sys.stderr)
    report(results, options)


def write_run(directory: Path) -> Path:
    """A random GPT-2 as a Hugging Face directory, and a configuration that serves it."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from fourfold.tokenizer import GPT2, Tokenizer

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB)).save_pretrained(directory / "gpt2")
    Tokenizer.load(GPT2).save(directory / "gpt2" / "tokenizer.json")
    names = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "gpt2" / "tokenizer_config.json").write_text(json.dumps(names))
    config = directory / "gpt2.yaml"
    settings = {
        "Global": {"tokenizer": "gpt2"},
        "Engine": {"save_load": {"ckpt_dir": str(directory / "gpt2")}},
    }
    config.write_text(json.dumps(settings))  # JSON is YAML too
    return config


@contextmanager
def fourfold_server(config: Path, options: argparse.Namespace) -> Iterator[str]:
    words = ["--port", "0", "--slots", str(options.slots), "--no-access-log"]
    words += ["-o", f"Inference.weights={options.weights}"]
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


@contextmanager
def transformers_server(model: Path, kind: str, options: argparse.Namespace) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dtype = "float32" if options.weights == "float32" else "bfloat16"
    program = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", str(model), "--device", "cpu"]
    command += ["--dtype", dtype, "--port", str(port), "--host", "127.0.0.1"]
    if kind == "batching":
        command += ["--continuous-batching", "--attn-implementation", "sdpa"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    child = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    try:
        for _ in range(240):
            if child.poll() is not None:
                raise RuntimeError(f"it ended with code {child.returncode} before it served")
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait()


def measure_all(url: str, model: str, clients: list[int], requests: int) -> Results:
    asyncio.run(measure(url, model, clients=1, requests=1))  # the first request warms up
    return {number: asyncio.run(measure(url, model, number, requests)) for number in clients}


async def measure(url: str, model: str, clients: int, requests: int) -> tuple[float, list[Timed]]:
    """Seconds for all requests of all clients, and each of them."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def client(number: int) -> list[Timed]:
            return [await ask(http, model, number, turn) for turn in range(requests)]

        began = time.perf_counter()
        found = await asyncio.gather(*(client(number) for number in range(clients)))
    return time.perf_counter() - began, [one for each in found for one in each]


async def ask(http: httpx.AsyncClient, model: str, client: int, turn: int) -> Timed:
    start, step = 5 * client + 17 * turn, 1 + 2 * (client % 16)
    words = [WORDS[(start + step * place) % len(WORDS)] for place in range(PROMPT)]
    body = {"prompt": " ".join(words), "max_tokens": NEW, "seed": turn, "stream": True}
    if model == "gpt2":  # ours
        body |= {"min_tokens": NEW, "top_k": TOP_K, "stream_options": {"include_usage": True}}
    else:
        body |= {"model": model}
    began, tokens, stamps = time.perf_counter(), 0, list[float]()
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if any(choice.get("text") for choice in event.get("choices", ())):
                stamps.append(time.perf_counter())
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    gaps = tuple(after - before for before, after in pairwise(stamps))
    return Timed(stamps[0] - began, time.perf_counter() - began, gaps, tokens)


def report(results: dict[str, Results], options: argparse.Namespace) -> None:
    print(
        f"{processor_name()}, {options.weights}, {options.slots} slots, {options.threads} threads, "
    )
    print(f"{options.requests} requests a client, load average {os.getloadavg()[0]:.1f}\n")
    print("| server | clients | tokens/s | first token, median | own prompt + 2 steps | slowest |")
    print("|---|---|---|---|---|---|")
    rates: dict[tuple[str, int], float] = {}
    for server, found in results.items():
        alone = None
        for clients, (seconds, timed) in found.items():
            rate = rates[server, clients] = sum(one.tokens for one in timed) / seconds
            firsts = sorted(one.first for one in timed)
            middle = statistics.median(firsts)
            alone = middle if clients == 1 else alone
            step = statistics.median(gap for one in timed for gap in one.gaps)
            allowed = f"{1000 * (alone + 2 * step):.0f} ms" if alone else ""
            print(
                f"| {server} | {clients} | {rate:.1f} | {1000 * middle:.0f} ms | {allowed} "
                f"| {1000 * firsts[-1]:.0f} ms |"
            )
    for (server, clients), rate in rates.items():
        if server != "fourfold" and ("fourfold", clients) in rates:
            ratio = rates["fourfold", clients] / rate
            print(f"\n{ratio:.2f} times the tokens/s of {server} at {clients} clients")


if __name__ == "__main__":
    main()
