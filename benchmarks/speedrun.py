"""How far three recipes come in the same time: bits per byte against seconds of training.

On the quickstart's text, with one tokenizer, one file of tokens and one machine:

    gpt2        configs/gpt/quickstart_gpt2.yaml: GPT-2 and AdamW, by Fourfold
    gpt2 init   the same with depth-scaled initial weights
    plain       GPT-2 and AdamW in the manner of nanoGPT, in plain torch (speedrun_plain.py)
    modern      configs/gpt/quickstart.yaml: the quickstart, by Fourfold
    modern 1/2  the same with half of the time, its schedule included

    python benchmarks/speedrun.py [--seconds 150] [--turn 10] [--plain-lr 1e-3] [--png speedrun.png]

Each is a process of its own, and they train in turns of some seconds, so that a busy minute of the
machine meets them all; a process that waits for its turn does nothing. Before, the time of a step
of each is measured, also in turns, and gives the number of steps its schedule of learning rates is
made for. Only training is timed: from the moment a step asks for its batch to the next. Between two
turns each is evaluated on all of the validation split, in windows of 256 tokens, the same for all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fourfold.processors import processor_name

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "gpt"
CONTESTANTS = ("gpt2", "gpt2 init", "plain", "modern", "modern 1/2")
LENGTH = 256  # tokens of a window
STEPS_OF_TRIAL = 100_000  # more than the trial turns have time for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="of training, for each")
    parser.add_argument("--turn", type=float, default=10.0, help="seconds of a turn")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--dtype", help="by default bfloat16 where the processor has it")
    parser.add_argument("--plain-lr", type=float, default=1e-3)
    parser.add_argument("--plain-layers", type=int, default=4)
    parser.add_argument("--plain-width", type=int, default=256)
    parser.add_argument("--plain-batch", type=int, default=16, help="windows of 256 tokens")
    parser.add_argument("--plain-compiled", action="store_true")
    parser.add_argument("--directory", type=Path, help="where text and tokens are kept")
    parser.add_argument("--png", type=Path, default=Path("speedrun.png"))
    parser.add_argument("--modern", type=Path, default=CONFIGS / "quickstart.yaml", help="its YAML")
    parser.add_argument("-o", "--override", action="append", default=[], help="of modern")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS_OF_TRIAL, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    options.dtype = options.dtype or default_dtype()
    if options.child:
        compete(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        options.directory = options.directory or Path(scratch)
        bits_per_nat = make_tokens(options)
        runs = race(options, measure_steps(options))
    curves = [Curve.of(run, bits_per_nat) for run in runs]
    say_results(curves, options)
    draw(curves, options.png)


def default_dtype() -> str:
    from fourfold.cli.quickstart import has_fast_bfloat16

    return "bfloat16" if has_fast_bfloat16() else "float32"


# -- the text -------------------------------------------------------------------------------------


def make_tokens(options: argparse.Namespace) -> float:
    """The quickstart's tokens, each split as one array. Returns what a mean loss in nats a token is
    multiplied with to be bits per byte of the validation split."""
    from fourfold.cli.quickstart import make_data
    from fourfold.config import load_config
    from fourfold.data.splits import open_splits
    from fourfold.tokenizer import Tokenizer

    directory = options.directory
    config = load_config(options.modern, [*places(directory, directory), *options.override])
    make_data(directory, config.Model.vocab_size, None)
    for name, part in open_splits(config).items():
        (source,) = part.datasets
        documents = part.spec.documents(source)
        flat = np.concatenate([source.tokens(number) for number in documents])
        np.save(directory / f"{name}.npy", flat)
    windows = validation_windows(directory)
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    ids = windows[:, 1:].flatten().tolist()
    text = tokenizer.decode([one for one in ids if one != tokenizer.eos_id])
    return len(ids) / math.log(2) / len(text.encode())


def validation_windows(directory: Path) -> torch.Tensor:
    """All windows of the validation split, one after the other, each with the token after it."""
    tokens = torch.from_numpy(np.load(directory / "valid.npy").astype(np.int64))
    return tokens[: (len(tokens) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)


def places(directory: Path, output: Path) -> list[str]:
    return [
        f"Global.tokenizer={directory / 'tokenizer.json'}",
        f"Data.dataset.input_dir={directory / 'data'}",
        f"Engine.save_load.output_dir={output}",
    ]


# -- a contestant: a process that trains while it has its turn -----------------------------------


@dataclass
class Turns:
    """The contestant's side. It answers each turn with its time, its steps and its loss."""

    evaluate: Callable[[], float]  # mean loss of the validation split, in nats
    answers: IO[str]
    trained: float = 0.0
    left: float = 0.0
    step_began: float | None = None
    tally: list[float] = field(default_factory=list)  # seconds of each step

    def begin_step(self) -> None:
        """Before each step; waits here where the turn is over."""
        self._count()
        while self.left <= 0:
            self._answer(done=False)
            self.left = float(input())
        self.step_began = time.perf_counter()

    def end(self) -> None:
        self._count()
        self._answer(done=True)

    def _count(self) -> None:
        if self.step_began is not None:
            seconds = time.perf_counter() - self.step_began
            self.trained, self.left = self.trained + seconds, self.left - seconds
            self.tally.append(seconds)
            self.step_began = None

    def _answer(self, *, done: bool) -> None:
        answer = {"seconds": self.trained, "steps": len(self.tally), "loss": self.evaluate()}
        print(json.dumps(answer | {"done": done}), file=self.answers, flush=True)


