"""Other launchers: joining the processes they started, and handing a run to torchrun.

Torch wants RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. torchrun sets them itself;
for SLURM's srun and Open MPI's mpirun they are derived here. A value that is already set is the
user's and stays. A run over several machines is handed to torchrun on each of them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fourfold.errors import UserError
from fourfold.signals import STACKS_SIGNAL, STOP_SIGNALS

if TYPE_CHECKING:
    from fourfold.launch.rounds import Machines

# Below the ports that Linux hands out on its own (32768 and up), above the well-known ones.
FIRST_PORT, PORTS = 12000, 20000

_HOST_PIECE = re.compile(r"([^\[\],\s]+)|\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")


@dataclass(frozen=True)
class Launcher:
    """What a launcher set for this process; `variables` are the ones torch reads."""

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


def refuse_inside_launcher(environment: MutableMapping[str, str], option: str) -> None:
    """`option` would start processes, which must not happen in each process of a launcher."""
    launcher = join_launcher(environment)
    if launcher is not None and launcher.world_size > 1:
        raise UserError(
            f"{option} would start processes inside each of the {launcher.world_size} that "
            f"{launcher.name} started; leave {option.split()[0]} out, or start a single process"
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
            f"mpirun started {size} processes on several machines and does not say where rank 0 "
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
    host, position = "", 0
    while position < len(nodes) and nodes[position] != ",":
        piece = _HOST_PIECE.match(nodes, position)
        if piece is None:
            break
        host += piece[1] or piece[2]
        position = piece.end()
    if not host or (position < len(nodes) and nodes[position] != ","):
        raise UserError(
            f"SLURM's node list {nodes!r} does not begin with a host that can be read; set "
            "MASTER_ADDR to the host of rank 0"
        )
    return host


def port_of(job: str) -> str:
    """A port that all ranks of a job agree on and other jobs on the machine are unlikely to use."""
    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def _size_and_rank(environment: Mapping[str, str], size_name: str, rank_name: str) -> int:
    """The checked number of processes."""
    values = {name: environment.get(name) for name in (size_name, rank_name)}
    settings = " and ".join(f"{name}={value}" for name, value in values.items())
    try:
        size, rank = (int(value or "") for value in values.values())
    except ValueError:
        raise UserError(
            f"a launcher's variables must be whole numbers, but {settings}; unset both, or start "
            "through a launcher that sets both"
        ) from None
    if not 0 <= rank < size:
        raise UserError(f"a rank must be at least 0 and less than the number of ranks; {settings}")
    return size


# -- several machines ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes:
    """Which of how many machines this is, and where the first one listens."""

    nnodes: int
    node_rank: int
    master: str

    def address(self) -> tuple[str, int]:
        """Host and port of `HOST:PORT`; an IPv6 address is in brackets."""
        host, colon, port = self.master.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        plain = host[1:-1] if bracketed else host
        good_host = plain and (bracketed or ":" not in plain) and not set(plain) & set("[]/ ")
        if not (colon and good_host and port.isascii() and port.isdigit()) or len(port) > 5:
            raise UserError(f"--master {self.master!r} is not HOST:PORT, such as node0:29500")
        if not 1 <= int(port) <= 65535:
            raise UserError(f"--master {self.master!r}: a port is a number from 1 to 65535")
        return plain, int(port)


_NUM_MACHINES = re.compile(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", re.ASCII)


def read_machines(nnodes: str, node_rank: int | None, master: str) -> Machines:
    """Those of `--nnodes N` or `--nnodes MIN:MAX`."""
    from fourfold.launch.rounds import Machines

    match = _NUM_MACHINES.fullmatch(nnodes)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UserError(
            f"--nnodes {nnodes!r} is not a number of machines, as in 4, nor the fewest and the "
            "most of them, as in 2:4"
        )
    fewest, most = int(match[1]), int(match[2] or match[1])
    if node_rank is not None and node_rank >= most:
        raise UserError(
            f"--node-rank {node_rank} does not exist among --nnodes {nnodes}; number the machines "
            f"from 0 to {most - 1}"
        )
    host, port = Nodes(most, node_rank or 0, master).address()
    return Machines(fewest, most, node_rank, host, port)


def torchrun_command(
    nodes: Nodes,
    nproc: int,
    max_restarts: int,
    log_dir: Path,
    command: list[str],
    program: Sequence[str] = ("-m", "fourfold"),
) -> list[str]:
    """Arguments that run `fourfold COMMAND` in `nproc` processes here, as one of the machines.

    `program` is run in place of `fourfold`: a script, or -m and a module. Each rank's output goes
    to a file below `log_dir`; rank 0's also to the console.
    """
    if not 0 <= nodes.node_rank < nodes.nnodes:
        raise UserError(
            f"--node-rank {nodes.node_rank} does not exist among --nnodes {nodes.nnodes}; "
            f"number the machines from 0 to {nodes.nnodes - 1}"
        )
    host, port = nodes.address()
    options = {
        "--nnodes": nodes.nnodes,
        "--node-rank": nodes.node_rank,
        "--nproc-per-node": nproc,
        "--master-addr": host,
        "--master-port": port,
        "--max-restarts": max_restarts,
        "--log-dir": log_dir / f"node_{nodes.node_rank}",
        "--signals-to-handle": ",".join(number.name for number in STOP_SIGNALS),
        "--redirects": "3",
        "--tee": "0:3",
    }
    if nodes.node_rank > 0:
        del options["--tee"]  # torchrun counts ranks of each machine here
    words = [word for name, value in options.items() for word in (name, str(value))]
    return [sys.executable, "-m", "torch.distributed.run", *words, *program, *command]


def become(command: list[str]) -> NoReturn:
    """Replace this process by torchrun."""
    # The signal that asks ranks for their stacks would end it.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    os.execv(command[0], command)
