"""Training speed and memory: Fourfold, `transformers` and the machine's own matrix products.

One run, one model (by default GPT-2 124M: 12 layers, 768 wide, 12 heads, vocabulary 50304), one
batch (4 x 512 tokens), AdamW with clipping to 1.0, no dropout. Fourfold is run as a user runs it,
by `fourfold train`; `transformers` in each variant worth trying (fp32 and bf16 autocast, compiled
and not, fused AdamW). Each variant is a process of its own, so its peak memory is its own; rounds
alternate between the variants and medians are taken, since machines are noisy. The matrix-product
bound is the time of the model's products alone, at its shapes, in the same number format as the
variant's.

    python benchmarks/train_step.py [--family llama] [--size 124M] [--rounds 2] [--steps 3]
        [--threads 2] [--dtypes float32] [--avx2] [--static] [--dropout 0.1]

`--family llama` is the modern network: rotary positions, RMSNorm, SwiGLU, three heads of queries
(two in `quickstart`, four in `345M`) to one of keys and values, no biases, a head of its own.

`--avx2` keeps both sides to AVX2, as on processors that have no more; `--static` adds Fourfold with
compiled layers; `--baseline DIR` adds Fourfold as it is in another checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.processors import processor_name


class Size(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def linears(self, family: str) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's products."""
        keys = self.kv_heads * self.hidden // self.heads
        into = [(self.hidden, self.ffn)] * (2 if family == "llama" else 1)
        heads = [(self.hidden, self.hidden), (self.hidden, keys), (self.hidden, keys)]
        if family == "gpt2":
            heads = [(self.hidden, 3 * self.hidden)]
        return [*heads, (self.hidden, self.hidden), *into, (self.ffn, self.hidden)]


SIZES = {
    "gpt2": {
        "quickstart": Size(4, 256, 4, 4, 1024, 4096, 16, 256),
        "124M": Size(12, 768, 12, 12, 3072, 50304, 4, 512),
        "345M": Size(24, 1024, 16, 16, 4096, 50304, 4, 512),
    },
    "llama": {
        "quickstart": Size(4, 256, 4, 2, 768, 4096, 16, 256),
        "124M": Size(12, 768, 12, 4, 2048, 32000, 4, 512),
        "345M": Size(24, 1024, 16, 4, 2816, 32000, 4, 512),
    },
}
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}

CONFIG = """
Global: {{device: cpu, seed: 1}}
Engine:
  logging_freq: 1
  eval_freq: 0
  tensorboard: False
  save_load: {{save_steps: 0}}
Data:
  batch_size:
    global_batch_size: {size.batch}
    micro_batch_size: {size.batch}
  dataset: {{max_seq_len: {size.seq}, split: '1,0,0', eod_mask_loss: False}}
Model:
  vocab_size: {size.vocab}
  hidden_size: {size.hidden}
  num_layers: {size.layers}
  num_attention_heads: {size.heads}
  ffn_hidden_size: {size.ffn}
  max_position_embeddings: 1024
  hidden_dropout_prob: 0.0
  attention_probs_dropout_prob: {dropout}
  use_recompute: False{family}
Optimizer:
  weight_decay: 0.1
  grad_clip: 1.0
  lr: {{decay_steps: 1000, max_lr: 1.0e-4, min_lr: 1.0e-5}}
"""

FAMILIES = {
    "gpt2": "",
    "llama": """
  num_key_value_heads: {size.kv_heads}
  position_embedding: rotary
  normalization: RMSNorm
  activation: swiglu
  bias: none
  tie_word_embeddings: False""",
}

