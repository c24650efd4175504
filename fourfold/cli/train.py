"""`fourfold train`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.cli.options import ConfigFile, Overrides
from fourfold.errors import UserError
from fourfold.processors import threads_of_rank
from fourfold.signals import answer_with_stacks

if TYPE_CHECKING:
    from fourfold.config import Config
    from fourfold.convert import ForeignModel
    from fourfold.engine.monitoring import Prediction

Processes = Annotated[
    int | None, typer.Option(min=1, help="Number of processes to start on this machine.")
]
Restarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Number of restarts after failures; the count resets at each new checkpoint.",
    ),
]
HangSeconds = Annotated[
    float | None,
    typer.Option(help="With --nproc: abort if no process makes progress for this many seconds."),
]
NumNodes = Annotated[
    int | None, typer.Option(min=1, help="Number of machines; runs torchrun on this one.")
]
NodeRank = Annotated[int | None, typer.Option(min=0, help="Which machine this is, from 0.")]
Master = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where machine 0 can be reached.")
]

Auto = Annotated[
    bool, typer.Option("--auto", help="Choose the layout for the processes there are.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster", help="With auto: 2x8xA100-80G or a cluster.yaml; by default ./cluster.yaml."
    ),
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
    auto: Auto = False,
    cluster: ClusterOption = None,
) -> None:
    """Train the model a YAML file describes; resumes if the run has checkpoints.

    Without --nproc one process trains, or those that torchrun, srun or mpirun started.
    """
    answer_with_stacks()
    refuse_what_would_be_ignored(nproc, max_restarts, hang_seconds, nnodes, node_rank, master)
    run = TrainRun(config, override or [], auto, cluster)
    if nnodes is not None:
        assert nproc is not None and node_rank is not None and master is not None
        _train_on_nodes(run, nproc, max_restarts or 0, (nnodes, node_rank, master))
    else:
        raise typer.Exit(run.fit(nproc, max_restarts or 0, hang_seconds).exit_code)


@dataclass(frozen=True)
class FinishedRun:
    exit_code: int
    config: Config
    world_size: int


@dataclass(frozen=True)
class TrainRun:
    """A run as the user asked for it."""

    file: Path
    overrides: list[str]
    auto: bool = False
    cluster: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # keys that the command itself sets

    def resolve(self, world_size: int | None) -> tuple[Config, Prediction | None]:
        """The configuration for that many processes (None: one, started by hand), and what its plan
        predicts where the layout is left to us."""
        from fourfold.config import read_config
        from fourfold.config.auto_constraints import is_auto_requested

        source = read_config(self.file, self.overrides).with_values(self.values)
        if not (self.auto or is_auto_requested(source)):
            config = source.load(world_size)
            if self.cluster is not None:
                raise UserError(
                    f"--cluster {self.cluster} describes the machine for an automatic layout; add "
                    "--auto, or leave it out"
                )
            return config, None
        from fourfold.plan.auto import choose

        choice = choose(source, world_size or 1, self.cluster)
        return choice.config, choice.expected

    def fit(
        self,
        nproc: int | None,
        max_restarts: int = 0,
        hang_seconds: float | None = None,
        *,
        save: bool = True,
    ) -> FinishedRun:
        """Train in `nproc` processes; where it is None in this one, alone or a launcher's."""
        if nproc is not None:
            from fourfold.launch.launchers import refuse_inside_launcher

            refuse_inside_launcher(os.environ, f"--nproc {nproc}")
            config, expected = self.resolve(nproc)
            code = _fit_in_processes(config, expected, nproc, max_restarts, hang_seconds, save)
            return FinishedRun(code, config, nproc)
        world_size = join_others()
        config, expected = self.resolve(world_size if world_size > 1 else None)
        with _without_garbage():
            from fourfold.engine import build_engine

        build_engine(config, world_size, expected, partial(_open_foreign, config)).fit(save=save)
        return FinishedRun(0, config, world_size)

    def words(self) -> list[str]:
        """The same as arguments of the command."""
        again = ["train", "-c", str(self.file)]
        again += [word for text in self.overrides for word in ("-o", text)]
        again += ["--auto"] if self.auto else []
        return again + (["--cluster", self.cluster] if self.cluster is not None else [])


