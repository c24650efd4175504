"""`fourfold accept`: what this machine's devices do against what they must do, in one report."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from fourfold.errors import UserError

FAILED = 1


def accept(
    output: Annotated[
        Path, typer.Option(help="Where acceptance.json and acceptance.html go.")
    ] = Path("acceptance"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer layouts and benches: about two minutes.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            "--nproc",
            min=1,
            max=8,
            help="Number of processes, one a device.",
            show_default="all GPUs, at most 8; 4 processes on a CPU",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or gpu.", show_default="gpu where there is one")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of collectives, equivalence, resuming, speed and memory those to run, with "
            "commas between them.",
            show_default="all",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the trial runs and their logs, and say where.")
    ] = False,
) -> None:
    """Check this machine: layouts, collectives, resuming, speed and memory, in one report.

    Small runs of the real engine, against a single process, known answers and the plan. The report
    names devices and versions and nothing private, to be attached to an issue. Exit code 1 if a
    check fails.
    """
    from fourfold.accept.acceptance import accept as run
    from fourfold.accept.acceptance import default_world, has_gpu
    from fourfold.accept.layouts import SECTIONS
    from fourfold.accept.report import lines_of
    from fourfold.accept.trials import Ground

    chosen = _sections(only, SECTIONS)
    if device not in (None, "cpu", "gpu"):
        raise UserError(f"--device {device}: choose cpu or gpu")
    folder = Path(tempfile.mkdtemp(prefix="fourfold-accept-"))
    try:
        ground = Ground(folder, "cpu")
        ground = Ground(folder, device or ("gpu" if has_gpu(ground) else "cpu"))
        most = default_world(ground)
        if ground.device != "cpu" and devices is not None and devices > most:
            raise UserError(f"--devices {devices}: this machine has {most} GPUs; give at most that")
        world = devices or most
        print(f"accepting {world} process(es) on {ground.device}", flush=True)
        report = run(
            ground,
            world,
            quick=quick,
            sections=chosen,
            tell=lambda section: print("\n".join(lines_of(section)), flush=True),
        )
        record, page = report.write(output)
    finally:
        if keep:
            print(f"the trial runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{report.verdict}; written: {record}, {page}")
    for name in report.failed:
        print(f"failed: {name}")
    if report.failed:
        raise typer.Exit(FAILED)


def _sections(only: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    asked = [] if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in asked if name not in known]:
        raise UserError(f"--only {only}: {unknown[0]!r} is not one of {', '.join(known)}")
    return tuple(name for name in known if only is None or name in asked)
