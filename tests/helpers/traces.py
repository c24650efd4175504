"""What a run leaves behind, whatever its layout: losses, gradients, norms, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import yaml

from fourfold.config import Config, load_config
from fourfold.config.batch_schedule import BatchSchedule
from fourfold.engine import Engine, build_engine, saving
from fourfold.metrics import Meter, Sinks
from fourfold.signals import StopRequest
from helpers.layout_table import Case
from helpers.ranks import on_ranks
from helpers.tiny_run import TINY

STEPS = 5
SAVED_STEP = 3

BASE = [
    "Model.num_layers=4",
    "Model.hidden_dropout_prob=0.0",
    "Model.attention_probs_dropout_prob=0.0",
    # Adam turns the rounding noise of a gradient that is zero into a step; this keeps it small.
    "Optimizer.adam_epsilon=1.0e-4",
    "Optimizer.lr.max_lr=1.0e-3",
    "Data.batch_size.global_batch_size=16",
    "Data.batch_size.local_batch_size=null",
    "Data.batch_size.micro_batch_size=1",
    f"Engine.max_steps={STEPS}",
    "Engine.save_load.keep_last=0",
]

Whole = dict[str, np.ndarray]


@dataclass
class Rectangle:
    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluation: float = 0.0
    gradients: list[Rectangle] = field(default_factory=list)  # of the first step
    initial: list[Rectangle] = field(default_factory=list)
    weights: list[Rectangle] = field(default_factory=list)  # after the last step


class Workshop:
    """A directory in which cases run; what ran once is not run again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.yaml = folder / "tiny.yaml"
        self.yaml.write_text(yaml.safe_dump(TINY))
        self.references: dict[tuple[str, ...], list[Trace]] = {}
        self.traces: dict[str, list[Trace]] = {}

    def settings(self, name: str) -> list[str]:
        """What all cases share, with places of their own for the run `name`."""
        places = [
            f"Engine.save_load.output_dir={self.folder / name}",
            f"Data.dataset.cache_dir={self.folder / 'cache'}",
        ]
        return [*BASE, *places]

    def config(self, world: int, name: str, overrides: Iterable[str]) -> Config:
        return load_config(self.yaml, [*self.settings(name), *overrides], world_size=world)

    def reference(self, case: Case) -> list[Trace]:
        """One process, with the settings of the case that change the numbers."""
        key = (case.dtype, *case.shared())
        if key not in self.references:
            name = f"one_process_{len(self.references)}"
            work = self.work(1, name, case.shared(), case.dtype)
            self.references[key] = on_ranks(1, work)
        return self.references[key]

    def trace(self, case: Case) -> list[Trace]:
        """Every rank's view of the case's run, saved at `SAVED_STEP`."""
        if case.name not in self.traces:
            work = self.work(case.world, self.place(case), case.overrides(), case.dtype)
            self.traces[case.name] = on_ranks(case.world, work)
        return self.traces[case.name]

    def resumed(self, saved: Case, case: Case) -> list[Trace]:
        """The steps after `SAVED_STEP` under another layout, from what `saved` wrote."""
        self.trace(saved)
        start = self.folder / self.place(saved) / f"step_{SAVED_STEP}"
        overrides = [*case.overrides(), f"Engine.save_load.ckpt_dir={start}"]
        name = f"{self.place(saved)} then {self.place(case)}"
        return on_ranks(case.world, self.work(case.world, name, overrides, case.dtype))

    @staticmethod
    def place(case: Case) -> str:
        return case.name.replace(",", "").replace(" ", "_").replace("/", "_")

    def work(
        self, world: int, name: str, overrides: list[str], dtype: str
    ) -> Callable[[int], Trace]:
        def run(rank: int) -> Trace:
            if dtype == "float64":
                torch.set_default_dtype(torch.float64)
            return _run(self.config(world, name, overrides), world)

        return run


def _run(config: Config, world: int) -> Trace:
    engine, trace = build_engine(config, world), Trace()
    trace.initial = _rectangles(engine, gradients=False)
    engine.resume()
    start, update = engine.step, engine.optimizer.update

    def observed(rate: float, norm: float, scale: float = 1.0) -> None:
        if engine.step == 1:
            trace.gradients = _rectangles(engine, gradients=True, divisor=scale)
        update(rate, norm, scale)

    engine.optimizer.update = observed  # type: ignore[method-assign]
    meter, sinks = Meter(batch_schedule=BatchSchedule(1), seq_len=1), Sinks()
    with StopRequest(engine.output_dir) as stop:
        for step in range(start, STEPS):
            batch = engine.data.loaders["train"].batch(step)
            engine.step = step + 1
            [outcome], *_ = engine._train_step(batch, meter, sinks, stop)
            trace.losses.append(outcome.loss)
            trace.norms.append(outcome.grad_norm)
            if engine.step == SAVED_STEP and start == 0:
                # An evaluation in between must leave nothing behind.
                engine.runner.evaluate(engine.data.loaders["valid"].batch(1))
                saving.save(engine, meter)
    share = float(engine.runner.evaluate(engine.data.loaders["valid"].batch(0)))
    (trace.evaluation,) = engine.mesh.all_reduce(share)
    trace.weights = _rectangles(engine, gradients=False)
    engine.runner.check_replicas("at the end")
    saving.finish(engine)
    engine.data.close()
    engine.mesh.close()
    return trace


def _rectangles(engine: Engine, gradients: bool, divisor: float = 1.0) -> list[Rectangle]:
    """What this rank speaks for of the weights or of the gradients."""
    return [
        Rectangle(
            shard.name,
            shard.shape,
            shard.offsets,
            (shard.gradient if gradients else shard.local).double().numpy() / divisor,
        )
        for shard in engine.runner.shards.values()
        if shard.owns_norm
    ]


def whole(parts: Iterable[list[Rectangle]]) -> Whole:
    """The tensors the ranks' rectangles make up; every element must be in just one of them."""
    tensors: Whole = {}
    covered: dict[str, np.ndarray] = {}
    for rectangle in (one for part in parts for one in part):
        tensor = tensors.setdefault(rectangle.name, np.zeros(rectangle.shape))
        count = covered.setdefault(rectangle.name, np.zeros(rectangle.shape, np.int64))
        place = tuple(
            slice(start, start + size)
            for start, size in zip(rectangle.offsets, rectangle.values.shape)
        )
        tensor[place] = rectangle.values
        count[place] += 1
    for name, count in covered.items():
        assert (count == 1).all(), f"{name} is held {count.min()} to {count.max()} times"
    return tensors


def relative(values: Iterable[float], expected: Iterable[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def deviation(tensors: Whole, expected: Whole) -> float:
    """The largest difference, relative to the largest value of its tensor.

    Some gradients are zero but for rounding (a key's bias moves every score of a row alike), so a
    tensor counts with at least a thousandth of the largest value of all.
    """
    assert tensors.keys() == expected.keys()
    largest = max(np.abs(tensor).max() for tensor in expected.values())
    return max(
        np.abs(tensors[name] - tensor).max() / max(np.abs(tensor).max(), largest / 1000)
        for name, tensor in expected.items()
    )
