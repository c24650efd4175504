"""Generation speed: Fourfold, `transformers`, and what memory and matrix units allow.

One GPT-2 of 124M parameters, or with `--family llama` a Llama of that class (114M: 12 heads that
share 4 of keys and values, SwiGLU of 2048, a tied head); prompts of 64 tokens, 64 new tokens each,
sampling with top_k 50 and top_p 0.75, batches of 1 and 8. Weights are random, of the same sizes on
both sides: the time does not depend on them. Each variant is a process of its own; rounds alternate
between the variants and medians are taken. tokens/s is the whole of a call, the prompt included;
compilation is over before the first timed call.

`transformers` runs in every way it has for a format, and the best counts: as it is, with a static
cache, and with a static cache and its forward pass compiled by torch. It has no whole-number
formats on a CPU of its own, so for int8 and int4 its linear layers and head become torch's
weight-only kernels (`_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`, groups of 32) in
bfloat16, and with torchao installed also torchao's int8.

A step is one token for every sequence of the batch; its bound is the time to read the weights, the
scales of whole numbers included, once at the read bandwidth measured before and after. The
bound of a prompt of 512 tokens is the time of its matrix products at the rate of torch's own
product of matrices of 2048: those with weights in the format the kernel multiplies in, those of
attention in float32.

    python benchmarks/generate.py [--family gpt2] [--formats float32 int4 ...] [--rounds 2]
                                  [--repeats 3] [--threads 2] [--batches 1 8]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

from fourfold.processors import processor_name

VOCAB, PROMPT, NEW, LONG_PROMPT = 50304, 64, 64, 512
TOP_K, TOP_P = 50, 0.75
clock = time.perf_counter
FORMATS = ["float32", "bfloat16", "float16", "int8", "int4"]
PEERS = ["eager", "static", "compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--family", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--peers", nargs="*", default=PEERS, help="eager static compiled torchao")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the processor's time, for a machine that others use: with --threads 1",
    )
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        assert options.threads == 1, "threads that wait for each other would count too"
        clock = time.process_time
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.child:
        who, weights = options.child
        work = fourfold_calls if who == "fourfold" else transformers_calls
        print("RESULT " + json.dumps(work(options, who, weights)))
        return
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    loads = []
    for number in range(options.rounds):
        for weights in options.formats:
            for who in ["fourfold", *peers_of(weights, options)]:
                say(f"round {number + 1}: {who} {weights}, load {os.getloadavg()[0]:.1f}")
                # Other machines on the same processor take their share: what it is now counts.
                before = read_bandwidth(options.threads) if who == "fourfold" else 0.0
                found = child(who, weights, options)
                if found is not None:
                    after = read_bandwidth(options.threads) if who == "fourfold" else 0.0
                    found["bandwidth"] = (before + after) / 2
                    results.setdefault((who, weights), []).append(found)
                    calls = {b: [round(s, 3) for s in c] for b, c in found["calls"].items()}
                    say(f"  seconds of a call, by batch: {calls}")
                    say(f"  prompt of {LONG_PROMPT}: {found['prompt']:.3f} s")
                loads.append(os.getloadavg()[0])
    rates = {kind: matrix_rate(kind, options.threads) for kind in ("f32", "bf16", "int8")}
    report(results, rates, loads, options)


def peers_of(weights: str, options: argparse.Namespace) -> list[str]:
    """float16 is held against bfloat16, which is faster on processors."""
    return [
        who
        for who in options.peers
        if weights != "float16" and (who != "torchao" or weights == "int8")
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def child(who: str, weights: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run this file again as a process of its own and read its result."""
    command = [sys.executable, __file__, "--child", who, weights]
    command += ["--family", options.family, "--repeats", str(options.repeats)]
    command += ["--threads", str(options.threads), "--batches", *map(str, options.batches)]
    command += ["--cpu-time"] if options.cpu_time else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        say(f"{who} {weights} does not run: {done.stderr.strip().splitlines()[-1][:200]}")
        return None
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])


def shape_of(family: str) -> Any:
    from fourfold.model import ModelShape

    if family == "gpt2":
        return ModelShape(VOCAB, 768, 12, 12, 3072, 1024)
    return ModelShape(
        *(VOCAB, 768, 12, 12, 2048, 1024),
        num_key_value_heads=4,
        activation="swiglu",
        normalization="RMSNorm",
        bias="none",
        position_embedding="rotary",
    )


def transformers_model(family: str, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    shape = shape_of(family)
    config: Any = GPT2Config(vocab_size=VOCAB)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            max_position_embeddings=shape.max_position_embeddings,
            tie_word_embeddings=True,
        )
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def prompts_of(batch: int, length: int = PROMPT) -> list[list[int]]:
    return [[(31 * row + 7 * place) % 50000 for place in range(length)] for row in range(batch)]


# -- bounds ---------------------------------------------------------------------------------------


def best_of(work: Any, times: int = 6) -> float:
    best = float("inf")
    for _ in range(times):
        began = clock()
        work()
        best = min(best, clock() - began)
    return best


