"""What muP promises of a network, looked at in small: activations and the best learning rate keep
their size while the network grows wider (`fourfold mup`).

`check_coordinates` trains a few steps at several widths and measures activations, which is the
coordinate check of Tensor Programs V; `sweep_learning_rates` trains short runs at several widths
and rates and looks for the best. Both do so with muP and without it, on the run's own data and
batch, in one process and in float32.

A network `k` times wider has `k` times as many heads of the same size, and a feed-forward block
`k` times wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fourfold.charts import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    TEXT,
    new_figure,
    save_png,
    style_axes,
    write_heading,
)
from fourfold.config import Config
from fourfold.config.load import ConfigSource
from fourfold.data import Batch
from fourfold.device import select_device, set_numerics
from fourfold.engine.run_data import open_run_data
from fourfold.engine.updates import Asked, updates_of
from fourfold.errors import UserError
from fourfold.mesh import connect
from fourfold.model import GPT
from fourfold.model.gpt import Block
from fourfold.optim import build_optimizer, build_schedule
from fourfold.parallel import layout_of, parallelize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What is measured, in the order in which a network computes it.
PLACES = ("embeddings", "attention", "feed-forward", "residual stream", "logits")
# How far the exponent of width may be from 0 for a size to count as flat: at eight times the width
# a factor of two. What is not scaled right follows the root of the width at least.
FLAT_WITHIN = 1 / 3
# By what the best learning rate may differ between the widths.
MOST_MOVED = 1.5
# The share of a run, at its end, over which its loss is averaged.
JUDGED_SHARE = 0.2

Report = Callable[[str], None]


@dataclass(frozen=True)
class WidthFamily:
    """One configuration at several widths, with muP and without."""

    source: ConfigSource
    widths: Sequence[int]
    base_width: int  # of muP

    @classmethod
    def of(cls, source: ConfigSource, widths: Sequence[int]) -> WidthFamily:
        """muP's base is the file's, or the smallest of the widths."""
        widths = sorted(set(widths))
        if len(widths) < 2:
            raise UserError("one width says nothing about width; give two or more, as 64,128,256")
        written = source.load(world_size=1).Model
        for width in widths:
            ratio = Fraction(width, written.hidden_size)
            heads = (written.num_attention_heads * ratio, written.num_key_value_heads * ratio)
            if any(count.denominator > 1 for count in heads):
                least = math.lcm(*(count.denominator for count in heads)) * width
                raise UserError(
                    f"a width of {width} would have {float(heads[0]):g} attention heads and "
                    f"{float(heads[1]):g} of keys and values, as Model.hidden_size="
                    f"{written.hidden_size} has {written.num_attention_heads} and "
                    f"{written.num_key_value_heads}; choose another, {least} for example"
                )
        return cls(source, widths, written.mup_base_width or widths[0])

    def config(self, width: int, *, mup: bool, **values: Any) -> Config:
        """The configuration at that width; `values` are further keys, with `__` for a dot."""
        written = self.source.load(world_size=1).Model
        ratio = Fraction(width, written.hidden_size)
        changed = {
            "Model.hidden_size": width,
            "Model.head_dim": written.head_dim,
            "Model.num_attention_heads": int(written.num_attention_heads * ratio),
            "Model.num_key_value_heads": int(written.num_key_value_heads * ratio),
            "Model.ffn_hidden_size": round(written.ffn_hidden_size * ratio),
            "Model.mup_base_width": self.base_width if mup else None,
            "Model.use_recompute": False,
            "Engine.mix_precision.dtype": "float32",
            "Engine.mix_precision.level": None,
            "Engine.graph_mode": "dynamic",
            "Engine.train_samples": None,
            "Data.batch_size.rampup": None,
        }
        changed |= {name.replace("__", "."): value for name, value in values.items()}
        return self.source.with_values(changed).load(world_size=1)


class Trial:
    """One network that is being trained here, a step at a time."""

    def __init__(self, config: Config) -> None:
        set_numerics(config.Engine.matmul_precision, config.Engine.deterministic)
        device = select_device(config.Global.device)
        self.runner = parallelize(config, connect(layout_of(config), device), device)
        optimizer = build_optimizer(config, self.runner)
        self.updates = updates_of(self.runner, optimizer)
        self.steps = 0

    @property
    def model(self) -> GPT:
        return self.runner.parts[0]

    def step(self, batch: Batch, learning_rate: float) -> float:
        """The loss before the update; infinite where it is not a number."""
        self.steps += 1
        share = self.runner.run(batch, self.steps)
        self.updates.apply(self.steps, share, learning_rate, 1.0, Asked())
        (result,) = self.updates.results(of_all=True)
        return result.loss if result.finite else math.inf

    @torch.no_grad()
    def activations(self, tokens: Tensor) -> dict[str, list[Tensor]]:
        """Of every place, one tensor for each layer that has it."""
        self.model.eval()
        with recording(self.model) as found:
            found["logits"].append(self.model(tokens.to(self.runner.device)).float().cpu())
        return found


@contextmanager
def recording(model: GPT) -> Iterator[dict[str, list[Tensor]]]:
    """What the modules of the network give while it runs, by place."""
    found: dict[str, list[Tensor]] = {place: [] for place in PLACES}

    def keep(place: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: found[place].append(output.float().cpu().clone())

    hooks = [model.embeddings.register_forward_hook(keep("embeddings"))]
    for layer in model.layers.values():
        assert isinstance(layer, Block)
        modules: dict[str, nn.Module] = {
            "attention": layer.attn, "feed-forward": layer.mlp, "residual stream": layer
        }  # fmt: skip
        hooks += [one.register_forward_hook(keep(place)) for place, one in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def read_batches(config: Config, steps: int) -> list[Batch]:
    """The first ones of the run."""
    data = open_run_data(config, layout_of(config))
    try:
        return [data.loaders["train"].batch(step) for step in range(steps)]
    finally:
        data.close()


def random_batch(config: Config) -> Batch:
    """Tokens without any order, where there is no data at hand."""
    size, length = config.Data.batch_size.global_batch_size, config.Data.dataset.max_seq_len
    generator = torch.Generator().manual_seed(config.Global.seed)
    tokens = torch.randint(config.Model.vocab_size, (size, length + 1), generator=generator)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(size, length),
        position_ids=torch.arange(length).expand(size, length).contiguous(),
        sample_ids=np.arange(size),
        global_valid_tokens=float(size * length),
    )


# -- the coordinate check -------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinates:
    """Mean absolute activations, (places, widths, steps + 1); step 0 is the untrained network."""

    widths: Sequence[int]
    sizes: np.ndarray

    @property
    def steps(self) -> int:
        return int(self.sizes.shape[2]) - 1

    def of(self, place: str) -> np.ndarray:
        """(widths, steps + 1)"""
        sizes: np.ndarray = self.sizes[PLACES.index(place)]
        return sizes

    def exponent(self, place: str) -> float:
        """After the last step, the power of the width that the size follows: 0 is flat.

        Not before: untrained logits shrink with the root of the width under muP, as they should.
        """
        return power(self.widths, self.of(place)[:, -1])

    def is_flat(self, place: str) -> bool:
        return abs(self.exponent(place)) <= FLAT_WITHIN

    @property
    def all_flat(self) -> bool:
        return all(self.is_flat(place) for place in PLACES)


def power(widths: Sequence[int], values: np.ndarray) -> float:
    """The slope of log(value) over log(width)."""
    if not (np.isfinite(values).all() and (values > 0).all()):
        return math.inf
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


def check_coordinates(
    family: WidthFamily, steps: int, batches: Sequence[Batch], *, mup: bool, report: Report
) -> Coordinates:
    """Train every width for `steps` at the file's highest learning rate, and measure."""
    shape = (len(PLACES), len(family.widths), steps + 1)
    sizes = np.zeros(shape)
    for i, width in enumerate(family.widths):
        config = family.config(width, mup=mup)
        trial, rate = Trial(config), config.Optimizer.lr.max_lr
        report(f"width {width}, {'with' if mup else 'without'} muP")
        seen = batches[0].tokens[: config.Data.batch_size.micro_batch_size]
        for step in range(steps + 1):
            if step > 0:
                trial.step(batches[(step - 1) % len(batches)], rate)
            now = trial.activations(seen)
            sizes[:, i, step] = [_size(now[place]) for place in PLACES]
    return Coordinates(family.widths, sizes)


