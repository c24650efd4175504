"""A plan as a picture: for each layout, where the step's time and the device's memory go.

`.png` is drawn with matplotlib; `.html` is one file with inline SVG and no scripts, in which every
bar says its number when pointed at.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.atomic_files import replace_text
from fourfold.charts import FAINT, GREEN, ORANGE, PURPLE, RED, TEXT, new_figure, save_png
from fourfold.errors import UserError
from fourfold.plan.cluster import GIB
from fourfold.plan.planner import Candidate, Plan
from fourfold.plan.report import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIME_COLOURS = {
    "products": "#2f5d9b", "attention": "#5b8fd0", "element-wise": "#9dc0e8", "head": GREEN,
    "tensor parallel": ORANGE, "pipeline sends": "#eda567", "data parallel": "#f3c99f",
    "host": PURPLE, "bubble": "#b9b9b9", "optimizer": "#80b796", "fixed": "#dddddd",
}  # fmt: skip
MEMORY_COLOURS = {
    "weights": "#2f5d9b", "gradients": "#5b8fd0", "optimizer": "#9dc0e8", "activations": ORANGE,
    "logits": "#eda567", "buffers": PURPLE, "reserve": "#c9c9c9",
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    label: str
    parts: dict[str, float]


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    colours: dict[str, str]
    bars: list[Bar]
    limit: float | None = None  # a line across all bars


def draw(plan: Plan, top: int, path: Path) -> None:
    """Draw the best `top` layouts and the file's own to `path`, by its suffix."""
    charts = charts_of(plan, top)
    heading = f"{size_text(plan.workload.parameters)} parameters on {plan.cluster}"
    try:
        if path.suffix == ".html":
            replace_text(path, _html(heading, charts))
        elif path.suffix == ".png":
            _png(heading, charts, path)
        else:
            raise UserError(f"--plot {path}: the suffix must be .png or .html")
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror})") from error


def charts_of(plan: Plan, top: int) -> list[Chart]:
    shown = plan.candidates[:top]
    if plan.own is not None and all(plan.own.spread != one.spread for one in shown):
        shown = [*shown, plan.own]

    def label(candidate: Candidate) -> str:
        return f"{candidate.layout}\n{candidate.details}"

    time = [Bar(label(one), _merged(one.time.values_at())) for one in shown]
    memory = [
        Bar(label(one), {name: value / GIB for name, value in one.memory.values_at().items()})
        for one in shown
    ]
    return [
        Chart("time of one step", "s", TIME_COLOURS, time),
        Chart(
            "memory of one device", "GiB", MEMORY_COLOURS, memory, plan.cluster.usable_bytes / GIB
        ),
    ]


def _merged(parts: dict[str, float]) -> dict[str, float]:
    return {name: parts.get(name, 0.0) for name in TIME_COLOURS}


def _png(heading: str, charts: list[Chart], path: Path) -> None:
    figure = new_figure(15, 2.2 + 0.52 * len(charts[0].bars), dpi=130)
    left, right = figure.subplots(1, 2, sharey=True)
    figure.suptitle(heading, x=0.01, ha="left", weight="bold", color=TEXT, parse_math=False)
    for axes, chart in zip((left, right), charts, strict=True):
        _draw_chart(axes, chart)
    save_png(figure, path)


def _draw_chart(axes: Axes, chart: Chart) -> None:
    places = range(len(chart.bars))
    start = [0.0] * len(chart.bars)
    for name, colour in chart.colours.items():
        widths = [bar.parts.get(name, 0.0) for bar in chart.bars]
        total = max(sum(bar.parts.values()) for bar in chart.bars)
        if max(widths) > 0.002 * total:
            axes.barh(places, widths, left=start, color=colour, label=name, height=0.62)
        start = [before + width for before, width in zip(start, widths, strict=True)]
    for place, end in zip(places, start, strict=True):
        axes.text(end, place, f" {end:.4g}", va="center", color=TEXT, fontsize=9)
    if chart.limit is not None:
        axes.axvline(chart.limit, color=RED, linewidth=1.2, linestyle="--")
    axes.set_yticks(list(places), [bar.label for bar in chart.bars], fontsize=8)
    axes.set_ylim(len(chart.bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * max([*start, chart.limit or 0.0]))
    axes.set_title(f"{chart.title} ({chart.unit})", loc="left", color=TEXT, fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=TEXT, length=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(
        frameon=False, fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.06),
        labelcolor=TEXT,
    )  # fmt: skip


WIDTH, LABEL, HEIGHT = 560, 330, 34  # of one chart's bars, of the labels, of a bar's row


def _html(heading: str, charts: list[Chart]) -> str:
    body = "\n".join(_svg(chart) for chart in charts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(heading)}'
        f"</title><style>body{{font:14px sans-serif;color:{TEXT};margin:2em}}"
        "svg{display:block;margin:1em 0}text{font-size:12px}.small{font-size:10px}</style>"
        f"<h1>{html.escape(heading)}</h1>\n{body}\n</html>\n"
    )


def _svg(chart: Chart) -> str:
    ends = [sum(bar.parts.values()) for bar in chart.bars]
    scale = WIDTH / max([*ends, chart.limit or 0.0])
    height = HEIGHT * len(chart.bars) + 60
    items = [
        f'<text x="0" y="16" font-weight="bold">{html.escape(chart.title)} ({chart.unit})</text>'
    ]
    for row, bar in enumerate(chart.bars):
        items += _svg_bar(chart, bar, 30 + HEIGHT * row, scale)
    if chart.limit is not None:
        x = LABEL + scale * chart.limit
        items.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{height - 30}" stroke="{RED}" '
            f'stroke-dasharray="4"><title>{chart.limit:g} {chart.unit}</title></line>'
        )
    items += _svg_legend(chart, height - 14)
    size = f'width="{LABEL + WIDTH + 90}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>' + "\n".join(items) + "</svg>"


def _svg_bar(chart: Chart, bar: Bar, y: float, scale: float) -> list[str]:
    first, _, second = bar.label.partition("\n")
    items = [
        f'<text x="0" y="{y + 11}">{html.escape(first)}</text>',
        f'<text class="small" x="0" y="{y + 23}">{html.escape(second)}</text>',
    ]
    x = float(LABEL)
    for name, colour in chart.colours.items():
        value = bar.parts.get(name, 0.0)
        if value <= 0:
            continue
        items.append(
            f'<rect x="{x:.1f}" y="{y}" width="{scale * value:.1f}" height="24" fill="{colour}">'
            f"<title>{name}: {value:.4g} {chart.unit}</title></rect>"
        )
        x += scale * value
    total = sum(bar.parts.values())
    items.append(f'<text x="{x + 4:.1f}" y="{y + 16}">{total:.4g}</text>')
    return items


def _svg_legend(chart: Chart, y: float) -> list[str]:
    items, x = [], 0
    for name, colour in chart.colours.items():
        if not any(bar.parts.get(name, 0.0) > 0 for bar in chart.bars):
            continue
        items.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
        items.append(f'<text class="small" x="{x + 14}" y="{y}">{name}</text>')
        x += 24 + 6 * len(name)
    return items
