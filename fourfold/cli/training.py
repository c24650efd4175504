"""`fourfold train`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides
from fourfold.errors import UserError

Processes = Annotated[
    int | None, typer.Option(min=1, help="Start so many processes on this machine.")
]
Restarts = Annotated[
    int | None,
    typer.Option(min=0, help="Start again so often from the last checkpoint after a failure."),
]
HangSeconds = Annotated[
    float | None,
    typer.Option(help="With --nproc: give up when no process makes progress for so long."),
]
NumNodes = Annotated[
    int | None, typer.Option(min=1, help="Of several machines: how many; runs torchrun.")
]
NodeRank = Annotated[int | None, typer.Option(min=0, help="Which machine this is, from 0.")]
Master = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where machine 0 can be reached.")
]


def train(
    config: ConfigFile,
    override: Overrides = None,
    nproc: Processes = None,
    max_restarts: Restarts = None,
    hang_seconds: HangSeconds = None,
    nnodes: NumNodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
) -> None:
    """Train the model a YAML file describes; resumes if the run has checkpoints.

    Without --nproc one process trains, or those that torchrun, srun or mpirun started.
    """
    _refuse_what_would_be_ignored(nproc, max_restarts, hang_seconds, nnodes, node_rank, master)
    overrides = override or []
    if nnodes is not None:
        assert nproc is not None and node_rank is not None and master is not None
        _train_on_nodes(config, overrides, nproc, max_restarts or 0, (nnodes, node_rank, master))
    elif nproc is not None:
        code = _train_in_processes(config, overrides, nproc, max_restarts or 0, hang_seconds)
        raise typer.Exit(code)
    else:
        _train_here(config, overrides)


def _train_here(config: Path, overrides: list[str]) -> None:
    """One process, or one of those a launcher started."""
    from fourfold.config import load_config
    from fourfold.launch.join import join_launcher
    from fourfold.launch.kernel import die_with_parent

    launcher = join_launcher(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun that is killed would leave its processes behind.
        die_with_parent(os.getppid())
    size = launcher.world_size if launcher else 1
    resolved = load_config(config, overrides, size if size > 1 else None)

    from fourfold.engine import Engine

    Engine(resolved, size).fit()


def _train_in_processes(
    config: Path, overrides: list[str], nproc: int, max_restarts: int, hang_seconds: float | None
) -> int:
    from fourfold.config import load_config
    from fourfold.launch.join import join_launcher

    launcher = join_launcher(os.environ)
    if launcher is not None and launcher.world_size > 1:
        raise UserError(
            f"--nproc {nproc} would start processes inside each of the {launcher.world_size} that "
            f"{launcher.name} started; leave --nproc out, or start a single process"
        )
    resolved = load_config(config, overrides, nproc)

    # Imported before the fork, so that no rank has to do it, nor any rank after a restart.
    from fourfold.engine import Engine
    from fourfold.launch.supervise import supervise
    from fourfold.parallel import layout_of, preload

    preload(layout_of(resolved))
    if hang_seconds is None:
        hang_seconds = resolved.Distributed.timeout_seconds
    return supervise(
        lambda: Engine(resolved, nproc).fit(),
        nproc,
        Path(resolved.Engine.save_load.output_dir) / "logs",
        max_restarts=max_restarts,
        hang_seconds=hang_seconds,
    )


def _train_on_nodes(
    config: Path,
    overrides: list[str],
    nproc: int,
    max_restarts: int,
    nodes: tuple[int, int, str],
) -> None:
    from fourfold.config import load_config
    from fourfold.launch.torchrun import Nodes, torchrun_command

    resolved = load_config(config, overrides, nproc * nodes[0])
    log_dir = Path(resolved.Engine.save_load.output_dir) / "logs"
    again = ["train", "-c", str(config), *(word for text in overrides for word in ("-o", text))]
    command = torchrun_command(Nodes(*nodes), nproc, max_restarts, log_dir, again)
    os.execv(command[0], command)


def _refuse_what_would_be_ignored(
    nproc: int | None,
    max_restarts: int | None,
    hang_seconds: float | None,
    nnodes: int | None,
    node_rank: int | None,
    master: str | None,
) -> None:
    if nproc is None and (max_restarts is not None or hang_seconds is not None):
        given = "--max-restarts" if max_restarts is not None else "--hang-seconds"
        raise UserError(
            f"{given} is about processes that are started here; say how many with --nproc (1 will "
            "do), or use the option of the launcher that starts them"
        )
    several = {"--nnodes": nnodes, "--node-rank": node_rank, "--master": master, "--nproc": nproc}
    missing = [name for name, value in several.items() if value is None]
    if missing and missing != list(several)[:3] and missing != list(several):
        raise UserError(
            f"several machines need --nnodes, --node-rank, --master and --nproc; "
            f"{' and '.join(missing)} missing"
        )
    if nnodes is not None and hang_seconds is not None:
        raise UserError(
            "--hang-seconds works on one machine only; over several, a hang ends by the timeout "
            "of the collective that waits"
        )
    if hang_seconds is not None and not hang_seconds > 0:
        raise UserError(f"--hang-seconds {hang_seconds:g} must be greater than 0")
