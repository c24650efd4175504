"""Generation speed: Fourfold, `transformers` and what memory bandwidth allows.

One GPT-2 of 124M parameters with random weights, written once and read by both sides; prompts of
64 tokens, 64 new tokens each, sampling with top_k 50 and top_p 0.75, batches of 1 and 8. Each
variant is a process of its own; rounds alternate between the variants and medians are taken.
tokens/s is the whole of a call, the prompt included. A step is one token for every sequence of the
batch, and its bound is the time to read the weights once at the bandwidth measured in the same run.

    python benchmarks/generate.py [--rounds 3] [--repeats 2] [--threads 2] [--batches 1 8]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

VOCAB, PROMPT, NEW = 50304, 64, 64
TOP_K, TOP_P = 50, 0.75
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
VARIANTS = [("fourfold", weights) for weights in BYTES]
VARIANTS += [("transformers", "float32"), ("transformers", "bfloat16")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="timed calls of a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", nargs="+", help="variants such as fourfold-float32")
    parser.add_argument("--child", choices=["fourfold", "transformers"], help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.child:
        work = {"fourfold": fourfold_calls, "transformers": transformers_calls}[options.child]
        print("RESULT " + json.dumps(work(options)))
        return
    variants = [v for v in VARIANTS if not options.only or "-".join(v) in options.only]
    results: dict[tuple[str, str], list[dict[str, Any]]] = {variant: [] for variant in variants}
    bandwidths, loads = [], []
    with tempfile.TemporaryDirectory() as directory:
        options.model = directory
        parameters = write_model(directory)
        for number in range(options.rounds):
            bandwidths.append(read_bandwidth(options.threads))
            for variant in variants:
                say(f"round {number + 1}: {' '.join(variant)}, load {os.getloadavg()[0]:.1f}")
                results[variant].append(child(variant, options))
                loads.append(os.getloadavg()[0])
    report(results, parameters, statistics.median(bandwidths), loads, options)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def child(variant: tuple[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Run this file again as a process of its own and read its result."""
    who, weights = variant
    command = [sys.executable, __file__, "--child", who, "--weights", weights]
    command += ["--model", options.model, "--repeats", str(options.repeats)]
    command += ["--threads", str(options.threads), "--batches", *map(str, options.batches)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.rsplit("RESULT ", 1)[1])


def write_model(directory: str) -> int:
    """A random GPT-2 as a Hugging Face directory; returns the parameters a step reads."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB))
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()


def prompts_of(batch: int) -> list[list[int]]:
    return [[(31 * row + 7 * place) % 50000 for place in range(PROMPT)] for row in range(batch)]


def read_bandwidth(threads: int) -> float:
    """Bytes a second at which all threads together read memory: the best of a few products of a
    large matrix and a vector."""
    import torch

    torch.set_num_threads(threads)
    matrix, vector = torch.ones(8192, 16384), torch.ones(16384)  # 537 MB
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        torch.mv(matrix, vector)
        best = min(best, time.perf_counter() - began)
    return matrix.nbytes / best


def timed(work: Any, repeats: int) -> list[float]:
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def fourfold_calls(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from fourfold.convert import load_foreign
    from fourfold.generate import Decoder, Options, generate
    from fourfold.model import GPT

    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    with load_foreign(options.model) as foreign:
        model = GPT(foreign.shape)
        parameters = dict(model.named_parameters())
        for name, tensor in foreign.tensors():
            parameters[name].data.copy_(tensor)
    decoder = Decoder(model, options.weights)
    ready = time.perf_counter() - began
    how = Options(max_dec_len=NEW, min_dec_len=0, top_k=TOP_K, top_p=TOP_P)
    result: dict[str, Any] = {"ready": ready, "calls": {}, "steps": {}}
    for batch in options.batches:
        prompts = prompts_of(batch)
        stamps: list[float] = []

        def stamp(*_: Any, stamps: list[float] = stamps) -> None:
            stamps.append(time.perf_counter())

        def call(prompts: list[list[int]] = prompts, stamp: Any = stamp) -> None:
            generate(decoder, prompts, how, eos_id=None, on_token=stamp)

        result["calls"][batch] = timed(call, options.repeats)
        firsts = stamps[::batch]
        gaps = [after - before for before, after in pairwise(firsts)]
        result["steps"][batch] = statistics.median(gaps)
    return result


def transformers_calls(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    dtype = getattr(torch, options.weights)
    model = GPT2LMHeadModel.from_pretrained(options.model, dtype=dtype).eval()
    ready = time.perf_counter() - began
    model.generation_config.eos_token_id = None
    how = {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "max_new_tokens": NEW}
    result: dict[str, Any] = {"ready": ready, "calls": {}, "steps": {}}
    for batch in options.batches:
        tokens = torch.tensor(prompts_of(batch))
        mask = torch.ones_like(tokens)

        def call(tokens: torch.Tensor = tokens, mask: torch.Tensor = mask) -> None:
            model.generate(tokens, attention_mask=mask, pad_token_id=0, **how)

        result["calls"][batch] = timed(call, options.repeats)
    return result


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(
    results: dict[tuple[str, str], list[dict[str, Any]]],
    parameters: int,
    bandwidth: float,
    loads: list[float],
    options: argparse.Namespace,
) -> None:
    import torch

    print(f"{processor()}, {options.threads} threads, torch {torch.__version__}")
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {parameters / 1e6:.0f}M parameters a step")
    print(f"load average {min(loads):.1f} to {max(loads):.1f}")
    print(f"medians of {options.rounds} x {options.repeats} calls\n")
    print("| batch | variant | tokens/s | of transformers | steps/s | of the bound | ready |")
    print("|---|---|---|---|---|---|---|")
    for batch in map(str, options.batches):
        rates = {
            variant: int(batch)
            * NEW
            / statistics.median(s for run in runs for s in run["calls"][batch])
            for variant, runs in results.items()
        }
        for (who, weights), runs in results.items():
            peer = rates.get(("transformers", "float32" if weights == "float32" else "bfloat16"))
            ratio = f"{rates[who, weights] / peer:.2f}" if peer else ""
            steps = bound = ""
            if who == "fourfold":
                rate = 1 / statistics.median(run["steps"][batch] for run in runs)
                steps = f"{rate:.1f}"
                bound = f"{rate * parameters * BYTES[weights] / bandwidth:.0%}"
            ready = statistics.median(run["ready"] for run in runs)
            print(
                f"| {batch} | {who}, {weights} | {rates[who, weights]:.1f} | {ratio} "
                f"| {steps} | {bound} | {ready:.1f} s |"
            )


if __name__ == "__main__":
    main()