def read_bandwidth(threads: int) -> float:
    """Bytes a second at which all threads together read memory: the best of torch's product with a
    vector, its sum, and our product with one row, over some 500 MB on large pages."""
    import torch

    from fourfold.generate.packed import PackedMatrix, kernels

    torch.set_num_threads(threads)
    block = mmap.mmap(-1, 512 << 20)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    matrix = torch.frombuffer(block, dtype=torch.float32).view(8192, 16384)
    vector = torch.ones(16384)
    found = [matrix.nbytes / best_of(work) for work in (lambda: matrix @ vector, matrix.sum)]
    if kernels() is not None:
        packed, row = PackedMatrix("float32", torch.ones(65536, 2048)), torch.ones(1, 2048)
        found.append(packed.nbytes / best_of(lambda: packed.linear(row)))
    return max(found)


def matrix_rate(kind: str, threads: int) -> float:
    """Operations a second of torch's product of two matrices."""
    import torch

    torch.set_num_threads(threads)
    size = 2048
    if kind == "int8":
        a = torch.randint(-127, 128, (size, size)).to(torch.int8)
        return 2 * size**3 / best_of(lambda: torch._int_mm(a, a))
    b = torch.randn(size, size).to(torch.float32 if kind == "f32" else torch.bfloat16)
    return 2 * size**3 / best_of(lambda: b @ b)


def multiplies_in(weights: str) -> str:
    from fourfold import native

    has_bf16 = "avx512_bf16" in native.cpu_flags()
    kinds = {"int8": "int8", "bfloat16": "bf16", "int4": "bf16"}
    kind = kinds.get(weights, "f32")
    return "f32" if kind == "bf16" and not has_bf16 else kind


# -- both sides -----------------------------------------------------------------------------------


def timed(work: Any, repeats: int) -> list[float]:
    work()
    seconds = []
    for _ in range(repeats):
        began = clock()
        work()
        seconds.append(clock() - began)
    return seconds


def fourfold_calls(options: argparse.Namespace, who: str, weights: str) -> dict[str, Any]:
    import torch

    from fourfold.generate import Decoder, Options, generate
    from fourfold.model import GPT, initialize

    torch.set_num_threads(options.threads)
    model = GPT(shape_of(options.family))
    initialize(model, seed=0)
    began = clock()
    decoder = Decoder(model, weights)
    assert decoder.fused is not None, "without compiled kernels there is nothing to measure"
    result: dict[str, Any] = {"ready": clock() - began, "calls": {}, "steps": {}}
    result["bytes"] = decoder.fused.nbytes
    how = Options(max_dec_len=NEW, min_dec_len=0, top_k=TOP_K, top_p=TOP_P)
    for batch in options.batches:
        prompts = prompts_of(batch)
        stamps: list[float] = []

        def stamp(*_: Any, stamps: list[float] = stamps) -> None:
            stamps.append(clock())

        def call(prompts: list[list[int]] = prompts, stamp: Any = stamp) -> None:
            generate(decoder, prompts, how, eos_id=None, on_token=stamp)

        result["calls"][batch] = timed(call, options.repeats)
        firsts = stamps[::batch]
        gaps = [after - before for before, after in pairwise(firsts)]
        result["steps"][batch] = statistics.median(gaps)
    [prompt] = prompts_of(1, LONG_PROMPT)

    def read() -> None:
        decoder.reserve(1, LONG_PROMPT)
        decoder.read([prompt])

    result["prompt"] = statistics.median(timed(read, options.repeats))
    shape = model.shape
    matrices = [row.numel for row in model.table.layer() if row.is_matrix]
    result["operations"] = 2 * LONG_PROMPT * shape.num_layers * sum(matrices)
    # Each token with half of the others, keys and values.
    result["attention"] = 2 * LONG_PROMPT**2 * shape.hidden_size * shape.num_layers
    return result


def transformers_calls(options: argparse.Namespace, who: str, weights: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    began = clock()
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    model = transformers_model(options.family, dtype)
    if weights.startswith("int"):
        plain_linears(model)
        if who == "torchao":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig())
        else:
            whole_number_linears(model, weights)
    ready = clock() - began
    model.generation_config.eos_token_id = None
    how: dict[str, Any] = {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "max_new_tokens": NEW}
    if who != "eager":
        how["cache_implementation"] = "static"
    if who in ("compiled", "torchao"):
        model.forward = torch.compile(model.forward)
    result: dict[str, Any] = {"ready": ready, "calls": {}}
    for batch in options.batches:
        tokens = torch.tensor(prompts_of(batch))
        mask = torch.ones_like(tokens)

        def call(tokens: torch.Tensor = tokens, mask: torch.Tensor = mask) -> None:
            model.generate(tokens, attention_mask=mask, pad_token_id=0, **how)

        call()  # compiles, where that is asked for
        result["calls"][batch] = timed(call, options.repeats)
    long = torch.tensor(prompts_of(1, LONG_PROMPT))

    def read() -> None:
        with torch.inference_mode():
            model(long, use_cache=True, logits_to_keep=1)

    result["prompt"] = statistics.median(timed(read, options.repeats))
    return result


