"""`fourfold checkpoint inspect | verify | merge`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.storage import address_of, local_path, name_of

if TYPE_CHECKING:
    from fourfold.checkpoint.manifest import Manifest

app = typer.Typer(help="Inspect, verify and merge checkpoints.", no_args_is_help=True)

CheckpointPath = Annotated[
    Path,
    typer.Argument(
        metavar="PLACE",
        parser=local_path,
        help="An output directory, or one step_N in it: a path or an address (s3://bucket/run).",
    ),
]

LARGEST_SHOWN = 5
PARAMETERS, AVERAGES = "model.", "ema."


@app.command()
def inspect(place: CheckpointPath) -> None:
    """Show what a checkpoint holds, or which checkpoints an output directory has."""
    from fourfold.checkpoint.directory import named_by_user

    found = named_by_user(place)
    if len(found) == 1:
        _describe(found[0])
    else:
        print(f"{name_of(place)}: {len(found)} checkpoints, the last one saved first")
        for directory in found:
            print(f"  {_line(directory)}")


@app.command()
def verify(place: CheckpointPath) -> None:
    """Check every byte of a checkpoint, or of all in a directory; exit code 2 if any is wrong."""
    from fourfold import checkpoint
    from fourfold.checkpoint.directory import named_by_user
    from fourfold.checkpoint.manifest import read_manifest

    bad = False
    for directory in named_by_user(place):
        problems = checkpoint.verify(directory)
        for problem in problems:
            print(f"problem: {_printable(problem)}")
        if problems:
            print(
                f"{name_of(directory)}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
            )
        else:
            manifest = read_manifest(directory)
            print(
                f"{name_of(directory)}: good: {len(manifest.files)} files, "
                f"{len(manifest.tensors)} tensors, "
                f"{_readable(manifest.size())}"
            )
        bad = bad or bool(problems)
    if bad:
        raise typer.Exit(2)


@app.command()
def merge(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            parser=local_path,
            help="A step_N directory, or an output directory for its newest.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", parser=local_path, help="The new directory to write."),
    ],
    prefix: Annotated[
        str,
        typer.Option(help='Only tensors whose names start with this; "model." for the weights.'),
    ] = "",
    ema: Annotated[
        bool,
        typer.Option(
            "--ema", help="Write the average of the weights (Optimizer.ema_decay) as the weights."
        ),
    ] = False,
) -> None:
    """Rewrite a checkpoint with every tensor whole, whatever layout saved it."""
    from fourfold import checkpoint
    from fourfold.checkpoint.directory import named_by_user
    from fourfold.checkpoint.manifest import read_manifest
    from fourfold.errors import UserError

    if address_of(target) is not None:
        raise UserError(
            f"{name_of(target)}: merge writes to a directory here; copy it there afterwards"
        )
    chosen, becomes = named_by_user(source)[0], None
    if ema:
        if prefix:
            raise UserError(f"--ema and --prefix {prefix} both say what to write; leave one out")
        if not any(name.startswith(AVERAGES) for name in read_manifest(chosen).tensors):
            raise UserError(
                f"{name_of(chosen)} has no average of the weights; its run was not started with "
                "Optimizer.ema_decay"
            )
        prefix, becomes = AVERAGES, PARAMETERS
    manifest = read_manifest(checkpoint.merge(chosen, target, prefix, becomes))
    print(
        f"{target}: {len(manifest.tensors)} tensors of {name_of(chosen)}, whole, in "
        f"{len(manifest.shards())} files, {_readable(manifest.size())}"
    )


def _line(directory: Path) -> str:
    """One checkpoint in a list: its name, age and size, or why it cannot be used."""
    from fourfold.checkpoint.manifest import read_manifest
    from fourfold.errors import CheckpointError

    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return f"{directory.name:<16} unusable: {_printable(str(error))}"
    return (
        f"{directory.name:<16} {_saved_at(directory)}  {_readable(manifest.size()):>10}  "
        f"{len(manifest.files):>5} files  format {manifest.version}"
    )


def _describe(directory: Path) -> None:
    from fourfold import checkpoint
    from fourfold.checkpoint.manifest import read_manifest

    manifest, state = read_manifest(directory), checkpoint.read_state(directory)
    weights = [t for name, t in manifest.tensors.items() if name.startswith(PARAMETERS)]
    count = sum(t.nbytes() // t.torch_dtype().itemsize for t in weights)
    rows = {
        "step": f"{manifest.step:,}, saved {_saved_at(directory)}",
        "format": f"version {manifest.version}, written by Fourfold {state.get('version', '?')}",
        "layout": _layout(state),
        "parameters": f"{count:,} in {len(weights)} of {len(manifest.tensors)} tensors",
        "size": f"{_readable(manifest.size())} in {len(manifest.files)} files",
        "pieces": _pieces(manifest),
        "samples": f"{state.get('consumed_samples', '?')} consumed",
        "tokenizer": state.get("tokenizer") or "not known",
    }
    print(_printable(name_of(directory)))
    for title, text in rows.items():
        print(f"  {title:<11} {_printable(str(text))}")
    largest = sorted(manifest.tensors.items(), key=lambda item: -item[1].nbytes())
    print(f"\n  The largest of {len(manifest.tensors)} tensors")
    for name, record in largest[:LARGEST_SHOWN]:
        print(f"    {_readable(record.nbytes()):>10}  {_printable(name)}  {record}")


def _layout(state: dict[str, Any]) -> str:
    config = state.get("config")
    section = config.get("Distributed") if isinstance(config, dict) else None
    if not isinstance(section, dict):
        return "not known"
    sharding = section.get("sharding")
    sharding = sharding if isinstance(sharding, dict) else {}
    return (
        f"dp {section.get('dp_degree', '?')}, pp {section.get('pp_degree', '?')}, "
        f"sharding {sharding.get('sharding_degree', '?')} "
        f"(stage {sharding.get('sharding_stage', '?')}), mp {section.get('mp_degree', '?')}"
    )


def _pieces(manifest: Manifest) -> str:
    """How many tensors are in how many pieces, "148 whole, 296 in 4"."""
    counts = Counter(len(cut.files) for cut in manifest.tensors.values())
    return ", ".join(
        f"{tensors} {'whole' if pieces == 1 else f'in {pieces}'}"
        for pieces, tensors in sorted(counts.items())
    )


def _saved_at(directory: Path) -> str:
    from fourfold.checkpoint.manifest import MANIFEST

    written = (directory / MANIFEST).stat().st_mtime
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))


def _readable(count: int) -> str:
    if count < 1000:
        return f"{count} bytes"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:,.2f} {'kMGT'[power - 1]}B"


def _printable(text: str) -> str:
    """Names and states are foreign; none may do anything to the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
