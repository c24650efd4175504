"""What `fourfold bisect` costs, in steps: time and memory against the step that it questions.

A network between the tests' and a real one, on two layouts that are equal and on two that are not.
A step's worth is the time of the step as training computes it: forward, backward and update, in a
process that has just started, as both sides of a bisection have; starting processes, opening data
and loading weights come before it for either. Memory is the peak resident set of the processes of
a side, summed, and that of the process that compares.

    python benchmarks/bisect_cost.py [--hidden 512] [--layers 6] [--seq 256] [--batch 8]
        [--micro 1] [--threads 1] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml

PAIRS = {
    "equal": ["Distributed.mp_degree=2"],
    "wrong in the forward pass": ["Distributed.mp_degree=2", "Model.norm_epsilon=1.0e-3"],
    "wrong in the update": ["Distributed.mp_degree=2", "Optimizer.weight_decay=0.02"],
}


def main() -> None:
    options = parsed()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    with tempfile.TemporaryDirectory(prefix="bisect-cost-") as folder:
        file = write_config(Path(folder), options)
        layout = ["Distributed.mp_degree=2"]
        plain: dict[str, list[dict[str, Any]]] = {"one process": [], "mp2": []}
        for _ in range(options.rounds):
            for name, overrides in (("one process", []), ("mp2", layout)):
                plain[name].append(run({"file": str(file), "plain": overrides}, options.threads))
        step = {name: median(each, "seconds") for name, each in plain.items()}
        memory = {name: median(each, "peak_bytes") for name, each in plain.items()}
        for name in plain:
            print(f"a plain step, {name}: {step[name]:.2f} s, {memory[name] / 1e6:.0f} MB")
        for name, overrides in PAIRS.items():
            asked = {"file": str(file), "bisect": overrides}
            told = [run(asked, options.threads) for _ in range(options.rounds)]
            seconds = {
                part: statistics.median(one["cost"][part] for one in told)
                for part in told[0]["cost"]
            }
            whole = sum(seconds.values())
            parts = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items())
            mean = statistics.mean(step.values())
            peak = max(median(told, "A_peak"), median(told, "B_peak"), median(told, "own_peak"))
            print(
                f"{name} (named: {told[0]['named']}): {whole:.2f} s ({parts}), "
                f"{whole / mean:.2f} steps; memory A {median(told, 'A_peak') / 1e6:.0f} MB, "
                f"B {median(told, 'B_peak') / 1e6:.0f} MB, all of it "
                f"{median(told, 'own_peak') / 1e6:.0f} MB: {peak / max(memory.values()):.2f} times"
            )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, value in (
        *(("hidden", 512), ("layers", 6), ("seq", 256), ("batch", 8), ("micro", 1)),
        *(("threads", 1), ("rounds", 3)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_config(folder: Path, options: argparse.Namespace) -> Path:
    from fourfold.accept.trials import VOCABULARY, write_tokens

    write_tokens(folder / "data")
    file = folder / "run.yaml"
    values = {
        "Global": {"device": "cpu"},
        "Engine": {"max_steps": 4, "eval_freq": 0, "test_iters": 0, "tensorboard": False},
        "Data": {
            "batch_size": {"global_batch_size": options.batch, "micro_batch_size": options.micro},
            "dataset": {
                "input_dir": str(folder / "data"),
                "cache_dir": str(folder / "cache"),
                "split": "1",
                "max_seq_len": options.seq,
                "eos_token_id": 0,
            },
        },
        "Model": {
            "vocab_size": 16 * (VOCABULARY + 3),
            "hidden_size": options.hidden,
            "num_layers": options.layers,
            "num_attention_heads": options.hidden // 64,
            "max_position_embeddings": options.seq,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "Optimizer": {"lr": {"max_lr": 1e-4, "min_lr": 1e-5}},
    }
    file.write_text(yaml.safe_dump(values))
    return file


def run(asked: dict[str, Any], threads: int) -> dict[str, Any]:
    """In a process of its own, so that its memory is its own."""
    words = [sys.executable, __file__, "--child", json.dumps(asked | {"threads": threads})]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def child(asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    from fourfold.parallel import layout_of
    from fourfold.question.history import on_ranks, scratch_directory
    from fourfold.question.sides import QUIET, Bisection, Side

    file, threads = Path(asked["file"]), asked["threads"]
    torch.set_num_threads(threads)
    if "bisect" in asked:
        shared = asked["bisect"][1:]
        sides = [Side(file, (), None, threads)]
        sides.append(Side(file, (*asked["bisect"][:1], *shared), None, threads))
        told = Bisection(sides).run().to_dict()
        first = told["first"]
        return {
            "cost": told["cost"],
            "A_peak": told["A"]["peak_bytes"],
            "B_peak": told["B"]["peak_bytes"],
            "own_peak": peak_bytes(),
            "named": "equal" if told["equal"] else f"{first['phase']} {first['name']}",
        }
    from fourfold.config import load_config

    with scratch_directory() as scratch:
        overrides = [*asked["plain"], *QUIET, f"Engine.save_load.output_dir={scratch}"]
        config = load_config(file, overrides)
        world = layout_of(config).world_size
        work = partial(plain_step, config, world)
        _, told = on_ranks(world, scratch, work, config, threads, apart=True)
    return dict(told)


def plain_step(config: Any, world: int) -> dict[str, Any] | None:
    from fourfold.engine import build_engine

    engine = build_engine(config, world)
    started = time.monotonic()
    engine.advance()
    seconds = time.monotonic() - started
    peaks = engine.mesh.gather(str(peak_bytes()))
    engine.data.close()
    if engine.claim is not None:
        engine.claim.release()
    engine.mesh.close()
    told = {"seconds": seconds, "peak_bytes": sum(map(int, peaks))}
    return told if os.environ.get("RANK", "0") == "0" else None


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def median(told: list[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in told)


if __name__ == "__main__":
    main()
