"""Charts: the style that the figures of all commands share. Each command decides what it plots.

A figure is made without a display (matplotlib's Agg canvas), drawn in one style, and written
atomically. matplotlib is imported only when something is drawn.

    figure = new_figure(9, 5.5, heading_share=0.07)
    axes = figure.subplots()
    style_axes(axes)
    axes.plot(steps, losses, color=BLUE)
    write_heading(figure, "my run", "train 2.807")
    save_png(figure, path)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fourfold.atomic_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, RED = "#3b6fb6", "#d9772b", "#3a8f5c", "#7a5aa6", "#c0392b"
TEXT, FAINT = "#333333", "#e4e4e4"


def new_figure(width: float, height: float, dpi: int = 150, heading_share: float = 0.0) -> Figure:
    """A white figure, sizes in inches; its top `heading_share` is left for a heading."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - heading_share))
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def write_heading(figure: Figure, heading: str, summary: str) -> None:
    """A title on the left, its key figures on the right."""
    style: dict[str, Any] = {"va": "top", "color": TEXT, "parse_math": False}
    figure.text(0.01, 0.975, heading, fontsize=13, weight="bold", **style)
    figure.text(0.99, 0.97, summary, fontsize=10, ha="right", **style)


def style_axes(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Two faint axes and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=TEXT, length=3)
    axes.grid(axis=grid, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(TEXT)
    axes.yaxis.label.set_color(TEXT)


def shorten_numbers(axis: Axis) -> None:
    """Labels such as 1.2k and 5M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def save_png(figure: Figure, path: Path) -> None:
    with replacing(path) as aside:
        figure.savefig(aside, format="png")


def save_svg(figure: Figure, path: Path) -> None:
    """The same bytes for the same figure; letters are drawn, so that no font is asked for."""
    import matplotlib

    fixed: dict[Any, Any] = {"svg.hashsalt": "fourfold", "svg.fonttype": "path"}
    with replacing(path) as aside, matplotlib.rc_context(fixed):
        figure.savefig(aside, format="svg", metadata={"Date": None, "Creator": None})
