"""`fourfold bench`: how fast the first iterations of a run are, at its whole batch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli import train
from fourfold.cli.options import ConfigFile, Overrides
from fourfold.errors import RunError, UserError

if TYPE_CHECKING:
    from fourfold.config import Config

FAILED = 1


def bench(
    config: ConfigFile,
    override: Overrides = None,
    nproc: train.Processes = None,
    iterations: Annotated[int, typer.Option(min=1, help="Number of iterations to run.")] = 10,
    warmup: Annotated[
        int, typer.Option(min=0, help="Warm-up iterations, excluded from the result.")
    ] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the log goes to standard error.")
    ] = False,
) -> None:
    """Time the first iterations of a run, at its whole global batch.

    The run is the file's, by the engine that trains, on the processes given: without evaluation,
    without checkpoints, in a directory of its own that is removed.
    """
    if warmup >= iterations:
        raise UserError(
            f"--warmup {warmup} leaves none of --iterations {iterations} to count; run more "
            "iterations, or leave fewer out"
        )
    _refuse_own_settings(override or [])
    with contextlib.ExitStack() as leaving:
        directory = Path(tempfile.mkdtemp(prefix="fourfold-bench-"))
        leaving.callback(shutil.rmtree, directory, ignore_errors=True)
        settings = [*(override or []), *_settings(iterations, directory)]
        log = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
        with log:
            run = train.TrainRun(config, settings, auto=False, cluster=None)
            code, resolved, world_size = _run(run, nproc)
        if code == FAILED:
            leaving.pop_all()  # the logs in it were just named
        if code:
            raise typer.Exit(code)
        _tell(resolved, world_size, directory, warmup, as_json)


def _refuse_own_settings(overrides: list[str]) -> None:
    own = [setting.partition("=")[0] for setting in _settings(1, Path())]
    for text in overrides:
        name = text.partition("=")[0].strip()
        if name in own:
            instead = "use --iterations" if name == "Engine.max_steps" else "leave it out"
            raise UserError(f"-o {text} has no effect: bench sets {name} itself; {instead}")


def _settings(iterations: int, directory: Path) -> list[str]:
    """What makes a run a measurement; over the file's own."""
    return [
        f"Engine.max_steps={iterations}",
        "Engine.train_samples=null",
        "Data.batch_size.rampup=null",
        "Engine.logging_freq=1",
        "Engine.log_style=megatron",
        "Engine.eval_freq=0",
        "Engine.test_iters=0",
        "Engine.tensorboard=False",
        "Engine.wandb=False",
        # Nothing of what it does is kept, so updates that are skipped need not end it.
        f"Engine.max_skipped_steps={iterations + 1}",
        "Engine.check_replicas_freq=0",
        "Engine.save_load.ckpt_dir=null",
        f"Engine.save_load.output_dir={directory}",
        "Profiler.enable=False",
    ]


def _run(run: train.TrainRun, nproc: int | None) -> tuple[int, Config, int]:
    """The exit code, what was run, and in how many processes."""
    if nproc is not None:
        from fourfold.launch.launchers import refuse_inside_launcher

        refuse_inside_launcher(os.environ, f"--nproc {nproc}")
        resolved, expected = run.resolve(nproc)
        code = train.fit_in_processes(resolved, expected, nproc, save=False)
        return code, resolved, nproc
    world_size = train.join_others()
    resolved, expected = run.resolve(world_size if world_size > 1 else None)
    train.fit_here(resolved, expected, world_size, save=False)
    return 0, resolved, world_size


def _tell(config: Config, world_size: int, directory: Path, warmup: int, as_json: bool) -> None:
    from fourfold.engine.benchmark import measurement
    from fourfold.metrics.jsonl import FILE_NAME, read_facts, read_jsonl
    from fourfold.metrics.peaks import Peak

    file = directory / FILE_NAME
    if not file.exists():
        return  # a rank other than the first, which has the records
    records = read_jsonl(file)
    steps = [record for record in records if record["kind"] == "train"]
    if len(steps) <= warmup:
        raise RunError(f"stopped after {len(steps)} iterations, before any that counts")
    facts = next(facts for record in records if (facts := read_facts(record)))
    peak = Peak(facts.peak_flops, facts.peak_source)
    measured = measurement(config, world_size, steps, warmup, peak)
    if as_json:
        print(json.dumps(measured.to_dict(), indent=2))
    else:
        print("\n".join(measured.lines()))
