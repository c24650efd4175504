"""`fourfold doctor`: this machine for the planner, or with --nodes all ranks of a job compared."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

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
    if nnodes is not None:
        assert nproc is not None and node_rank is not None and master is not None
        _on_nodes(nproc, (nnodes, node_rank, master), directory, as_json, one_by_one)
    raise typer.Exit(_compare_ranks(nproc, directory, as_json, one_by_one))


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


def _on_nodes(
    nproc: int, place: tuple[int, int, str], directory: Path, as_json: bool, one_by_one: bool
) -> None:
    """Hand over to torchrun, which starts this command again in every process."""
    from fourfold.launch.launchers import Nodes, become, torchrun_command

    words = ["doctor", "--nodes", "--directory", str(directory)]
    words += ["--json"] if as_json else []
    words += ["--one-by-one"] if one_by_one else []
    logs = Path(tempfile.mkdtemp(prefix="fourfold-doctor-"))
    become(torchrun_command(Nodes(*place), nproc, 0, logs, words))


def _compare_ranks(nproc: int | None, directory: Path, as_json: bool, one_by_one: bool) -> int:
    """The exit code. Only rank 0 prints."""
    if nproc is None:
        return FOUND if _measure(join_others(), directory, as_json, one_by_one) else 0
    from fourfold.launch.launchers import refuse_inside_launcher

    refuse_inside_launcher(os.environ, f"--nproc {nproc}")
    # Imported before the fork, so that no rank has to do it.
    import fourfold.engine.preflight
    import fourfold.parallel  # noqa: F401
    from fourfold.launch.supervisor import supervise

    with tempfile.TemporaryDirectory(prefix="fourfold-doctor-") as folder:
        found = Path(folder) / "found"

        def work() -> None:
            # A rank's own exit code would be taken for its failure.
            if _measure(nproc, directory, as_json, one_by_one):
                found.touch()

        code = supervise(work, nproc, Path(folder) / "logs", hang_seconds=TIMEOUT_SECONDS)
        return code or (FOUND if found.exists() else 0)


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
