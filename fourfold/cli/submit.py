"""`fourfold submit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.atomic_files import replace_text
from fourfold.cli.options import ConfigFile, Overrides, check_new
from fourfold.errors import ConfigError, UserError


def submit(
    config: ConfigFile,
    to: Annotated[
        str,
        typer.Option(
            metavar="slurm|k8s|kubeflow|skypilot|torchrun", help="The scheduler to write for."
        ),
    ],
    override: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(help="Number of machines; by default those of --cluster.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(help="Number of processes on each machine, one for each GPU of it."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="2x8xA100-80G (nodes x devices x device), or a cluster.yaml."),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Choose the layout for these processes.")
    ] = False,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="24:00:00",
            help="Time limit of one job; by default what the run needs, at most a day.",
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="SLURM's partition.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="--account=LAB", help="A further option of sbatch; may be repeated."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="The container image to run in.")] = None,
    volume: Annotated[
        str | None,
        typer.Option(help="The volume that all containers share, mounted as this directory."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the job; by default the run directory's.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Restarts in a row after failures without a new checkpoint."),
    ] = 3,
    out: Annotated[
        Path | None, typer.Option(help="The job file to write; by default after its name.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the job file.")] = False,
) -> None:
    """Write the job file of a run for a scheduler, and print the command that submits it.

    Layout, time limit, save interval and the notice before a stop follow from the plan. No
    scheduler is spoken to.
    """
    from fourfold.config.findings import did_you_mean, nearest
    from fourfold.submit import OPTIONS, SCHEDULERS, JobRequest, find_scheduler, prepare

    if to not in SCHEDULERS:
        meant = did_you_mean(nearest(to, SCHEDULERS))
        raise UserError(f"--to {to!r} is unknown{meant}; known are {', '.join(SCHEDULERS)}")
    scheduler = find_scheduler(to)
    given = {
        "time": time, "partition": partition, "image": image, "volume": volume, "sbatch": sbatch
    }  # fmt: skip
    problems = [
        f"--{option} has no place in a job of {to}; leave it out"
        for option in OPTIONS
        if given[option] and option not in scheduler.uses
    ]
    request = JobRequest(
        config, override or [], nodes, nproc, cluster, auto, name, time, partition, image,
        sbatch or [], max_restarts, volume,
    )  # fmt: skip
    try:
        job = prepare(request)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    problems += scheduler.problems(job)
    file = out or Path(f"{job.name}{scheduler.suffix}")
    try:
        check_new(file, "--out", force)
        # sbatch loses a job, without a word, whose log cannot be opened.
        job.log_dir.mkdir(parents=True, exist_ok=True)
    except UserError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(
            f"{job.log_dir} cannot be made ({error.strerror}); set Engine.save_load.output_dir to "
            "a directory that you can write to and that all machines share"
        )
    if problems:
        raise ConfigError(problems)
    replace_text(file, scheduler.text(job))
    for line in job.remarks:
        print(line, file=sys.stderr)
    print(f"written: {file}; logs: {job.log_dir}", file=sys.stderr)
    print(scheduler.command(job, file))