def join_others() -> int:
    """Join the processes that a launcher started; returns how many there are."""
    from fourfold.launch.launchers import join_launcher

    launcher = join_launcher(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from fourfold.launch.workers import die_with_parent

        # torchrun that is killed would leave its processes behind.
        die_with_parent(os.getppid())
    return launcher.world_size if launcher else 1


def _fit_in_processes(
    config: Config,
    expected: Prediction | None,
    nproc: int,
    max_restarts: int,
    hang_seconds: float | None,
    save: bool,
) -> int:
    """All processes of one machine, started and watched by this one; the exit code."""
    take_turns = config.Distributed.pp_degree > 1 and _threads_sleep_while_they_wait()
    # Imported before the fork, so that no rank has to do it, nor any rank after a restart.
    with _without_garbage():
        from fourfold.engine import build_engine
        from fourfold.engine.lock import claim
        from fourfold.launch.supervisor import supervise
        from fourfold.parallel import layout_of, preload

        preload(layout_of(config))
    foreign = partial(_open_foreign, config)
    output_dir = Path(config.Engine.save_load.output_dir)
    # Held over restarts, and by all ranks, since it is inherited.
    held = claim(output_dir)
    if hang_seconds is None:
        hang_seconds = config.Distributed.timeout_seconds
    try:
        return supervise(
            lambda: build_engine(config, nproc, expected, foreign).fit(save=save),
            nproc,
            output_dir / "logs",
            max_restarts=max_restarts,
            hang_seconds=hang_seconds,
            stop_seconds=hang_seconds,
            saved_step=lambda: _saved_step(output_dir),
            threads=threads_of_rank(nproc, take_turns=take_turns),
        )
    finally:
        held.release()


def _open_foreign(config: Config, where: Path) -> ForeignModel:
    """What `ckpt_dir` names where it is no checkpoint of ours."""
    from fourfold.generate.loading import open_foreign

    return open_foreign(config, where)


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Import without looking for garbage on the way, which takes a tenth of the time and finds
    none; what is there now stays for good, and is not looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _threads_sleep_while_they_wait() -> bool:
    """Have the threads of a rank that waits leave the processor to those of other ranks, for which
    OpenMP must be told before it is loaded with torch; returns whether they do."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        return os.environ["OMP_WAIT_POLICY"].upper() == "PASSIVE"
    return False


def _saved_step(output_dir: Path) -> int | None:
    """The step that a run in this directory would resume from."""
    from fourfold import checkpoint

    try:
        found = checkpoint.candidates(output_dir)
    except OSError:
        return None  # a disk that does not answer; the ranks will say more
    return int(found[0].name.removeprefix("step_").removesuffix(".old")) if found else None


def _train_on_nodes(
    run: TrainRun,
    nproc: int,
    max_restarts: int,
    nodes: tuple[int, int, str],
) -> None:
    from fourfold.launch.launchers import Nodes, become, torchrun_command

    resolved, _ = run.resolve(nproc * nodes[0])
    log_dir = Path(resolved.Engine.save_load.output_dir) / "logs"
    command = torchrun_command(Nodes(*nodes), nproc, max_restarts, log_dir, run.words())
    become(command)


def refuse_what_would_be_ignored(
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
            f"{given} is for processes started here; give their number with --nproc (1 will do), "
            "or use the option of the launcher that starts them"
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
            "--hang-seconds works on one machine only; across several, a hang ends when the "
            "waiting collective times out"
        )
    if hang_seconds is not None and not hang_seconds > 0:
        raise UserError(f"--hang-seconds {hang_seconds:g} must be greater than 0")