def _size(tensors: Sequence[Tensor]) -> float:
    return float(np.mean([float(one.abs().mean()) for one in tensors]))


# -- learning rates -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """Losses at the end of short runs, (widths, rates)."""

    widths: Sequence[int]
    rates: Sequence[float]
    losses: np.ndarray

    def best(self, width: int) -> float:
        """The rate with the least loss, between those tried: the lowest point of the parabola
        through the best of them and its neighbours, over the logarithm of the rate."""
        losses = self.losses[list(self.widths).index(width)]
        return lowest_point(self.rates, losses)

    @property
    def moved(self) -> float:
        """By what factor the best rates of the widths differ."""
        best = [self.best(width) for width in self.widths]
        return max(best) / min(best)

    @property
    def is_bracketed(self) -> bool:
        """Whether every best rate lies between others that were tried."""
        places = np.argmin(self.losses, axis=1)
        return bool(((places > 0) & (places < len(self.rates) - 1)).all())


def lowest_point(rates: Sequence[float], losses: np.ndarray) -> float:
    place = int(np.argmin(losses))
    around = slice(place - 1, place + 2)
    if place == 0 or place == len(rates) - 1 or not np.isfinite(losses[around]).all():
        return rates[place]
    logs = np.log(np.asarray(rates[around]))
    square, slope, _ = np.polyfit(logs, losses[around], 2)
    return float(np.exp(np.clip(-slope / (2 * square), logs[0], logs[-1])))


