"""The loss curve of a run as a picture: `loss_curve.png` beside the metrics it is drawn from.

Training loss thin and smoothed, evaluations as points, the learning rate below; steps along the
bottom, tokens along the top. Drawn without a display, for one record or a hundred thousand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fourfold.charts import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    TEXT,
    new_figure,
    save_png,
    shorten_numbers,
    style_axes,
    write_heading,
)
from fourfold.metrics.jsonl import FILE_NAME, read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Locator

Floats = NDArray[np.float64]

PICTURE_NAME = "loss_curve.png"
TRAIN, EVAL, TEST, RATE, BAD = BLUE, ORANGE, GREEN, PURPLE, RED
MOST_POINTS = 4000


def plot_losses(output_dir: str | os.PathLike[str]) -> Path:
    """Draw the run's `metrics.jsonl` and return the path of the picture."""
    directory = Path(output_dir)
    records = read_jsonl(directory / FILE_NAME)
    figure = new_figure(9, 6, heading_share=0.055)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    for axes in (losses, rates):
        style_axes(axes)
    _draw_losses(losses, records)
    _draw_rates(rates, records)
    _draw_tokens(losses, records)
    write_heading(figure, directory.resolve().name, _summary(records))
    picture = directory / PICTURE_NAME
    save_png(figure, picture)
    return picture


def smooth(values: Floats) -> Floats:
    """A mean over about 1/25 of the curve around each point.

    It narrows towards the start, where the loss falls steeply, so that it never lags there.
    """
    count = len(values)
    index = np.arange(count)
    half = np.minimum(index, count // 50)
    end = np.minimum(index + half + 1, count)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[end] - sums[index - half]) / (end - index + half)


def thin_out(steps: Floats, values: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """At most `most` points that keep every spike: the lowest and highest of each stretch."""
    if len(values) <= most:
        return steps, values
    stretches = np.array_split(np.arange(len(values)), most // 2)
    keep = [
        index
        for stretch in stretches
        for index in sorted({stretch[values[stretch].argmin()], stretch[values[stretch].argmax()]})
    ]
    return steps[keep], values[keep]


def _column(records: list[dict[str, Any]], kind: str, name: str) -> tuple[Floats, Floats]:
    """Steps and values of one field of one kind of record, in the order of the steps."""
    chosen = [record for record in records if record.get("kind") == kind]
    steps = np.array([record["step"] for record in chosen], dtype=np.float64)
    values = np.array([record[name] for record in chosen], dtype=np.float64)
    order = np.argsort(steps, kind="stable")
    return steps[order], values[order]


def _summary(records: list[dict[str, Any]]) -> str:
    """The last value of each loss: smoothed for training, as it is for the others."""
    last = {}
    for kind in ("train", "eval", "test"):
        losses = _column(records, kind, "loss")[1]
        losses = losses[np.isfinite(losses)]
        if len(losses):
            last[kind] = smooth(losses)[-1] if kind == "train" else losses[-1]
    return "    ".join(f"{kind} {loss:.3f}" for kind, loss in last.items()) or "no loss recorded"


def _draw_losses(axes: Axes, records: list[dict[str, Any]]) -> None:
    steps, values = _column(records, "train", "loss")
    finite = np.isfinite(values)
    shown = [values[finite]]
    if finite.any():
        curve = smooth(values[finite])
        label = "train" if np.array_equal(curve, values[finite]) else "train (smoothed)"
        _line(axes, steps[finite], values[finite], TRAIN, alpha=0.35, linewidth=0.7)
        _line(axes, steps[finite], curve, TRAIN, linewidth=1.8, label=label)
    if not finite.all():
        lost = steps[~finite]
        height = axes.get_xaxis_transform()  # x in steps, y in fractions of the axes
        axes.plot(lost, np.full(len(lost), 0.97), "x", color=BAD, transform=height, markersize=6)
        axes.plot([], [], "x", color=BAD, label=f"not finite ({len(lost)})")
    for kind, colour, marker in (("eval", EVAL, "o"), ("test", TEST, "D")):
        at, points = _column(records, kind, "loss")
        at, points = at[np.isfinite(points)], points[np.isfinite(points)]
        if len(points):
            axes.plot(at, points, color=colour, marker=marker, markersize=4.5, label=kind,
                      linewidth=1.2, markeredgecolor="white", markeredgewidth=0.6)  # fmt: skip
            shown.append(points)
    _scale_losses(axes, np.concatenate(shown))
    axes.set_ylabel("loss")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right", labelcolor=TEXT)


def _scale_losses(axes: Axes, values: Floats) -> None:
    """A logarithmic axis when the loss falls far; its labels stay plain numbers."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    if len(values) == 0 or values.min() <= 0 or values.max() < 1.5 * values.min():
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(log_locator(values.min(), values.max()))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def log_locator(low: float, high: float) -> Locator:
    """Where a logarithmic axis has its ticks: at most about ten, at round numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    ratio = high / low
    if ratio < 10:  # powers of ten alone would be one tick or none
        return MaxNLocator(9, steps=[1, 2, 5, 10])
    digits = (1, 2, 3, 5) if ratio < 100 else (1, 3) if ratio < 1e4 else (1,)
    return LogLocator(subs=digits, numticks=9)


def _draw_rates(axes: Axes, records: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, rates = _column(records, "train", "learning_rate")
    if len(steps):
        _line(axes, steps, rates, RATE, linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylabel("learning rate")
    axes.set_xlabel("step")
    last = max([record.get("step", 1) for record in records], default=1)
    axes.set_xlim(0, max(last * 1.02, 2))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    shorten_numbers(axes.xaxis)


def _draw_tokens(axes: Axes, records: list[dict[str, Any]]) -> None:
    trained = [record for record in records if record.get("kind") == "train"]
    if not trained:
        return
    per_step = float(trained[-1]["tokens"] / trained[-1]["step"])
    top = axes.secondary_xaxis(
        "top", functions=(lambda x: np.asarray(x) * per_step, lambda x: np.asarray(x) / per_step)
    )
    shorten_numbers(top.xaxis)
    top.set_xlabel("tokens", color=TEXT, labelpad=6)
    top.tick_params(colors=TEXT, length=3)
    top.spines["top"].set_color(FAINT)


def _line(axes: Axes, steps: Floats, values: Floats, colour: str, **style: Any) -> None:
    steps, values = thin_out(steps, values)
    axes.plot(steps, values, color=colour, marker="o" if len(steps) == 1 else None, **style)
