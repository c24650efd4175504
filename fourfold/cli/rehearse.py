"""`fourfold rehearse`: would these ranks wait for each other for ever?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides, refuse_several_processes

if TYPE_CHECKING:
    from fourfold.config import Config


def rehearse(
    config: ConfigFile,
    override: Overrides = None,
    world: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes.", show_default="what the file needs"),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Micro-batches of the step.",
            show_default="the file's, at most one for each pipeline stage",
        ),
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Build every rank, not only those that differ.")
    ] = False,
    processes: Annotated[
        bool,
        typer.Option(
            "--processes",
            help="Start all of them, with a narrow network, and compare them with one process.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play a training step of all ranks of the layout against each other, without starting them.

    Every send must have its receive and every collective its members, in one order. Exit code 1 if
    something does not fit, with the ranks and the operation. With --processes they are started,
    here and with a narrow network; exit code 1 if their numbers are not those of one process.
    """
    from fourfold.config import load_config
    from fourfold.plan.rehearsal import rehearsal_lines
    from fourfold.plan.rehearsal import rehearse as play

    resolved = load_config(config, override or [], world)
    for notice in resolved.notices:
        print(notice, file=sys.stderr)
    if processes:
        raise typer.Exit(_start_all(resolved, all_ranks, micro_batches, as_json))
    played = play(resolved, all_ranks=all_ranks, micro_batches=micro_batches)
    if as_json:
        print(json.dumps(asdict(played), indent=2))
    else:
        for line in rehearsal_lines(played, resolved):
            print(line)
    raise typer.Exit(1 if played.findings else 0)


def _start_all(config: Config, all_ranks: bool, micro_batches: int | None, as_json: bool) -> int:
    from fourfold.accept.process_rehearsal import process_rehearsal_lines, rehearse_processes
    from fourfold.errors import UserError

    if all_ranks:
        raise UserError(
            "--all-ranks is about building ranks; --processes starts all of them anyway"
        )
    refuse_several_processes("fourfold rehearse")
    told = rehearse_processes(config, micro_batches)
    if as_json:
        print(json.dumps({"equal": told.equal, **asdict(told)}, indent=2))
    else:
        for line in process_rehearsal_lines(told):
            print(line)
    return 0 if told.equal else 1