def plain_linears(model: Any) -> None:
    """GPT-2's `Conv1D` as the linear layers that quantizers look for, and a head of its own."""
    import torch
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                inputs, outputs = layer.weight.shape
                linear = torch.nn.Linear(inputs, outputs, dtype=layer.weight.dtype)
                linear.weight.data = layer.weight.data.t().contiguous()
                linear.bias.data = layer.bias.data
                setattr(parent, name, linear)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())


def whole_number_linears(model: Any, weights: str) -> None:
    import torch

    class Whole(torch.nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            weight = linear.weight.data.float()
            self.bias = None if linear.bias is None else linear.bias.data
            if weights == "int8":
                scales = weight.abs().amax(1).clamp_min(1e-9) / 127
                self.weight = (weight / scales[:, None]).round().to(torch.int8)
                self.scales = scales.bfloat16()
            else:
                groups = weight.view(weight.shape[0], -1, 32)
                scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 7
                steps = ((groups / scales).round().clamp(-8, 7) + 8).to(torch.int32)
                self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                    steps.view_as(weight), 2
                )
                both = torch.stack([scales[..., 0].t(), torch.zeros_like(scales[..., 0].t())], -1)
                self.scales = both.bfloat16().contiguous()

        def forward(self, x: Any) -> Any:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            if weights == "int8":
                y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
            else:
                y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, 32, self.scales)
            y = y.view(*x.shape[:-1], -1)
            return y if self.bias is None else y + self.bias

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear):
                setattr(parent, name, Whole(layer))


# -- the report -----------------------------------------------------------------------------------


def report(
    results: dict[tuple[str, str], list[dict[str, Any]]],
    rates: dict[str, float],
    loads: list[float],
    options: argparse.Namespace,
) -> None:
    import torch

    def rate(variant: tuple[str, str], batch: str) -> float:
        calls = [s for run in results[variant] for s in run["calls"][batch]]
        return int(batch) * NEW / statistics.median(calls)

    def middle(weights: str, pick: Any) -> float:
        return statistics.median(pick(run) for run in results["fourfold", weights])

    print(
        f"{options.family} on {processor_name()}, {options.threads} threads, "
        f"torch {torch.__version__}" + (", processor's time" if options.cpu_time else "")
    )
    widths = [
        run["bandwidth"] for (who, _), runs in results.items() if who == "fourfold" for run in runs
    ]
    print(f"read bandwidth {min(widths) / 1e9:.1f} to {max(widths) / 1e9:.1f} GB/s;", end="")
    print(" products, in 1e9 operations a second: ", end="")
    print(", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in rates.items()))
    print(f"load average {min(loads):.1f} to {max(loads):.1f}")
    print(f"medians of {options.rounds} x {options.repeats} calls\n")
    print("| batch | weights | tokens/s | transformers, best | ratio | step | of the bound |")
    print("|---|---|---|---|---|---|---|")
    for batch in map(str, options.batches):
        for weights in options.formats:
            held = "bfloat16" if weights == "float16" else weights
            peers = {
                who: rate((who, form), batch)
                for who, form in results
                if who != "fourfold" and form == held
            }
            ours, best = rate(("fourfold", weights), batch), max(peers, key=peers.get, default=None)
            step = middle(weights, lambda run, batch=batch: run["steps"][batch])
            bound = middle(weights, lambda run: run["bytes"] / run["bandwidth"])
            against = f"{peers[best]:.1f} ({best}) | {ours / peers[best]:.2f}" if best else " | "
            print(
                f"| {batch} | {weights} | {ours:.1f} | {against} | {1000 * step:.2f} ms "
                f"| {bound / step:.0%} |"
            )
            for who, found in peers.items():
                say(f"batch {batch}: {who} {held} {found:.1f} tokens/s")
    print(f"\n| weights | prompt of {LONG_PROMPT} | transformers | of the matrix bound | ready |")
    print("|---|---|---|---|---|")
    for weights in options.formats:
        seconds = middle(weights, lambda run: run["prompt"])
        bound = middle(weights, lambda run: run["operations"]) / rates[multiplies_in(weights)]
        bound += middle(weights, lambda run: run["attention"]) / rates["f32"]
        ready = middle(weights, lambda run: run["ready"])
        held = "bfloat16" if weights == "float16" else weights
        prompts = [
            statistics.median(run["prompt"] for run in runs)
            for (who, form), runs in results.items()
            if who != "fourfold" and form == held
        ]
        peer = f"{1000 * min(prompts):.0f} ms" if prompts else ""
        print(
            f"| {weights} | {1000 * seconds:.0f} ms | {peer} | {bound / seconds:.0%} "
            f"| {ready:.1f} s |"
        )


if __name__ == "__main__":
    main()
