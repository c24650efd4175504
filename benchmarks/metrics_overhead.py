"""What watching a run costs: training steps with nothing switched on, and with everything.

Two engines in one process train the same small GPT-2 on the same random tokens (by default 6
layers, 512 wide, vocabulary 16384, 4 x 256 tokens: about half a second a step on two cores). One
records nothing between its first step and its last. The other has the metrics port, asked every
second for /metrics and /healthz, the spike detector, norms by layer, a record of every step,
TensorBoard, and with `--trackers` those too. They take turns, in an order that changes from round
to round; of each round the ratio is taken, and of all rounds the median.

    python benchmarks/metrics_overhead.py [--rounds 12] [--steps 5] [--threads 2]
        [--trackers mlflow] [--only KEY]

A third engine is a second one with nothing, so that the noise of the machine is seen beside the
result. `--only spikes` (or layer_norms, logging, tensorboard, port) switches on one of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from fourfold.processors import processor_name

CONFIG = """
Global: {{device: cpu, seed: 1}}
Engine:
  max_steps: 100000
  logging_freq: 100000
  eval_freq: 0
  tensorboard: False
  save_load: {{save_steps: 0}}
Data:
  batch_size: {{global_batch_size: {batch}, micro_batch_size: {batch}}}
  dataset: {{input_dir: {data}, max_seq_len: {seq}, split: '1,0,0', eod_mask_loss: False}}
Model:
  vocab_size: 16384
  hidden_size: {hidden}
  num_layers: {layers}
  num_attention_heads: 8
  max_position_embeddings: {seq}
  hidden_dropout_prob: 0.0
  attention_probs_dropout_prob: 0.0
  use_recompute: False
Optimizer:
  weight_decay: 0.1
  grad_clip: 1.0
  lr: {{decay_steps: 1000, max_lr: 1.0e-4, min_lr: 1.0e-5}}
"""
EVERYTHING = {
    "port": ["Engine.metrics_port=0"],
    "spikes": ["Engine.spikes.action=warn", "Engine.spikes.warm_up=10", "Engine.spikes.window=8"],
    "layer_norms": ["Engine.layer_norms=True", "Engine.logging_freq=1"],
    "logging": ["Engine.logging_freq=1"],
    "tensorboard": ["Engine.tensorboard=True", "Engine.logging_freq=1"],
}


class Side:
    """An engine with its instruments, which trains a few steps at a time."""

    def __init__(self, config: Path, output: Path, overrides: list[str], end: ExitStack) -> None:
        from fourfold.config import load_config
        from fourfold.engine import build_engine
        from fourfold.signals import StopRequest

        output_dir = f"Engine.save_load.output_dir={output}"
        self.engine = build_engine(load_config(config, [output_dir, *overrides], world_size=1))
        self.watch = self.engine._open_instruments(end)
        self.stop = end.enter_context(StopRequest(output, watches_file=True))
        if self.engine.spikes is not None:
            self.engine._watch_spikes(self.engine.spikes, self.watch, self.stop, False)

    def steps(self, number: int) -> float:
        """Seconds of a step, over that many."""
        self.engine.config.Engine.max_steps = self.engine.step + number
        start = time.perf_counter()
        self.engine._train(self.watch, self.stop, save=False)
        return (time.perf_counter() - start) / number

    def url(self) -> str | None:
        ports = [one for one in self.watch.sinks._sinks if hasattr(one, "url")]
        return str(ports[0].url) if ports else None


def scrape(url: str, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        for path in ("/metrics", "/healthz"):
            urllib.request.urlopen(f"{url}{path}", timeout=10).read()


def write_random_tokens(prefix: Path, tokens: int) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    np.save(f"{prefix}_ids.npy", rng.integers(0, 16384, tokens, dtype=np.uint16))
    np.savez(f"{prefix}_idx.npz", lens=np.array([tokens], np.int32), docs=np.array([0, 1]))


def measure(options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    """The times of the rounds of each side."""
    data, config = directory / "data", directory / "config.yaml"
    data.mkdir()
    tokens = (options.rounds * options.steps + 30) * options.batch * options.seq
    write_random_tokens(data / "random", tokens)
    sizes = {name: getattr(options, name) for name in ("batch", "seq", "hidden", "layers")}
    config.write_text(CONFIG.format(data=data, **sizes))
    chosen = EVERYTHING if options.only is None else {options.only: EVERYTHING[options.only]}
    on = [override for overrides in chosen.values() for override in overrides]
    if options.trackers:
        on.append(f"Engine.trackers=[{','.join(options.trackers)}]")
    with ExitStack() as end, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        kinds: dict[str, list[str]] = {"nothing": [], "nothing again": [], "everything": on}
        sides = {name: Side(config, directory / name, keys, end) for name, keys in kinds.items()}
        url, ended = sides["everything"].url(), threading.Event()
        if url is not None:
            threading.Thread(target=scrape, args=(url, ended), daemon=True).start()
        end.callback(ended.set)
        for side in sides.values():
            side.steps(12)  # past the first steps, and the detector's window
        times: dict[str, list[float]] = {name: [] for name in sides}
        names = list(sides)
        for number in range(options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                times[name].append(sides[name].steps(options.steps))
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--trackers", nargs="*", default=[], help="mlflow, aim, swanlab, comet")
    parser.add_argument("--only", choices=EVERYTHING, help="switch on this one alone")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        times = measure(options, Path(directory))
    report(times, options)


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    import torch

    what: Any = "everything" if options.only is None else f"{options.only} alone"
    print(f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{options.rounds} rounds of {options.steps} steps; seconds of a step, median:")
    for name, found in times.items():
        shown = what if name == "everything" else name
        ratios = [one / base for one, base in zip(found, times["nothing"])]
        many = len(ratios) > 1
        parts = statistics.quantiles(ratios, n=4, method="inclusive") if many else ratios * 3
        low, middle, high = parts
        told = f"{statistics.median(found):.4f}"
        if name != "nothing":
            told += f"  {middle - 1:+.2%} (half of the rounds {low - 1:+.2%} to {high - 1:+.2%})"
        print(f"  {shown:<16}{told}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