def compete(options: argparse.Namespace) -> None:
    # Standard output is for answers; whatever else is printed goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if options.child == "plain":
        compete_plain(options, answers)
    else:
        compete_fourfold(options, answers)


def compete_plain(options: argparse.Namespace, answers: IO[str]) -> None:
    from speedrun_plain import PlainOptions, PlainRun

    train = np.load(options.directory / "train.npy")
    run = PlainRun(
        PlainOptions(
            vocab_size=vocab_size(options),
            max_steps=options.steps,
            layers=options.plain_layers,
            width=options.plain_width,
            heads=options.plain_width // 64,
            batch=options.plain_batch,
            positions=LENGTH,
            lr=options.plain_lr,
            dtype=options.dtype,
            compiled=options.plain_compiled,
        ),
        train,
    )
    parts = validation_windows(options.directory).split(64)

    def evaluate() -> float:
        return sum(run.loss(part) * len(part) for part in parts) / sum(map(len, parts))

    turns = Turns(evaluate, answers)
    for _ in run.steps():
        turns.begin_step()
    turns.end()


def compete_fourfold(options: argparse.Namespace, answers: IO[str]) -> None:
    from fourfold.cli.quickstart import BFLOAT16
    from fourfold.config import load_config
    from fourfold.data import Batch
    from fourfold.engine import build_engine

    is_modern = options.child.startswith("modern")
    with tempfile.TemporaryDirectory() as output:
        overrides = [
            *places(options.directory, Path(output)),
            f"Model.vocab_size={vocab_size(options)}",
            f"Engine.max_steps={options.steps}",
            f"Optimizer.lr.decay_steps={options.steps}",
            f"Engine.mix_precision.dtype={options.dtype}",
            "Engine.eval_freq=0",
            "Engine.test_iters=0",
            "Engine.tensorboard=False",
            *(BFLOAT16 if is_modern and options.dtype == "bfloat16" else ()),
            *(options.override if is_modern else []),
        ]
        if options.child == "gpt2 init":
            overrides.append("Model.depth_scaled_init=True")
        file = options.modern if is_modern else CONFIGS / "quickstart_gpt2.yaml"
        engine = build_engine(load_config(file, overrides))
        windows = validation_windows(options.directory)
        batch = Batch(
            tokens=windows[:, :-1].contiguous(),
            labels=windows[:, 1:].contiguous(),
            loss_mask=torch.ones(len(windows), LENGTH),
            position_ids=torch.arange(LENGTH).expand(len(windows), LENGTH).contiguous(),
            sample_ids=np.arange(len(windows)),
            global_valid_tokens=float(len(windows) * LENGTH),
        )
        turns = Turns(lambda: float(engine.runner.evaluate(batch)), answers)
        loader = engine.data.loaders["train"]
        engine.data.loaders["train"] = InTurns(loader, turns)  # type: ignore[assignment]
        engine.fit(save=False)
        turns.end()


@dataclass
class InTurns:
    """The loader of a run: each step begins with asking it for a batch."""

    loader: Any
    turns: Turns

    def batch(self, number: int) -> Any:
        self.turns.begin_step()
        return self.loader.batch(number)

    def close(self) -> None:
        self.loader.close()


def vocab_size(options: argparse.Namespace) -> int:
    from fourfold.config import load_config

    return load_config(options.modern, options.override).Model.vocab_size


# -- the race -------------------------------------------------------------------------------------


