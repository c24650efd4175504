"""`fourfold data inspect | verify | merge | split | convert`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fourfold.errors import DataError

Format = Literal["megatron", "fleetx", "legacy"]
# As in config/recipe.py, which --help has no time to import.
Rounding = Literal["megatron_core", "megatron_deepspeed"]
Dataset = Annotated[Path, typer.Argument(help="A prefix, one of its files, or a directory.")]
OutputPrefix = Annotated[Path, typer.Option(help="Name of the files to write, without ending.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing outputs.")]

LINE_SECONDS = 10.0


def inspect(
    path: Dataset,
    samples: Annotated[int, typer.Option(min=0, help="How many documents to show.")] = 3,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Decodes the samples; by default the data's own.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the document lengths here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a list.")] = False,
) -> None:
    """Show what token files hold: counts, lengths, text, and where they came from."""
    from fourfold.data.discovery import open_datasets
    from fourfold.data.files import full_name
    from fourfold.data.histogram import draw
    from fourfold.data.report import inspect as report_on
    from fourfold.data.report import render
    from fourfold.tokenizer import Tokenizer

    datasets = open_datasets(full_name(path))
    if png is not None and len(datasets) > 1:
        raise DataError(f"{path}: {len(datasets)} datasets, but --png draws one; name one of them")
    decoder = Tokenizer.load(tokenizer) if tokenizer is not None else None
    reports = []
    for dataset in datasets:
        report = report_on(dataset, decoder, samples)
        reports.append(report)
        if png is not None:
            if report["lengths"] is None:
                raise DataError(f"{report['prefix']}: no documents, so there is nothing to draw")
            draw(dataset.sizes, report["lengths"], Path(report["prefix"]).name, png)
        if not as_json:
            print(("\n" if len(reports) > 1 else "") + render(report))
            if png is not None:
                print(f"\n  Picture: {png}")
    if as_json:
        print(json.dumps(reports, indent=2))


def verify(
    path: Dataset,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Check ids against this, not the manifest's.")
    ] = None,
) -> None:
    """Check every byte of token files against their manifest; exit code 2 if anything is wrong."""
    from fourfold.data import verify as checking
    from fourfold.data.files import find_prefixes, full_name

    bad = False
    for prefix in find_prefixes(full_name(path)):
        with _progress(f"verify {prefix.name}") as progress:
            findings = checking.verify(prefix, vocab_size, progress)
        for problem in findings.problems:
            print(f"problem: {problem}")
        for checked in findings.checked:
            print(f"checked: {checked}")
        for unchecked in findings.unchecked:
            print(f"not checked: {unchecked}")
        count = len(findings.problems)
        verdict = f"{count} problem{'s' if count > 1 else ''}" if count else "good"
        print(f"{prefix}: {verdict}")
        bad = bad or count > 0
    if bad:
        raise typer.Exit(2)


def merge(
    sources: Annotated[list[Path], typer.Argument(help="Datasets, in the order to write them.")],
    output_prefix: OutputPrefix,
    to: Annotated[
        Format | None, typer.Option(help="Format to write; by default the first source's.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Merge even if tokenizers differ or are unknown.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write the documents of several datasets as one."""
    from fourfold.data import transform
    from fourfold.data.files import full_name

    named = [full_name(source) for source in sources]
    with _progress("merge") as progress:
        manifest = transform.merge(named, output_prefix, to, force, overwrite, progress)
    _tell(output_prefix, manifest)


def split(
    path: Dataset,
    parts: Annotated[str, typer.Option(help="Shares of train, valid and test.")],
    output_prefix: OutputPrefix,
    rounding: Annotated[
        Rounding,
        typer.Option(help="Where parts meet, as Data.dataset.split_rounding says it."),
    ] = "megatron_core",
    overwrite: Overwrite = False,
) -> None:
    """Cut a dataset into PREFIX_train, PREFIX_valid and PREFIX_test, as training would."""
    from fourfold.data import transform
    from fourfold.data.files import full_name

    with _progress("split") as progress:
        manifests = transform.split(
            full_name(path), parts, output_prefix, overwrite, progress, rounding
        )
    for part, manifest in manifests.items():
        prefix = Path(f"{output_prefix}_{part}")
        if manifest is None:
            print(f"{prefix}: empty, not written")
        else:
            _tell(prefix, manifest)


def convert(
    path: Dataset,
    to: Annotated[Format, typer.Option(help="Format to write.")],
    output_prefix: OutputPrefix,
    force: Annotated[
        bool, typer.Option("--force", help="Let go of what the format cannot hold.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a dataset in another format: Megatron, FleetX, or the legacy .npz."""
    from fourfold.data import transform
    from fourfold.data.files import full_name

    with _progress("convert") as progress:
        manifest = transform.convert(full_name(path), to, output_prefix, force, overwrite, progress)
    _tell(output_prefix, manifest)


def _tell(prefix: Path, manifest: dict[str, Any]) -> None:
    for note in manifest["derived"]["notes"]:
        print(f"note: {note}")
    print(
        f"{prefix}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{manifest['format']}, {manifest['dtype']}"
    )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere a line every ten seconds, so that short work shows none."""
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Callable[[int, int], None]:
    started = spoken = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal spoken
        now = time.monotonic()
        if now - spoken < LINE_SECONDS:
            return
        spoken = now
        speed = done / (now - started)
        print(
            f"{what}: {done / total:.0%} of {total / 1e6:,.0f} MB, {speed / 1e6:,.0f} MB/s, "
            f"{(total - done) / speed:,.0f} s left",
            file=sys.stderr,
        )

    return tell