# Who, number format, whether compiled.
Variant = tuple[str, str, bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=SIZES, default="gpt2")
    parser.add_argument("--size", choices=SIZES["gpt2"], default="124M")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention")
    parser.add_argument("--avx2", action="store_true", help="instructions up to AVX2 on all sides")
    parser.add_argument("--static", action="store_true", help="Fourfold with compiled layers too")
    parser.add_argument("--baseline", help="a checkout of Fourfold to measure beside this one")
    parser.add_argument("--skip-compiled", action="store_true", help="leave out torch.compile")
    parser.add_argument("--child", choices=["transformers", "bound"], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.avx2:
        os.environ.update(AVX2)
    if options.child:
        work = {"transformers": transformers_steps, "bound": bound}[options.child]
        print("RESULT " + json.dumps(work(options)))
        return

    dtypes = options.dtypes
    variants: list[Variant] = [("fourfold", dtype, False) for dtype in dtypes]
    if options.static:
        variants += [("fourfold", dtype, True) for dtype in dtypes]
    if options.baseline:
        variants += [("fourfold before", dtype, False) for dtype in dtypes]
    for compiled in (False,) if options.skip_compiled else (False, True):
        variants += [("transformers", dtype, compiled) for dtype in dtypes]
    results: dict[Variant, list[dict[str, Any]]] = {v: [] for v in variants}
    bounds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for round_number in range(options.rounds):
        for variant in variants:
            say(f"round {round_number + 1}: {title(variant)}")
            try:
                results[variant].append(measure(variant, options))
            except subprocess.CalledProcessError as error:
                say(f"{title(variant)} does not run: it ended with code {error.returncode}")
        for dtype in dtypes:
            say(f"round {round_number + 1}: matrix products in {dtype}")
            bounds[dtype].append(child(options, "bound", dtype, False)["seconds"])
    report({variant: runs for variant, runs in results.items() if runs}, bounds, options)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def title(variant: Variant) -> str:
    who, dtype, compiled = variant
    return f"{who}, {dtype}" + (", compiled" if compiled else "")


def measure(variant: Variant, options: argparse.Namespace) -> dict[str, Any]:
    who, dtype, compiled = variant
    if who == "transformers":
        return child(options, "transformers", dtype, compiled)
    return fourfold_steps(dtype, compiled, options.baseline if "before" in who else None, options)


def child(options: argparse.Namespace, what: str, dtype: str, compiled: bool) -> dict[str, Any]:
    """Run this file again as a process of its own and read its result."""
    command = [sys.executable, __file__, "--child", what, "--dtype", dtype]
    command += ["--family", options.family, "--size", options.size]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    command += ["--dropout", str(options.dropout)]
    command += ["--compiled"] if compiled else []
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.rsplit("RESULT ", 1)[1])


def fourfold_steps(
    dtype: str, compiled: bool, checkout: str | None, options: argparse.Namespace
) -> dict[str, Any]:
    """`fourfold train` on random tokens; times and memory are those of its own metrics."""
    size = SIZES[options.family][options.size]
    with tempfile.TemporaryDirectory() as directory:
        config, data = Path(directory, "config.yaml"), Path(directory, "data")
        data.mkdir()
        family = FAMILIES[options.family].format(size=size)
        config.write_text(CONFIG.format(size=size, dropout=options.dropout, family=family))
        write_random_tokens(data / "random", (options.steps + 2) * size.tokens + 1, size.vocab)
        overrides = [
            f"Engine.max_steps={options.steps + 1}",
            f"Engine.mix_precision.dtype={dtype}",
            f"Engine.save_load.output_dir={directory}/output",
            f"Data.dataset.input_dir={data}",
        ]
        overrides += ["Engine.graph_mode=static"] if compiled else []
        command = [sys.executable, "-m", "fourfold", "train", "-c", str(config)]
        command += [word for override in overrides for word in ("-o", override)]
        # Of the directory a module is started in Python imports first.
        start = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=checkout)
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


def write_random_tokens(prefix: Path, count: int, vocab: int) -> None:
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, vocab, count, dtype=np.uint16)
    np.save(f"{prefix}_ids.npy", tokens)
    np.savez(f"{prefix}_idx.npz", lens=np.array([count], np.int32), docs=np.array([0, 1]))


