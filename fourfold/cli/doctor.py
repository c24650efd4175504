"""`fourfold doctor`: this machine for the planner, or with --nodes all ranks of a job compared."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.options import check_new, refuse_all_but
from fourfold.cli.plan import CLUSTER_FILE, Force
from fourfold.cli.train import (
    Master,
    NodeRank,
    NumNodes,
    join_others,
    refuse_what_would_be_ignored,
)
from fourfold.errors import say
from fourfold.processors import threads_of_rank

if TYPE_CHECKING:
    from fourfold.launch.rounds import Machines

FOUND = 1  # the exit code where something is slow or differs
TIMEOUT_SECONDS = 300.0
OF_ONE_MACHINE = {"nproc", "out", "force", "seconds", "directory"}
OF_NODES = {"nodes", "nproc", "nnodes", "node_rank", "master", "directory", "as_json", "one_by_one"}


def doctor(
    context: typer.Context,
    nproc: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes to start on this machine.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = CLUSTER_FILE,
    force: Force = False,
    seconds: Annotated[
        float, typer.Option(min=0.05, max=60, help="How long to spend on each measurement.")
    ] = 0.3,
    directory: Annotated[
        Path, typer.Option(help="Where checkpoints will go: its disk is timed.")
    ] = Path("."),
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Compare all ranks, links and disks of a job.")
    ] = False,
    nnodes: NumNodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="With --nodes: let each rank compute alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --nodes: print JSON.")] = False,
) -> None:
    """Measure this machine (products, memory, disk, collectives) and write a cluster.yaml.

    With --nodes, started by --nproc, --nnodes or any launcher: measure every rank, link and disk of
    the job and name what is slow or differs; exit code 1 where something is.
    """
    if not nodes:
        refuse_all_but(context, OF_ONE_MACHINE, "without --nodes")
        _examine_this_machine(nproc or 1, out, force, seconds, directory)
        return
    refuse_all_but(context, OF_NODES, "with --nodes")
    refuse_what_would_be_ignored(nproc, None, None, nnodes, node_rank, master)
    machines = None
    if nnodes is not None:
        from fourfold.launch.launchers import read_machines

        assert nproc is not None and master is not None
        machines = read_machines(nnodes, node_rank, master)
    raise typer.Exit(_compare_ranks(nproc, machines, directory, as_json, one_by_one))


def _examine_this_machine(
    nproc: int, out: Path, force: bool, seconds: float, directory: Path
) -> None:
    from fourfold.plan.cluster import save_cluster
    from fourfold.plan.doctor import examine

    check_new(out, "--out", force)
    findings = examine(nproc, seconds, directory)
    for line in findings.lines:
        print(line)
    save_cluster(findings.cluster, out, "Measured by `fourfold doctor`.")
    print(f"written: {out}; use it with `fourfold plan --cluster {out}`")


def _compare_ranks(
    nproc: int | None, machines: Machines | None, directory: Path, as_json: bool, one_by_one: bool
) -> int:
    """The exit code. Only rank 0 prints."""
    if nproc is None:
        return FOUND if _measure(join_others(), directory, as_json, one_by_one) else 0
    from fourfold.launch.launchers import refuse_inside_launcher

    option = f"--nproc {nproc}" if machines is None else "--nnodes"
    refuse_inside_launcher(os.environ, option, on_every_machine=machines is not None)
    # Imported before the fork, so that no rank has to do it.
    import fourfold.engine.preflight
    import fourfold.parallel  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="fourfold-doctor-") as folder:
        found, logs = Path(folder) / "found", Path(folder) / "logs"

        def work(world_size: int) -> None:
            # A rank's own exit code would be taken for its failure.
            if _measure(world_size, directory, as_json, one_by_one):
                found.touch()

        if machines is None:
            code = _on_this_machine(partial(work, nproc), nproc, logs)
        else:
            code = _on_machines(work, machines, nproc, logs)
        return code or (FOUND if found.exists() else 0)


def _on_this_machine(work: Callable[[], None], nproc: int, logs: Path) -> int:
    from fourfold.launch.supervisor import supervise

    return supervise(work, nproc, logs, hang_seconds=TIMEOUT_SECONDS)


def _on_machines(work: Callable[[int], None], machines: Machines, nproc: int, logs: Path) -> int:
    """This machine's part of a comparison over several."""
    from fourfold.launch.agent import WatchLimits, run_agent
    from fourfold.launch.supervisor import Restarts

    return run_agent(
        machines,
        nproc,
        lambda world_size: partial(work, world_size),
        logs,
        WatchLimits(TIMEOUT_SECONDS, TIMEOUT_SECONDS, TIMEOUT_SECONDS),
        Restarts(0, 1.0, None),
        threads=threads_of_rank(nproc),
        echo=partial(say, stream=sys.stdout),
        tell=partial(say, stream=sys.stderr),
    )


def _measure(world_size: int, directory: Path, as_json: bool, one_by_one: bool) -> bool:
    """Whether something was found, the same on every rank."""
    from fourfold.device import environment_int, select_device
    from fourfold.engine.preflight import preflight
    from fourfold.mesh import Layout, connect

    device = select_device("auto")
    mesh = connect(Layout(dp=world_size), device, TIMEOUT_SECONDS)
    found = preflight(mesh, device, directory, "full", one_by_one=one_by_one)
    if environment_int("RANK", 0) == 0:
        if as_json:
            print(json.dumps(found.to_dict(), indent=2))
        else:
            for line in found.lines():
                print(line)
    mesh.close()
    return bool(found.findings)
