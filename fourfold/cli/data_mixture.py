"""`fourfold data index | blend`: build a run's indices ahead of it, and see what it will serve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides


def index(config: ConfigFile, override: Overrides = None) -> None:
    """Check the data of a run and build its sample and blend indices, without training."""
    import time

    from fourfold.config import load_config
    from fourfold.data.serving import check_parts, parts_of

    resolved = load_config(config, override or [])
    parts = parts_of(resolved)
    for remark in [*resolved.notices, *check_parts(resolved, parts)]:
        print(f"notice: {remark}", file=sys.stderr)
    for name, part in parts.items():
        start = time.perf_counter()
        samples = part.open()
        seconds = time.perf_counter() - start
        if len(samples) == 0:
            print(f"{name}: no samples")
            continue
        print(
            f"{name}: {len(samples):,} samples of {samples.seq_len:,} tokens, "
            f"{samples.epochs} epoch(s) of {samples.tokens_per_epoch:,} tokens, in {seconds:.2f} s"
        )
        for place in samples.places:
            print(f"  {place} ({_megabytes(place):.1f} MB)")
        if not samples.places:
            print("  not kept: no directory could be written; set Data.dataset.cache_dir")


def blend(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="The YAML file that describes the run.")
    ] = None,
    override: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="'W A W B'", help="A mixture, in place of a configuration's."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="With --data: samples to serve.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="With --data: tokens per sample.")] = None,
) -> None:
    """Show what a mixture will serve: samples, tokens and epochs of each source."""
    from fourfold.config import load_config
    from fourfold.data.forecast import forecast_lines
    from fourfold.data.serving import part_of_recipe, parts_of
    from fourfold.errors import UserError

    if config is not None and data is None:
        if samples is not None or seq_len is not None:
            raise UserError("--samples and --seq-len go with --data; a configuration has its own")
        parts = parts_of(load_config(config, override or []))
    elif data is not None and config is None and not override:
        if samples is None or samples < 1 or seq_len is None or seq_len < 1:
            raise UserError("--data needs --samples and --seq-len, both at least 1")
        parts = {"train": part_of_recipe(data, samples, seq_len)}
    else:
        raise UserError("give either a configuration with -c, or a mixture with --data")
    for name, part in parts.items():
        for line in forecast_lines(name, part):
            print(line)


def _megabytes(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.iterdir()) / 1e6
