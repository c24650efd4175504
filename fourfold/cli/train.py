"""`fourfold train`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fourfold import storage
from fourfold.cli.options import ConfigFile, Overrides
from fourfold.cli.progress import SupervisorConsole
from fourfold.errors import UserError, say
from fourfold.processors import threads_of_rank
from fourfold.signals import answer_with_stacks

if TYPE_CHECKING:
    from fourfold.config import Config
    from fourfold.convert import ForeignModel
    from fourfold.engine.monitoring import Prediction
    from fourfold.launch.rounds import Machines
    from fourfold.launch.scheduled import MachineStart

# Where the number of machines may change: failures without progress between them, and how long a
# machine may be silent.
ELASTIC_RESTARTS = 10
ELASTIC_LOST_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 1.0

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
LostSeconds = Annotated[
    float | None,
    typer.Option(
        help="With --nnodes: a machine not heard of for this many seconds is lost; by default 10 "
        "with MIN:MAX, else Distributed.timeout_seconds."
    ),
]
StoppedCode = Annotated[
    int,
    typer.Option(
        "--stopped-exit-code",
        min=0,
        max=125,
        help="Exit code of a run that a signal stopped, saved, before its last step.",
    ),
]
NumNodes = Annotated[
    str | None,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Number of machines; with MIN:MAX the run continues with those that are left.",
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Which machine this is, from 0; ranks are in this order, and machine 0 is the one "
        "--master names.",
    ),
]
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
    lost_seconds: LostSeconds = None,
    stopped_exit_code: StoppedCode = 0,
    auto: Auto = False,
    cluster: ClusterOption = None,
) -> None:
    """Train the model a YAML file describes; resumes if the run has checkpoints.

    Without --nproc one process trains, or those that torchrun, srun or mpirun started. On machines
    that Kubeflow, an indexed Job or SkyPilot started, every one of them takes part.
    """
    answer_with_stacks()
    if nnodes is None and node_rank is None and master is None:
        nproc, started = _announced_machines(nproc)
        if started is not None:
            nnodes, node_rank, master = started.nnodes, started.node_rank, started.master
    refuse_what_would_be_ignored(nproc, max_restarts, hang_seconds, nnodes, node_rank, master)
    run = TrainRun(config, override or [], auto, cluster, stopped_code=stopped_exit_code)
    if nnodes is None:
        if lost_seconds is not None:
            raise UserError("--lost-seconds is for several machines; give --nnodes too")
        raise typer.Exit(run.fit(nproc, max_restarts or 0, hang_seconds).exit_code)
    from fourfold.launch.launchers import read_machines

    assert nproc is not None and master is not None
    machines = read_machines(nnodes, node_rank, master)
    if max_restarts is None:
        max_restarts = ELASTIC_RESTARTS if machines.elastic else 0
    _train_on_machines(run, machines, nproc, max_restarts, hang_seconds, lost_seconds)


def _announced_machines(nproc: int | None) -> tuple[int | None, MachineStart | None]:
    """The number of processes of this machine, and its place among the others where a scheduler
    started one process on each of several."""
    from fourfold.launch.launchers import machines_to_start
    from fourfold.launch.scheduled import num_gpus

    started = machines_to_start(os.environ, nproc)
    if started is None:
        return nproc, None
    if started.most == 1:
        several = started.nproc if started.nproc != 1 else None
        return (several if nproc is None else nproc), None
    nproc = nproc or started.nproc or num_gpus() or 1
    which = "a machine" if started.node_rank is None else f"machine {started.node_rank}"
    say(
        f"{started.name}: {which} of {started.nnodes}, {nproc} process(es) here, meeting at "
        f"{started.master}",
        sys.stderr,
    )
    return nproc, started


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
    stopped_code: int = 0

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
            limits = (max_restarts, hang_seconds, self.stopped_code)
            code = _fit_in_processes(config, expected, nproc, limits, save)
            return FinishedRun(code, config, nproc)
        world_size = join_others()
        config, expected = self.resolve(world_size if world_size > 1 else None)
        with _without_garbage():
            from fourfold.engine import build_engine
            from fourfold.launch.unsupervised import speaking_for

        seconds = config.Distributed.timeout_seconds
        with speaking_for(int(os.environ.get("RANK", "0")), world_size, seconds):
            engine = build_engine(config, world_size, expected, partial(_open_foreign, config))
            stopped = engine.fit(save=save)
        return FinishedRun(self.stopped_code if stopped else 0, config, world_size)


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
    limits: tuple[int, float | None, int],
    save: bool,
) -> int:
    """All processes of one machine, started and watched by this one; the exit code."""
    max_restarts, hang_seconds, stopped_code = limits
    take_turns = config.Distributed.pp_degree > 1 and _threads_sleep_while_they_wait()
    # Imported before the fork, so that no rank has to do it, nor any rank after a restart.
    with _without_garbage():
        from fourfold.engine import build_engine
        from fourfold.engine.lock import claim
        from fourfold.launch.supervisor import supervise
        from fourfold.parallel import layout_of, preload

        preload(layout_of(config))
    foreign = partial(_open_foreign, config)
    output_dir = storage.local_path(config.Engine.save_load.output_dir)
    # Held over restarts, and by all ranks, since it is inherited.
    held = claim(output_dir)
    if hang_seconds is None:
        hang_seconds = config.Distributed.timeout_seconds
    saved_step = partial(_saved_step, output_dir)
    console = SupervisorConsole(config.Engine.max_steps, nproc, saved_step)
    try:
        return supervise(
            lambda: build_engine(config, nproc, expected, foreign).fit(save=save),
            nproc,
            output_dir / "logs",
            max_restarts=max_restarts,
            hang_seconds=hang_seconds,
            stop_seconds=hang_seconds,
            saved_step=saved_step,
            copied_step=lambda: _copied_step(config, output_dir),
            threads=threads_of_rank(nproc, take_turns=take_turns),
            stopped_code=stopped_code,
            echo=console.echo,
            tell=console.tell,
        )
    finally:
        console.close()
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
    return checkpoint.step_of(found[0]) if found else None


def _copied_step(config: Config, output_dir: Path) -> int | None:
    """The newest step of which something is in the memory of this machine."""
    if not config.Engine.save_load.memory_copy_steps:
        return None
    from fourfold.checkpoint.copy_store import CopyStore

    return CopyStore(output_dir).newest_step()


def _train_on_machines(
    run: TrainRun,
    machines: Machines,
    nproc: int,
    max_restarts: int,
    hang_seconds: float | None,
    lost_seconds: float | None,
) -> NoReturn:
    """This machine's part of a run over several; ends this process with its exit code."""
    from fourfold.launch.launchers import refuse_inside_launcher

    refuse_inside_launcher(os.environ, "--nnodes", on_every_machine=True)
    # Before torch is loaded: a connection that is lost is ours to tell, not in C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config, _ = run.resolve(nproc * machines.most)
    take_turns = config.Distributed.pp_degree > 1 and _threads_sleep_while_they_wait()
    with _without_garbage():
        from fourfold.engine import build_engine
        from fourfold.launch.agent import WatchLimits, run_agent
        from fourfold.launch.supervisor import Restarts
        from fourfold.parallel import layout_of, preload

        preload(layout_of(config))
    output_dir = storage.local_path(config.Engine.save_load.output_dir)
    patience = config.Distributed.timeout_seconds
    if lost_seconds is None:
        lost_seconds = min(ELASTIC_LOST_SECONDS, patience) if machines.elastic else patience
    hang_seconds = patience if hang_seconds is None else hang_seconds

    if machines.elastic and config.Data.batch_size.rampup is None:
        # A batch given for each rank is that of all machines, however many there are.
        batch = config.Data.batch_size.global_batch_size
        sizes = {"global_batch_size": batch, "local_batch_size": None}
        pinned = {f"Data.batch_size.{key}": value for key, value in sizes.items()}
        run = replace(run, values={**run.values, **pinned})

    def plan(world_size: int) -> Callable[[], object]:
        config, expected = run.resolve(world_size)
        foreign = partial(_open_foreign, config)
        return lambda: build_engine(config, world_size, expected, foreign).fit()

    code = run_agent(
        machines,
        nproc,
        plan,
        output_dir / "logs",
        WatchLimits(hang_seconds, lost_seconds, hang_seconds),
        Restarts(
            max_restarts,
            FIRST_PAUSE_SECONDS,
            lambda: _saved_step(output_dir),
            lambda: _copied_step(config, output_dir),
        ),
        stopped_code=run.stopped_code,
        threads=threads_of_rank(nproc, take_turns=take_turns),
        echo=partial(say, stream=sys.stdout),
        tell=partial(say, stream=sys.stderr),
    )
    with suppress(OSError):
        sys.stdout.flush()
    # A thread may still wait for an answer of a machine that is gone, and torch aborts a process
    # that ends in an orderly way meanwhile.
    os._exit(code)


def refuse_what_would_be_ignored(
    nproc: int | None,
    max_restarts: int | None,
    hang_seconds: float | None,
    nnodes: str | None,
    node_rank: int | None,
    master: str | None,
) -> None:
    if nproc is None and (max_restarts is not None or hang_seconds is not None):
        given = "--max-restarts" if max_restarts is not None else "--hang-seconds"
        raise UserError(
            f"{given} is for processes started here; give their number with --nproc (1 will do), "
            "or use the option of the launcher that starts them"
        )
    several = {"--nnodes": nnodes, "--master": master, "--nproc": nproc}
    missing = [name for name, value in several.items() if value is None]
    asked = nnodes is not None or master is not None or node_rank is not None
    if asked and missing:
        raise UserError(
            f"several machines need --nnodes, --master and --nproc; {' and '.join(missing)} missing"
        )
    if hang_seconds is not None and not hang_seconds > 0:
        raise UserError(f"--hang-seconds {hang_seconds:g} must be greater than 0")
