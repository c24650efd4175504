"""Draw the pictures of the front page from what was recorded: `make docs-pictures`.

    quickstart.svg        what the quickstart printed          quickstart_log.txt
    quickstart_loss.svg   its losses by the minute             quickstart_run.jsonl
    layouts.svg           who works with whom on each axis     fourfold.mesh.Layout
    equivalence.svg       the table of layouts                 docs/equivalence.md
    planner.svg           published step times, predicted      fourfold/plan/published_runs.csv

quickstart_log.txt is what `make quickstart` printed on two idle cores of an AMD EPYC (Zen 4), with
the lines of steps left out; quickstart_run.jsonl has the losses of that run's metrics.jsonl.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from draw_terminal import main as draw_terminal

from fourfold.charts import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    TEXT,
    new_figure,
    save_svg,
    style_axes,
)
from fourfold.mesh import AXES, Layout
from fourfold.plan.machine import load_fit
from fourfold.plan.published import Evidence, published_runs

HERE = Path(__file__).parent
PAGE = HERE.parent / "equivalence.md"
LAYOUT = Layout(dp=2, pp=2, sharding=2, mp=2)
NOTES = {
    "dp": ("data", "the same part of the network,", "other samples; sum the gradients"),
    "pp": ("pipeline", "other layers of one copy;", "hand activations on"),
    "sharding": ("sharding", "other samples, like data; each keeps", "its share of the state"),
    "mp": ("model", "parts of the same matrices;", "sum inside every layer"),
}
GROUPS = ["#9ec9e8", "#f2b880", "#b5d6a7", "#d3bfe6", "#f4e3a1", "#f0b6b6", "#a9ddd6", "#d4d4d4"]
MEASURES = ("losses", "gradients", "norms", "weights", "evaluation")


def main(directory: Path) -> None:
    draw_terminal(HERE / "quickstart_log.txt", "make quickstart", directory / "quickstart.svg")
    draw_quickstart(directory / "quickstart_loss.svg")
    (directory / "layouts.svg").write_text(layouts(LAYOUT))
    draw_equivalence(directory / "equivalence.svg")
    draw_planner(directory / "planner.svg")


# -- the quickstart -----------------------------------------------------------------------------


def draw_quickstart(path: Path) -> None:
    records = [json.loads(line) for line in (HERE / "quickstart_run.jsonl").open()]
    start = datetime.fromisoformat(records[0]["time"])
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    style_axes(axes)
    for kind, look in (
        ("train", {"color": BLUE, "linewidth": 1.8}),
        ("eval", {"color": ORANGE, "marker": "o", "linestyle": "none", "zorder": 3}),
    ):
        points = [
            ((datetime.fromisoformat(one["time"]) - start).total_seconds(), one["loss"])
            for one in records
            if one["kind"] == kind
        ]
        label = {"train": "training", "eval": "validation"}[kind]
        axes.plot(*zip(*points), label=label, **look)
    seconds, loss = points[-1]
    axes.annotate(
        f"{loss:.2f}", (seconds, loss), (0, 9), textcoords="offset points", color=TEXT, ha="center"
    )
    axes.set_xlabel("seconds after step 10, evaluations and saves included")
    axes.set_ylabel("loss")
    axes.legend(frameon=False, labelcolor=TEXT)
    save_svg(figure, path)


# -- layouts ------------------------------------------------------------------------------------


def layouts(layout: Layout) -> str:
    """A panel for each axis; ranks of one colour are a process group of it."""
    cell, gap, margin, width = 50, 12, 40, 2
    side = 4 * cell + gap
    panel = side + 72
    total_width, height = 2 * panel + margin, 2 * (side + 108)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {height}" '
        f'width="{total_width}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
        'text-anchor="middle" fill="#222222" role="img" aria-labelledby="title">',
        f'<title id="title">The process groups of {layout}, axis by axis</title>',
        f'<rect width="{total_width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, axis in enumerate(AXES):
        left, top = margin + number % width * panel, number // width * (side + 108)
        name, *notes = NOTES[axis]
        middle = left + side / 2
        parts.append(
            f'<text x="{middle}" y="{top + 26}" font-size="16" font-weight="bold">{name}</text>'
        )
        for line, note in enumerate(notes):
            parts.append(
                f'<text x="{middle}" y="{top + 46 + 17 * line}" font-size="13">{note}</text>'
            )
        for colour, group in zip(GROUPS, layout.columns(axis), strict=True):
            for rank in group:
                place = layout.coordinates(rank)
                # Data side by side in two halves, model within; pipeline and sharding downwards.
                column, row = place["dp"] * 2 + place["mp"], place["pp"] * 2 + place["sharding"]
                x = left + column * cell + place["dp"] * gap
                y = top + 76 + row * cell + place["pp"] * gap
                parts.append(
                    f'<rect x="{x + 2}" y="{y + 2}" width="{cell - 4}" height="{cell - 4}" rx="7" '
                    f'fill="{colour}"/><text x="{x + cell / 2}" y="{y + cell / 2 + 6}" '
                    f'font-size="17">{rank}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])


# -- equivalence --------------------------------------------------------------------------------


def equivalence_rows() -> list[tuple[str, dict[str, float], str]]:
    """Layout, deviations and bound of each row of the page."""
    cells = re.findall(r"^\| (.+?) \| \d+ \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    rows = []
    for name, rest in cells:
        *values, bound = rest.split(" | ")
        rows.append((name, dict(zip(MEASURES, map(float, values), strict=True)), bound))
    return rows


def draw_equivalence(path: Path) -> None:
    rows = equivalence_rows()
    kinds = {"float32": BLUE, "float64": GREEN, "bfloat16": ORANGE, "float16": PURPLE}
    figure = new_figure(7, 4.4)
    axes = figure.subplots()
    style_axes(axes, grid="y")
    floor = 1e-17  # where a deviation of nothing is drawn
    for offset, (kind, colour) in enumerate(kinds.items()):
        own = [row for row in rows if kind_of(row[0]) == kind]
        for column, measure in enumerate(MEASURES):
            values = [max(row[1][measure], floor) for row in own]
            spread = np.linspace(-0.08, 0.08, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(
                column + (offset - 1.5) * 0.2 + spread,
                values,
                marker="o",
                markersize=3.5,
                markeredgewidth=0,
                alpha=0.55,
                linestyle="none",
                color=colour,
                label=f"{kind}, {len(own)} layouts" if column == 0 else None,
            )
    axes.axhline(1e-5, color=BLUE, linewidth=1, linestyle="--")
    axes.text(4.45, 1.25e-5, "bound of float32", color=TEXT, fontsize=8, ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_ylim(3e-18, 1)
    axes.set_xlim(-0.5, 4.5)
    ticks = [10.0**power for power in range(-15, 0, 3)]
    axes.set_yticks([floor, *ticks], ["equal", *(f"{tick:.0e}" for tick in ticks)])
    axes.minorticks_off()
    axes.set_xticks(range(len(MEASURES)), MEASURES)
    axes.set_ylabel("largest relative deviation from one process")
    axes.legend(frameon=False, ncols=4, fontsize=8, labelcolor=TEXT, loc="lower center",
                bbox_to_anchor=(0.5, 1.0), handletextpad=0.2, columnspacing=1.2)  # fmt: skip
    save_svg(figure, path)


def kind_of(layout: str) -> str:
    found = re.search(r"\b(b?float(?:16|64))\b", layout)
    return found[1] if found else "float32"


# -- the planner --------------------------------------------------------------------------------


def draw_planner(path: Path) -> None:
    evidence = Evidence.of(published_runs())
    fit = load_fit()
    predicted = evidence.predicted(fit.coefficients, fit.sustained)
    figure = new_figure(7, 4.8)
    axes = figure.subplots()
    style_axes(axes)
    judged = evidence.part != "quoted"
    low, high = evidence.seconds[judged].min() / 1.5, evidence.seconds[judged].max() * 1.5
    line = np.array([low, high])
    axes.fill_between(line, line / 1.2, line * 1.2, color=FAINT, linewidth=0, label="within 20 %")
    axes.plot(line, line, color=TEXT, linewidth=0.8)
    look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markeredgewidth": 0}
    for part, colour, words in (
        ("fit", "#9aa5a3", "the fit saw them"),
        ("check", BLUE, "it did not"),
    ):
        chosen = evidence.part == part
        label = f"{int(chosen.sum())} runs, {words}"
        axes.plot(
            evidence.seconds[chosen], predicted[chosen], color=colour, alpha=0.45, markersize=4,
            label=label, **look,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("published seconds a step")
    axes.set_ylabel("predicted seconds a step")
    axes.legend(frameon=False, labelcolor=TEXT)
    save_svg(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