def transformers_steps(options: argparse.Namespace) -> dict[str, Any]:
    import resource

    import torch

    start = time.perf_counter()
    torch.set_num_threads(options.threads)
    size = SIZES[options.family][options.size]
    model = transformers_model(options.family, size, options.dropout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    run = torch.compile(model) if options.compiled else model
    dtype = getattr(torch, options.dtype)
    tokens = torch.randint(0, size.vocab, (size.batch, size.seq + 1))

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


def transformers_model(family: str, size: Size, dropout: float) -> Any:
    """With attention through scaled_dot_product_attention, which is their default."""
    if family == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size.vocab,
                hidden_size=size.hidden,
                intermediate_size=size.ffn,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                num_key_value_heads=size.kv_heads,
                max_position_embeddings=1024,
                attention_dropout=dropout,
                attn_implementation="sdpa",
                use_cache=False,
            )
        )
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocab,
        n_positions=1024,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        use_cache=False,
    )
    config.resid_pdrop = config.embd_pdrop = 0.0
    config.attn_pdrop = dropout
    return GPT2LMHeadModel(config)


def bound(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step's matrix products alone: every linear layer, the head and attention."""
    import torch

    torch.set_num_threads(options.threads)
    dtype, size = getattr(torch, options.dtype), SIZES[options.family][options.size]

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
        x, w = torch.randn(size.tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        g = torch.randn(size.tokens, outputs).to(dtype)
        return median(x, w.t()) + median(g, w) + median(g.t(), x)

    layer = sum(linear(*features) for features in size.linears(options.family))
    all_heads = size.batch * size.heads
    q = torch.randn(all_heads, size.seq, size.hidden // size.heads).to(dtype)
    p = torch.randn(all_heads, size.seq, size.seq).to(dtype)
    # Two products forward and four backward; a causal kernel does half of each.
    attention = 0.5 * (3 * median(q, q.transpose(1, 2)) + 3 * median(p, q))
    return {"seconds": size.layers * (layer + attention) + linear(size.hidden, size.vocab)}


def report(
    results: dict[Variant, list[dict[str, Any]]],
    bounds: dict[str, list[float]],
    options: argparse.Namespace,
) -> None:
    import torch

    size = SIZES[options.family][options.size]
    bound_seconds = {dtype: statistics.median(values) for dtype, values in bounds.items()}
    seconds = {
        variant: statistics.median(s for run in runs for s in run["seconds"])
        for variant, runs in results.items()
    }
    peers = [variant for variant in results if variant[0] == "transformers"]
    best = {
        dtype: min(seconds[variant] for variant in peers if variant[1] == dtype)
        for dtype in options.dtypes
    }
    instructions = ", AVX2 only" if options.avx2 else ""
    print(f"{processor_name()}{instructions}, {options.threads} threads, torch {torch.__version__}")
    print(
        f"{options.family} {options.size}, {size.batch} x {size.seq} tokens a step, attention "
        f"dropout {options.dropout:g}, medians of {options.rounds} x {options.steps} steps\n"
    )
    print(
        "| variant | of best transformers | the same format | of matmul bound | tokens/s "
        "| peak memory | first step |"
    )
    print("|---|---|---|---|---|---|---|")
    for variant, runs in results.items():
        own, dtype = seconds[variant], variant[1]
        peak = max(run["peak_bytes"] for run in runs) / 1e9
        first = statistics.median(run["first_step_seconds"] for run in runs)
        print(
            f"| {title(variant)} | {min(best.values()) / own:.2f} | {best[dtype] / own:.2f} "
            f"| {bound_seconds[dtype] / own:.0%} | {size.tokens / own:.0f} | {peak:.2f} GB "
            f"| {first:.1f} s |"
        )
    for dtype, value in bound_seconds.items():
        print(f"| matrix products alone, {dtype} | | | 100% | {size.tokens / value:.0f} | | |")


if __name__ == "__main__":
    main()
