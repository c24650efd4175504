"""Training speed and memory: Fourfold, `transformers` and the machine's own matrix products.

One run, one model (GPT-2 124M: 12 layers, 768 wide, 12 heads, vocabulary 50304), one batch
(4 x 512 tokens), AdamW with clipping to 1.0, no dropout. Fourfold is run as a user runs it, by
`fourfold train`; `transformers` GPT-2 in each variant worth trying (fp32 and bf16 autocast,
compiled and not, fused AdamW). Each variant is a process of its own, so its peak memory is its
own; rounds alternate between the variants and medians are taken, since machines are noisy. The
matrix-product bound is the time of the model's products alone, at its shapes, in the faster of
fp32 and bf16.

    python benchmarks/train_step.py [--rounds 2] [--steps 3] [--threads 2] [--dtypes float32]
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
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, VOCAB, BATCH, SEQ = 12, 768, 12, 50304, 4, 512
TOKENS = BATCH * SEQ

CONFIG = f"""
Global: {{device: cpu, seed: 1}}
Engine:
  logging_freq: 1
  eval_freq: 0
  tensorboard: False
  save_load: {{save_steps: 0}}
Data:
  batch_size:
    {{global_batch_size: {BATCH}, local_batch_size: {BATCH}, micro_batch_size: {BATCH}}}
  dataset: {{max_seq_len: {SEQ}, split: '1,0,0', eod_mask_loss: False}}
Model:
  vocab_size: {VOCAB}
  hidden_size: {HIDDEN}
  num_layers: {LAYERS}
  num_attention_heads: {HEADS}
  max_position_embeddings: 1024
  hidden_dropout_prob: 0.0
  attention_probs_dropout_prob: 0.0
  use_recompute: False
Optimizer:
  weight_decay: 0.1
  grad_clip: 1.0
  lr: {{decay_steps: 1000, max_lr: 1.0e-4, min_lr: 1.0e-5}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--skip-compiled", action="store_true", help="leave out torch.compile")
    parser.add_argument("--child", choices=["transformers", "bound"], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.child:
        work = {"transformers": transformers_steps, "bound": bound}[options.child]
        print("RESULT " + json.dumps(work(options)))
        return

    dtypes = options.dtypes
    variants = [(who, dtype, False) for who in ("fourfold", "transformers") for dtype in dtypes]
    if not options.skip_compiled:
        variants += [("transformers", dtype, True) for dtype in dtypes]
    results: dict[tuple[str, str, bool], list[dict[str, Any]]] = {v: [] for v in variants}
    bounds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for round_number in range(options.rounds):
        for variant in variants:
            say(f"round {round_number + 1}: {title(variant)}")
            results[variant].append(measure(variant, options))
        for dtype in dtypes:
            say(f"round {round_number + 1}: matrix products in {dtype}")
            bounds[dtype].append(child(options, "bound", dtype, False)["seconds"])
    report(results, bounds, options)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def title(variant: tuple[str, str, bool]) -> str:
    who, dtype, compiled = variant
    return f"{who}, {dtype}" + (", compiled" if compiled else "")


def measure(variant: tuple[str, str, bool], options: argparse.Namespace) -> dict[str, Any]:
    who, dtype, compiled = variant
    if who == "fourfold":
        return fourfold_steps(dtype, options)
    return child(options, "transformers", dtype, compiled)


def child(options: argparse.Namespace, what: str, dtype: str, compiled: bool) -> dict[str, Any]:
    """Run this file again as a process of its own and read its result."""
    command = [sys.executable, __file__, "--child", what, "--dtype", dtype]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    command += ["--compiled"] if compiled else []
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.rsplit("RESULT ", 1)[1])


def fourfold_steps(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """`fourfold train` on random tokens; times and memory are those of its own metrics."""
    with tempfile.TemporaryDirectory() as directory:
        config, data = Path(directory, "config.yaml"), Path(directory, "data")
        data.mkdir()
        config.write_text(CONFIG)
        write_random_tokens(data / "random", (options.steps + 2) * TOKENS + 1)
        overrides = [
            f"Engine.max_steps={options.steps + 1}",
            f"Engine.mix_precision.dtype={dtype}",
            f"Engine.save_load.output_dir={directory}/output",
            f"Data.dataset.input_dir={data}",
        ]
        command = [sys.executable, "-m", "fourfold", "train", "-c", str(config)]
        command += [word for override in overrides for word in ("-o", override)]
        start = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        from datetime import datetime

        from fourfold.metrics import read_jsonl

        records = read_jsonl(Path(directory, "output", "metrics.jsonl"))
        steps = [record for record in records if record["kind"] == "train"]
        first = datetime.fromisoformat(steps[0]["time"]).timestamp() - start
        return {
            "seconds": [step["batch_seconds"] for step in steps[1:]],
            # Before the last record, so that the final checkpoint is not counted.
            "peak_bytes": steps[-1]["peak_rss_bytes"],
            "first_step_seconds": first,
        }


def write_random_tokens(prefix: Path, count: int) -> None:
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, VOCAB, count, dtype=np.uint16)
    np.save(f"{prefix}_ids.npy", tokens)
    np.savez(f"{prefix}_idx.npz", lens=np.array([count], np.int32), docs=np.array([0, 1]))


def transformers_steps(options: argparse.Namespace) -> dict[str, Any]:
    import resource

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    start = time.perf_counter()
    torch.set_num_threads(options.threads)
    config = GPT2Config(vocab_size=VOCAB, n_positions=1024, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    run = torch.compile(model) if options.compiled else model
    dtype = getattr(torch, options.dtype)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1))

    def step() -> float:
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = run(tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), tokens[:, 1:].flatten()
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    step()
    first = time.perf_counter() - start
    seconds = [step() for _ in range(options.steps)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "first_step_seconds": first}