def sweep_learning_rates(
    family: WidthFamily, rates: Sequence[float], steps: int, *, mup: bool, report: Report
) -> Sweep:
    """Train every width at every rate for `steps`, by the file's kind of schedule."""
    rates = sorted(set(rates))
    batches = read_batches(family.config(family.widths[0], mup=mup, Engine__max_steps=steps), steps)
    losses = np.full((len(family.widths), len(rates)), math.inf)
    for i, width in enumerate(family.widths):
        for j, rate in enumerate(rates):
            losses[i, j] = _final_loss(family, width, rate, batches, mup=mup)
            named = "with" if mup else "without"
            report(f"width {width}, {named} muP, learning rate {rate:g}: {losses[i, j]:.4f}")
    return Sweep(family.widths, rates, losses)


def _final_loss(
    family: WidthFamily, width: int, rate: float, batches: Sequence[Batch], *, mup: bool
) -> float:
    values: Mapping[str, Any] = {
        "Engine__max_steps": len(batches),
        "Optimizer__lr__decay_steps": len(batches),
        "Optimizer__lr__max_lr": rate,
        "Optimizer__lr__min_lr": 0.0,
    }
    config = family.config(width, mup=mup, **values)
    trial, schedule = Trial(config), build_schedule(config)
    losses = []
    for step, batch in enumerate(batches, start=1):
        losses.append(trial.step(batch, schedule.lr_at(step)))
        if not math.isfinite(losses[-1]):
            return math.inf
    return float(np.mean(losses[-max(1, round(JUDGED_SHARE * len(losses))) :]))


# -- pictures -------------------------------------------------------------------------------------

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED)


def draw_coordinates(without: Coordinates, with_mup: Coordinates, path: Path) -> None:
    """Sizes over widths, a line for each step: one row of pictures without muP, one with it."""
    figure = new_figure(13, 5.6, dpi=90, heading_share=0.1)
    grid = figure.subplots(2, len(PLACES), sharex=True, sharey="col")
    for row, (name, found) in zip(grid, (("without muP", without), ("with muP", with_mup))):
        for axes, place in zip(row, PLACES):
            style_axes(axes)
            for step in range(found.steps + 1):
                shade = 0.25 + 0.75 * step / max(found.steps, 1)
                sizes, label = found.of(place)[:, step], f"step {step}"
                axes.plot(found.widths, sizes, ".-", color=BLUE, alpha=shade, label=label)
            _width_axis(axes, found.widths)
            axes.set_yscale("log")
            axes.set_title(f"{place}: width^{found.exponent(place):.2f}", fontsize=9, color=TEXT)
        row[0].set_ylabel(f"{name}\nmean |activation|")
    for axes, place in zip(grid[1], PLACES):
        axes.set_xlabel("width")
        sizes = np.concatenate([without.of(place), with_mup.of(place)])
        if sizes.max() < 10 * sizes.min():  # or what is flat would not look it
            centre = math.sqrt(sizes.max() * sizes.min())
            axes.set_ylim(centre / math.sqrt(10), centre * math.sqrt(10))
    grid[0][0].legend(frameon=False, fontsize=7, labelcolor=TEXT, loc="lower right", ncols=2)
    write_heading(figure, "Coordinate check", f"sizes after {with_mup.steps} steps follow width^x")
    save_png(figure, path)


def draw_sweeps(without: Sweep, with_mup: Sweep, path: Path) -> None:
    """The loss over the learning rate, a line for each width; a circle where it is lowest."""
    figure = new_figure(10, 4.4, dpi=90, heading_share=0.11)
    pair = figure.subplots(1, 2, sharex=True, sharey=True)
    named = (("without muP", without), ("with muP", with_mup))
    for axes, (name, sweep) in zip(pair, named):
        style_axes(axes)
        for i, width in enumerate(sweep.widths):
            colour, losses = COLOURS[i % len(COLOURS)], sweep.losses[i]
            axes.plot(sweep.rates, losses, color=colour, linewidth=1.5, marker=".", label=width)
            axes.plot(sweep.best(width), losses.min(), "o", color=colour, markersize=9,
                      markerfacecolor="none", markeredgewidth=1.6)  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_title(f"{name}: the best moves {sweep.moved:.2f} times", fontsize=10, color=TEXT)
    pair[0].set_ylabel("loss at the end")
    pair[1].legend(title="width", frameon=False, fontsize=8, labelcolor=TEXT)
    lowest = min(float(sweep.losses.min()) for _, sweep in named)
    shown = np.concatenate([sweep.losses.ravel() for _, sweep in named])
    highest = float(np.quantile(shown[np.isfinite(shown)], 0.85))
    pair[0].set_ylim(lowest - 0.05, max(highest, lowest + 0.2))
    write_heading(figure, "Learning rates", "circles: the best of each width")
    save_png(figure, path)


def _width_axis(axes: Axes, widths: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([float(width) for width in widths]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
