"""Histogram of document lengths: bins of rising width, as lines of text and as a picture.

Bins widen with the length in equal ratios (128 to 255, 256 to 511, ..., or finer), so that one
picture shows documents of ten tokens and of a million. Empty documents have a bin of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fourfold.charts import (
    BLUE,
    GREEN,
    TEXT,
    new_figure,
    save_png,
    shorten_numbers,
    style_axes,
    write_heading,
)
from fourfold.data.datasets import blocks
from fourfold.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 78
EIGHTHS = " ▏▎▍▌▋▊▉█"
PICTURE_BINS = 80


def count_lengths(sizes: np.ndarray, most_bins: int) -> list[dict[str, int]]:
    """Bins from the shortest to the longest document: first and last length, documents, tokens."""
    if len(sizes) == 0:
        return []
    edges = bin_edges(int(sizes.min()), int(sizes.max()), most_bins)
    documents = np.zeros(len(edges) - 1, np.int64)
    tokens = np.zeros(len(edges) - 1, np.int64)
    for block in blocks(sizes):
        places = np.searchsorted(edges, block, side="right") - 1
        documents += np.bincount(places, minlength=len(documents))
        # As floats these sums are exact up to 2**53, more tokens than there are.
        tokens += np.bincount(places, block, minlength=len(tokens)).astype(np.int64)
    return [
        {
            "first": int(edges[place]),
            "last": int(edges[place + 1]) - 1,
            "documents": int(documents[place]),
            "tokens": int(tokens[place]),
        }
        for place in range(len(documents))
    ]


def bin_edges(shortest: int, longest: int, most_bins: int) -> np.ndarray:
    """Borders of at most `most_bins` bins that cover both lengths, as fine as that allows.

    They are whole numbers next to the powers of a root of 2, or of 4, 16, ... for few bins.
    """
    octaves = longest.bit_length() + 1
    edges = np.array([shortest, longest + 1])
    for per_octave in (16, 8, 4, 2, 1, 1 / 2, 1 / 4, 1 / 8):
        powers = np.arange(int(octaves * per_octave) + 2) / per_octave
        candidates = np.unique([0, *np.round(np.exp2(powers)).astype(np.int64)])
        first = np.searchsorted(candidates, shortest, side="right") - 1
        last = np.searchsorted(candidates, longest, side="right")
        edges = candidates[first : last + 1]
        if len(edges) - 1 <= most_bins:
            break
    return edges


def bars(histogram: list[dict[str, int]]) -> list[str]:
    """One line per bin, at most 78 columns wide."""
    total = sum(entry["documents"] for entry in histogram)
    tokens = max(sum(entry["tokens"] for entry in histogram), 1)
    highest = max(entry["documents"] for entry in histogram)
    names = [_bin_name(entry) for entry in histogram]
    width = max(map(len, names))
    count_width = max(len("documents"), len(f"{highest:,}"))
    # Two columns before the bar, a space and seven columns each for the two shares after it.
    bar_width = COLUMNS - width - 2 - (1 + count_width) - 2 * 7
    lines = [f"{'':{width + 2 + bar_width}} {'documents':>{count_width}}        tokens"]
    for name, entry in zip(names, histogram):
        lines.append(
            f"{name:>{width}} │{_bar(entry['documents'] / highest, bar_width):<{bar_width}}"
            f" {entry['documents']:>{count_width},} {entry['documents'] / total:>6.1%}"
            f" {entry['tokens'] / tokens:>6.1%}"
        )
    return lines


def _bin_name(entry: dict[str, int]) -> str:
    first, last = entry["first"], entry["last"]
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _bar(share: float, columns: int) -> str:
    """A bar to an eighth of a column; what is there at all is seen."""
    eighths = round(share * columns * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return EIGHTHS[-1] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def draw(sizes: np.ndarray, statistics: dict[str, float], heading: str, file: str | Path) -> Path:
    """Documents and tokens by document length as a PNG."""
    # Few documents in many bins would draw their noise.
    histogram = count_lengths(sizes, int(np.clip(6 * len(sizes) ** (1 / 3), 12, PICTURE_BINS)))
    figure = new_figure(9, 5.5, heading_share=0.07)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 1])
    for axes, what, colour in ((upper, "documents", BLUE), (lower, "tokens", GREEN)):
        _draw_bins(axes, histogram, what, colour)
    _mark(upper, lower, statistics)
    _scale_lengths(lower, histogram)
    tokens = int(sizes.sum(dtype=np.int64))
    write_heading(figure, heading, f"{len(sizes):,} documents    {tokens:,} tokens")
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(figure, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def _draw_bins(axes: Axes, histogram: list[dict[str, int]], what: str, colour: str) -> None:
    style_axes(axes, grid="y")
    left = np.array([_place(entry["first"]) for entry in histogram])
    right = np.array([_place(entry["last"] + 1) for entry in histogram])
    heights = [entry[what] for entry in histogram]
    axes.bar(
        left, heights, right - left, align="edge", color=colour, edgecolor="white", linewidth=0.5
    )
    shorten_numbers(axes.yaxis)
    axes.set_ylabel(what)


def _place(length: int) -> float:
    """The position of a length on the axis: its logarithm, with 0 one octave before 1."""
    return float(np.log2(length)) if length > 0 else -1.0


def _mark(upper: Axes, lower: Axes, statistics: dict[str, float]) -> None:
    """Lines at the median, the mean and the 99th percentile, with labels that keep apart."""
    upper.set_ylim(top=1.18 * upper.get_ylim()[1])
    height = upper.get_xaxis_transform()  # x in lengths, y in fractions of the axes
    mean_is_right = statistics["mean"] >= statistics["median"]
    sides = {"median": not mean_is_right, "mean": mean_is_right, "p99": False}
    for name, is_right in sides.items():
        value = statistics[name]
        if value < 1:
            continue
        place = float(np.log2(value))
        for axes in (upper, lower):
            axes.axvline(place, color=TEXT, linewidth=0.9, linestyle=(0, (4, 3)))
        upper.annotate(
            f"{name} {value:,.0f}",
            (place, 0.91 if name == "p99" else 1.0),
            xycoords=height,
            xytext=(4 if is_right else -4, 0),
            textcoords="offset points",
            ha="left" if is_right else "right",
            va="top",
            fontsize=9,
            color=TEXT,
        )


def _scale_lengths(axes: Axes, histogram: list[dict[str, int]]) -> None:
    low, high = _place(histogram[0]["first"]), _place(histogram[-1]["last"] + 1)
    margin = max(0.02 * (high - low), 0.02)
    axes.set_xlim(low - margin, high + margin)
    ticks = np.arange(np.ceil(max(low, 0)), np.floor(high) + 1)
    ticks = ticks[:: len(ticks) // 15 + 1]
    names = [f"{1 << int(tick):,}" for tick in ticks]
    if histogram[0]["first"] == 0:
        ticks, names = np.concatenate(([-0.5], ticks)), ["0", *names]
    if len(ticks) < 2:
        ticks = np.array([low, high])
        names = [f"{round(2**low):,}", f"{round(2**high):,}"]
    axes.set_xticks(ticks, names)
    axes.set_xlabel("tokens per document")
