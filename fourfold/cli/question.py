"""`fourfold replay` and `fourfold prove`: questions to a run."""

from __future__ import annotations

import json
import os
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.cli.options import Overrides, refuse_several_processes

if TYPE_CHECKING:
    from fourfold.config import Config
    from fourfold.engine.resuming import OpenForeign

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The output directory of a run.")]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of processes; 1 for any layout.", show_default="as many as the run had"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]
DIFFERENT = 1


def replay(
    run: RunPath,
    step: Annotated[int, typer.Option(min=1, help="Which step, counted from 1 as in the log.")],
    per_sample: Annotated[
        bool,
        typer.Option(
            "--per-sample",
            help="Show the loss of every sample and document, gradient norms, extremes.",
        ),
    ] = False,
    nproc: Processes = None,
    override: Overrides = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer to decode with.", show_default="the data's own"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many documents and samples to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Compute a step of a run again; exit code 1 if it is not what the run recorded."""
    from fourfold.question.history import RunHistory, on_ranks, scratch_directory
    from fourfold.question.replay import Replay, replay_lines

    history = RunHistory(run)
    asked = Replay(history, step, per_sample=per_sample, tokenizer=tokenizer)
    size, alone = _world(nproc, asked.segment.layout.world_size)
    with scratch_directory(None if alone else _meeting(run, step)) as scratch:
        config = asked.segment.config(scratch, override or [], size)
        asked.open_foreign = _foreign(config)
        facts = history.facts(step)
        threads = None if facts is None else facts.threads
        work = partial(asked.run, config, size)
        code, answer = on_ranks(size, scratch, work, config, threads) if alone else (0, work())
    if code or answer is None:
        raise typer.Exit(code)
    print(json.dumps(answer, indent=2) if as_json else "\n".join(replay_lines(answer, top)))
    if answer["equal"] is False:
        raise typer.Exit(DIFFERENT)


def prove(
    run: RunPath,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Recompute this many steps, drawn at random.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Recompute every step.")] = False,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    nproc: Processes = None,
    override: Overrides = None,
    as_json: Json = False,
) -> None:
    """Check a run's files, data and log, and compute its steps again; exit code 1 for a finding.

    Without --sample or --all no step is recomputed.
    """
    from fourfold.errors import UserError
    from fourfold.question.prove import Proof, proof_lines

    refuse_several_processes("prove")
    if every and sample is not None:
        raise UserError(f"--all recomputes every step, --sample {sample} some; give one of the two")
    proof = Proof(run, override or [], nproc)
    for _ in proof.steps(sample=sample, every=every, seed=seed):
        pass
    told = proof.to_dict()
    print(json.dumps(told, indent=2) if as_json else "\n".join(proof_lines(told)))
    if told["findings"]:
        raise typer.Exit(DIFFERENT)


def _world(nproc: int | None, of_run: int) -> tuple[int, bool]:
    """How many processes there are to be, and whether they are ours to start."""
    from fourfold.launch.launchers import join_launcher, refuse_inside_launcher

    if nproc is not None:
        refuse_inside_launcher(os.environ, f"--nproc {nproc}")
        return nproc, True
    launcher = join_launcher(os.environ)
    return (of_run, True) if launcher is None else (launcher.world_size, False)


def _meeting(run: Path, step: int) -> str:
    """A name that all ranks of a launcher come to, and those of another start do not."""
    start = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
    told = [str(run.resolve()), str(step), os.environ.get("MASTER_PORT", ""), *start]
    return f"fourfold-question-{sha256(' '.join(told).encode()).hexdigest()[:16]}"


def _foreign(config: Config) -> OpenForeign:
    from fourfold.generate.loading import open_foreign

    def opened(where: Path) -> Any:
        return open_foreign(config, where)

    return opened
