"""`fourfold bench`: the speed of the first iterations of a run, at its whole batch."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    """Time the first iterations of a run, at its full global batch.

    It is the file's own run, by the same engine and on the processes given, but without evaluation
    or checkpoints, in a temporary directory.
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
        log = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
        with log:
            settings = _settings(iterations, directory)
            run = train.TrainRun(config, override or [], values=settings).fit(nproc, save=False)
        if run.exit_code == FAILED:
            leaving.pop_all()  # the logs in it were just named
        if run.exit_code:
            raise typer.Exit(run.exit_code)
        _tell(run.config, run.world_size, directory, warmup, as_json)


def _refuse_own_settings(overrides: list[str]) -> None:
    for text in overrides:
        name = text.partition("=")[0].strip()
        if name in _settings(1, Path()):
            instead = "use --iterations" if name == "Engine.max_steps" else "leave it out"
            raise UserError(f"-o {text} has no effect: bench sets {name} itself; {instead}")


def _settings(iterations: int, directory: Path) -> dict[str, Any]:
    """Overrides that turn a run into a measurement."""
    return {
        "Engine.max_steps": iterations,
        "Engine.train_samples": None,
        "Data.batch_size.rampup": None,
        "Engine.logging_freq": 1,
        "Engine.log_style": "megatron",
        "Engine.eval_freq": 0,
        "Engine.test_iters": 0,
        "Engine.tensorboard": False,
        "Engine.wandb": False,
        # Nothing of what it does is kept, so updates that are skipped need not end it.
        "Engine.max_skipped_steps": iterations + 1,
        "Engine.check_replicas_freq": 0,
        "Engine.save_load.ckpt_dir": None,
        "Engine.save_load.output_dir": str(directory),
        "Profiler.enable": False,
    }


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