class Contestant:
    """The parent's side of one process."""

    def __init__(self, name: str, options: argparse.Namespace, steps: int) -> None:
        self.name = name
        words = ["--child", name, "--steps", str(steps), "--directory", str(options.directory)]
        words += ["--modern", str(options.modern), "--dtype", options.dtype]
        words += ["--plain-lr", str(options.plain_lr)]
        words += ["--plain-layers", str(options.plain_layers)]
        words += ["--plain-width", str(options.plain_width)]
        words += ["--plain-batch", str(options.plain_batch)]
        words += ["--plain-compiled"] if options.plain_compiled else []
        words += [word for text in options.override for word in ("-o", text)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
        )
        self.answers = [self._read()]

    def take_turn(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        self.answers.append(self._read())

    @property
    def is_done(self) -> bool:
        return bool(self.answers[-1]["done"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            sys.exit(f"{self.name} failed:\n{self.log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure_steps(options: argparse.Namespace) -> dict[str, int]:
    """How many steps each makes in its time, from two trial turns after one to warm up."""
    trials = [name for name in options.only if name != "modern 1/2"]
    if "modern 1/2" in options.only and "modern" not in trials:
        trials.append("modern")
    runs = [Contestant(name, options, STEPS_OF_TRIAL) for name in trials]
    for _ in range(3):
        for run in runs:
            run.take_turn(options.turn / 2)
    steps = {}
    for run in runs:
        first, last = run.answers[1], run.answers[-1]
        each = (last["seconds"] - first["seconds"]) / (last["steps"] - first["steps"])
        steps[run.name] = max(10, round(options.seconds / each))
        run.close()
    if "modern 1/2" in options.only:
        steps["modern 1/2"] = steps["modern"] // 2
    return {name: steps[name] for name in options.only}


def race(options: argparse.Namespace, steps: dict[str, int]) -> list[Contestant]:
    runs = [Contestant(name, options, number) for name, number in steps.items()]
    while any(not run.is_done for run in runs):
        for run in runs:
            if not run.is_done:
                run.take_turn(options.turn)
                last = run.answers[-1]
                print(f"{run.name:>10}  {last['seconds']:6.1f} s  step {last['steps']:5d}  "
                      f"loss {last['loss']:.4f}", file=sys.stderr, flush=True)  # fmt: skip
    for run in runs:
        run.process.wait()
    return runs


# -- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Bits per byte of the validation split after so many seconds of training."""

    name: str
    seconds: list[float]
    bits: list[float]
    steps: int

    @classmethod
    def of(cls, run: Contestant, bits_per_nat: float) -> Curve:
        return cls(
            run.name,
            [answer["seconds"] for answer in run.answers],
            [answer["loss"] * bits_per_nat for answer in run.answers],
            run.answers[-1]["steps"],
        )

    def at(self, second: float) -> float | None:
        """Between two evaluations, in proportion; None after its end."""
        if second > self.seconds[-1] * 1.02:
            return None
        return float(np.interp(second, self.seconds, self.bits))

    def reaches(self, bits: float) -> float | None:
        """The seconds after which it is at `bits` or below."""
        for before, after in zip(range(len(self.bits)), range(1, len(self.bits))):
            if self.bits[after] <= bits:
                falls = self.bits[before] - self.bits[after]
                share = (self.bits[before] - bits) / falls if falls > 0 else 1.0
                return self.seconds[before] + share * (self.seconds[after] - self.seconds[before])
        return None


def say_results(curves: list[Curve], options: argparse.Namespace) -> None:
    print(f"{processor_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{options.dtype}; bits per byte of the validation split\n")  # fmt: skip
    names = [curve.name for curve in curves]
    print("| seconds | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for quarter in range(1, 9):
        second = options.seconds * quarter / 8
        cells = [curve.at(second) for curve in curves]
        shown = ["" if cell is None else f"{cell:.3f}" for cell in cells]
        print(f"| {second:.0f} | " + " | ".join(shown) + " |")
    for label, values in {
        "at the end": [f"{curve.bits[-1]:.3f}" for curve in curves],
        "seconds": [f"{curve.seconds[-1]:.0f}" for curve in curves],
        "steps": [str(curve.steps) for curve in curves],
    }.items():
        print(f"| {label} | " + " | ".join(values) + " |")
    found = {curve.name: curve for curve in curves}
    if plain := found.get("plain"):
        goal, whole = plain.bits[-1], plain.seconds[-1]
        print(f"\nplain ends at {goal:.3f} after {whole:.0f} s.")
        for curve in curves:
            if curve is not plain:
                second = curve.reaches(goal)
                share = "never" if second is None else f"{second:.0f} s, {second / whole:.0%} of it"
                print(f"{curve.name} is there after {share}")


def draw(curves: list[Curve], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for curve in curves:
        axes.plot(curve.seconds[1:], curve.bits[1:], marker=".", label=curve.name)
        if curve.name == "plain":
            axes.axhline(curve.bits[-1], color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation, bits per byte")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.2f}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.1f}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=130)
    print(f"\n{picture}")


if __name__ == "__main__":
    main()
