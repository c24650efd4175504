"""Joining processes that a launcher started: torchrun, SLURM's srun, Open MPI's mpirun.

Torch wants RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. torchrun sets them itself;
for the others they are derived here. A value that is already set is the user's and stays.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from fourfold.errors import UserError

# Below the ports that Linux hands out on its own (32768 and up), above the well-known ones.
FIRST_PORT, PORTS = 12000, 20000

_HOST_PIECE = re.compile(r"([^\[\],\s]+)|\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")


@dataclass(frozen=True)
class Launcher:
    """What a launcher told this process; `variables` are the ones torch reads."""

    name: str
    world_size: int
    variables: dict[str, str]


def join_launcher(environment: MutableMapping[str, str]) -> Launcher | None:
    """Set the variables torch reads from a launcher's own; None if no launcher started us."""
    launcher = _torchrun(environment) or _open_mpi(environment) or _slurm(environment)
    if launcher is not None:
        for name, value in launcher.variables.items():
            environment.setdefault(name, value)
    return launcher


def refuse_inside_launcher(environment: MutableMapping[str, str], given: str) -> None:
    """`given` would start processes, which must not happen in each of a launcher's own."""
    launcher = join_launcher(environment)
    if launcher is not None and launcher.world_size > 1:
        raise UserError(
            f"{given} would start processes inside each of the {launcher.world_size} that "
            f"{launcher.name} started; leave {given.split()[0]} out, or start a single process"
        )


def _torchrun(environment: Mapping[str, str]) -> Launcher | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    size = _size_and_rank(environment, "WORLD_SIZE", "RANK")
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE"
    return Launcher(name, size, {})


def _open_mpi(environment: Mapping[str, str]) -> Launcher | None:
    prefix = "OMPI_COMM_WORLD_"
    if f"{prefix}RANK" not in environment:
        return None
    size = _size_and_rank(environment, f"{prefix}SIZE", f"{prefix}RANK")
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    variables = {
        "RANK": environment[f"{prefix}RANK"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment.get(f"{prefix}LOCAL_RANK", "0"),
        "MASTER_PORT": port_of(job),
    }
    if environment.get(f"{prefix}LOCAL_SIZE") == str(size):
        variables["MASTER_ADDR"] = "127.0.0.1"
    elif size > 1 and "MASTER_ADDR" not in environment:
        raise UserError(
            f"mpirun started {size} processes on several machines and does not tell where rank 0 "
            "is; give its host to all of them, with mpirun -x MASTER_ADDR=HOST"
        )
    return Launcher("Open MPI", size, variables)


def _slurm(environment: Mapping[str, str]) -> Launcher | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun starts a step.
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    size = _size_and_rank(environment, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    step = environment.get("SLURM_STEP_ID", "")
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_PORT": port_of(f"{environment.get('SLURM_JOB_ID', '')}.{step}"),
    }
    if "MASTER_ADDR" not in environment:
        variables["MASTER_ADDR"] = first_host(nodes)
    return Launcher("SLURM", size, variables)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as `rack[2-3]node[007,009-012],login`."""
    host, place = "", 0
    while place < len(nodes) and nodes[place] != ",":
        piece = _HOST_PIECE.match(nodes, place)
        if piece is None:
            break
        host += piece[1] or piece[2]
        place = piece.end()
    if not host or (place < len(nodes) and nodes[place] != ","):
        raise UserError(
            f"SLURM's node list {nodes!r} does not begin with a host that can be read; set "
            "MASTER_ADDR to the host of rank 0"
        )
    return host


def port_of(job: str) -> str:
    """A port that all ranks of a job agree on and other jobs of the machine hardly share."""
    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def _size_and_rank(environment: Mapping[str, str], size_name: str, rank_name: str) -> int:
    """The checked number of processes."""
    given = {name: environment.get(name) for name in (size_name, rank_name)}
    said = " and ".join(f"{name}={value}" for name, value in given.items())
    try:
        size, rank = (int(value or "") for value in given.values())
    except ValueError:
        raise UserError(
            f"a launcher's variables must be whole numbers, but {said}; unset both, or start "
            "through a launcher that sets both"
        ) from None
    if not 0 <= rank < size:
        raise UserError(f"a rank must be at least 0 and less than the number of ranks; {said}")
    return size