def bound(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step's matrix products alone: every linear layer, the head and attention."""
    import torch

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)

    def median(left: torch.Tensor, right: torch.Tensor) -> float:
        out = torch.matmul(left, right)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            torch.matmul(left, right, out=out)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def linear(inputs: int, outputs: int) -> float:
        """Forward, gradient of the input, gradient of the weight."""
        x, w = torch.randn(TOKENS, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        g = torch.randn(TOKENS, outputs).to(dtype)
        return median(x, w.t()) + median(g, w) + median(g.t(), x)

    layer = sum(
        linear(*size)
        for size in (
            (HIDDEN, 3 * HIDDEN),
            (HIDDEN, HIDDEN),
            (HIDDEN, 4 * HIDDEN),
            (4 * HIDDEN, HIDDEN),
        )
    )
    q = torch.randn(BATCH * HEADS, SEQ, HIDDEN // HEADS).to(dtype)
    p = torch.randn(BATCH * HEADS, SEQ, SEQ).to(dtype)
    # Two products forward and four backward; a causal kernel does half of each.
    attention = 0.5 * (3 * median(q, q.transpose(1, 2)) + 3 * median(p, q))
    return {"seconds": LAYERS * (layer + attention) + linear(HIDDEN, VOCAB)}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(
    results: dict[tuple[str, str, bool], list[dict[str, Any]]],
    bounds: dict[str, list[float]],
    options: argparse.Namespace,
) -> None:
    import torch

    bound_seconds = {dtype: statistics.median(values) for dtype, values in bounds.items()}
    bound_rate = TOKENS / min(bound_seconds.values())
    seconds = {
        variant: statistics.median(s for run in runs for s in run["seconds"])
        for variant, runs in results.items()
    }
    peers = [variant for variant in results if variant[0] == "transformers"]
    best_peer = min(peers, key=lambda variant: seconds[variant])
    print(f"{processor()}, {options.threads} threads, torch {torch.__version__}")
    print(f"{BATCH} x {SEQ} tokens a step, medians of {options.rounds} x {options.steps} steps\n")
    print(
        "| variant | tokens/s | of best transformers | of matmul bound | peak memory | first step |"
    )
    print("|---|---|---|---|---|---|")
    for variant, runs in results.items():
        rate = TOKENS / seconds[variant]
        peak = max(run["peak_bytes"] for run in runs) / 1e9
        first = statistics.median(run["first_step_seconds"] for run in runs)
        ratio = seconds[best_peer] / seconds[variant]
        print(
            f"| {title(variant)} | {rate:.0f} | {ratio:.2f} | {rate / bound_rate:.0%} "
            f"| {peak:.2f} GB | {first:.1f} s |"
        )
    for dtype, value in bound_seconds.items():
        rate = TOKENS / value
        print(f"| matrix products alone, {dtype} | {rate:.0f} | | {rate / bound_rate:.0%} | | |")


if __name__ == "__main__":
    main()
