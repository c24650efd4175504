"""`fourfold mup`: whether settings found on a narrow network hold on a wide one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fourfold.cli.options import (
    ConfigFile,
    Overrides,
    check_writable,
    refuse_several_processes,
)
from fourfold.errors import UserError
from fourfold.terminal import table_lines

if TYPE_CHECKING:
    from fourfold.tools.mup import Coordinates, Sweep, WidthFamily

app = typer.Typer(no_args_is_help=True, help="Check muP: settings that hold at every width.")
FAILED = 1
T = TypeVar("T")

Widths = Annotated[
    str, typer.Option(metavar="64,128,256,512", help="The widths to train, as Model.hidden_size.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw what was found as a .png file.")]


@app.command()
def check(
    config: ConfigFile,
    override: Overrides = None,
    widths: Widths = "64,128,256,512",
    steps: Annotated[int, typer.Option(min=1, help="Steps of training at each width.")] = 5,
    random_tokens: Annotated[
        bool, typer.Option("--random-tokens", help="Train on random tokens; no data is read.")
    ] = False,
    plot: Plot = None,
) -> None:
    """The coordinate check: do activations keep their size when the network grows wider?

    Trains a few steps at each width, with muP and without, at Optimizer.lr.max_lr. Exit code 0 if
    every size is flat under muP, 1 if one is not.
    """
    from fourfold.tools.mup import (
        FLAT_WITHIN,
        check_coordinates,
        draw_coordinates,
        random_batch,
        read_batches,
    )

    family = _family(config, override, widths, plot)
    first = family.config(family.widths[0], mup=False, Engine__max_steps=steps)
    batches = [random_batch(first)] if random_tokens else read_batches(first, steps)
    found = {}
    for mup in (False, True):
        found[mup] = check_coordinates(family, steps, batches, mup=mup, report=_progress)
    for mup in (False, True):
        print(f"\n{'with' if mup else 'without'} muP: mean |activation| after {steps} steps")
        for line in table_lines(_coordinate_rows(found[mup]), "<>"):
            print(f"  {line}")
    print(
        f"\nA size that follows width^x is flat if x is between -{FLAT_WITHIN:.2f} and "
        f"{FLAT_WITHIN:.2f}."
    )
    for mup in (False, True):
        flat = "flat" if found[mup].all_flat else "not flat"
        print(f"{'with' if mup else 'without'} muP (base width {family.base_width}): {flat}")
    if plot is not None:
        draw_coordinates(found[False], found[True], plot)
        print(f"drawn: {plot}", file=sys.stderr)
    if not found[True].all_flat:
        raise typer.Exit(FAILED)


def _coordinate_rows(found: Coordinates) -> list[list[str]]:
    from fourfold.tools.mup import PLACES

    rows = [["", *(f"width {width}" for width in found.widths), "x", ""]]
    for place in PLACES:
        sizes = [f"{size:.4g}" for size in found.of(place)[:, -1]]
        flat = "flat" if found.is_flat(place) else "not flat"
        rows.append([place, *sizes, f"{found.exponent(place):.2f}", flat])
    return rows


@app.command()
def sweep(
    config: ConfigFile,
    override: Overrides = None,
    widths: Widths = "64,128,256,512",
    learning_rates: Annotated[
        str,
        typer.Option(metavar="5e-4,1e-3,...", help="The highest learning rates to train with."),
    ] = "0.0005,0.001,0.002,0.004,0.008,0.016,0.032",
    steps: Annotated[int, typer.Option(min=10, help="Steps of each run.")] = 100,
    plot: Plot = None,
) -> None:
    """Does the best learning rate stay where it is when the network grows wider?

    Trains a short run at each width and rate, with muP and without, and compares the losses over
    the last fifth of the steps. Exit code 0 if the best rates of the widths are within a factor of
    1.5 under muP, 1 if not.
    """
    from fourfold.tools.mup import MOST_MOVED, draw_sweeps, sweep_learning_rates

    family = _family(config, override, widths, plot)
    rates = _numbers(learning_rates, "--learning-rates", float)
    if len(rates) < 3:
        raise UserError("--learning-rates: a best one lies between two others; give three or more")
    found = {}
    for mup in (False, True):
        found[mup] = sweep_learning_rates(family, rates, steps, mup=mup, report=_progress)
    for mup in (False, True):
        print(f"\n{'with' if mup else 'without'} muP: loss at the end of {steps} steps")
        for line in table_lines(_sweep_rows(found[mup]), ">"):
            print(f"  {line}")
    print()
    for mup in (False, True):
        text = f"{'with' if mup else 'without'} muP (base width {family.base_width}): the best "
        text += f"learning rate moves by a factor of {found[mup].moved:.2f}"
        if not found[mup].is_bracketed:
            text += " or more: one is the first or last that was tried"
        print(text)
    if plot is not None:
        draw_sweeps(found[False], found[True], plot)
        print(f"drawn: {plot}", file=sys.stderr)
    if not (found[True].moved < MOST_MOVED and found[True].is_bracketed):
        raise typer.Exit(FAILED)


def _sweep_rows(found: Sweep) -> list[list[str]]:
    rows = [["width", *(f"{rate:g}" for rate in found.rates), "best rate"]]
    for width, losses in zip(found.widths, found.losses):
        rows.append([str(width), *(f"{loss:.4f}" for loss in losses), f"{found.best(width):.2g}"])
    return rows


def _family(
    config: Path, override: list[str] | None, widths: str, plot: Path | None
) -> WidthFamily:
    from fourfold.config.load import read_config
    from fourfold.tools.mup import WidthFamily

    refuse_several_processes("mup")
    if plot is not None:
        check_writable(plot, "--plot")
    source = read_config(config, override or [])
    return WidthFamily.of(source, _numbers(widths, "--widths", int))


def _numbers(text: str, option: str, kind: Callable[[str], T]) -> Sequence[T]:
    try:
        values = [kind(word) for word in text.split(",")]
        if not all(isinstance(one, (int, float)) and 0 < one < math.inf for one in values):
            raise ValueError(text)
    except ValueError:
        kinds = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{option} {text}: give {kinds} above 0, with commas between") from None
    return values


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
