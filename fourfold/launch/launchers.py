"""Other launchers: joining the processes they started, and handing a run to torchrun.

Torch wants RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A launcher that starts every
process (srun, mpirun, torchrun itself) is joined: what torch wants is derived from its variables,
and a value that is already set is the user's and stays. A scheduler that starts one process on
each machine (Kubernetes, Kubeflow, SkyPilot) leaves the others to us: its variables say how many
machines there are, which of them this is and where the first one listens. A run over several
machines is handed to torchrun on each of them.

What announces other machines and does not say how to join them is refused: nothing trains alone
where more was asked for.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fourfold.errors import UserError
from fourfold.launch.scheduled import (
    MachineStart,
    host_and_port,
    is_pod,
    pod,
    port_of,
    size_and_rank,
    skypilot,
    whole_number,
)
from fourfold.signals import STACKS_SIGNAL, STOP_SIGNALS

if TYPE_CHECKING:
    from fourfold.launch.rounds import Machines

_HOST_PIECE = re.compile(r"([^\[\],\s]+)|\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")


@dataclass(frozen=True)
class Launcher:
    """Started every process; `variables` are the ones torch reads, for this one.

    `is_one_per_machine` where there is one process on each of several machines, which may then
    start the others of its machine.
    """

    name: str
    world_size: int
    variables: dict[str, str] = field(default_factory=dict)
    is_one_per_machine: bool = False


def join_launcher(environment: MutableMapping[str, str]) -> Launcher | None:
    """Set the variables torch reads from a launcher's own; None if no launcher started us."""
    found = started_by(environment)
    if isinstance(found, MachineStart):
        _refuse_to_be_alone(found)
    if not isinstance(found, Launcher):
        _refuse_batch_script(environment)
        return None
    environment.update(_joined(found, environment))
    return found


def _joined(found: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """What torch reads. What is set already is the user's, but no rank of its own."""
    for name in ("RANK", "WORLD_SIZE"):
        value = found.variables.get(name)
        if value is not None and environment.get(name, value) != value:
            raise UserError(
                f"{found.name} says {name}={value} and the environment has "
                f"{name}={environment[name]!r}; unset RANK and WORLD_SIZE"
            )
    return {name: environment.get(name, value) for name, value in found.variables.items()}


def started_by(environment: Mapping[str, str]) -> Launcher | MachineStart | None:
    """Who started this process; None: somebody at a shell. Nothing is set."""
    found = next((found for read in CONVENTIONS if (found := read(environment))), None)
    if isinstance(found, MachineStart) and found.most == 1 and (other := skypilot(environment)):
        raise UserError(
            f"{other.name} started {other.most} machines, and the PET_ variables say that this is "
            "the only one; unset those, or SKYPILOT_NUM_NODES to use one machine"
        )
    return found


def machines_to_start(environment: Mapping[str, str], nproc: int | None) -> MachineStart | None:
    """The machines of a run of `nproc` processes each, where this process is the only one of its
    machine; None where there is no other machine, or every process was started already."""
    found = started_by(environment)
    if isinstance(found, Launcher) and found.is_one_per_machine and nproc is not None:
        known = {**environment, **_joined(found, environment)}
        master = host_and_port(known["MASTER_ADDR"], known["MASTER_PORT"])
        return MachineStart(found.name, str(found.world_size), int(known["RANK"]), master, nproc)
    return found if isinstance(found, MachineStart) else None


def refuse_inside_launcher(
    environment: MutableMapping[str, str], option: str, *, on_every_machine: bool = False
) -> None:
    """`option` would start processes, which must not happen in each process of a launcher, nor on
    one of several machines, unless it is given `on_every_machine`."""
    found = started_by(environment)
    if isinstance(found, Launcher) and found.world_size > 1:
        if on_every_machine and found.is_one_per_machine:
            return
        raise UserError(
            f"{option} would start processes inside each of the {found.world_size} that "
            f"{found.name} started; leave {option.split()[0]} out, or start a single process"
        )
    if on_every_machine:
        return
    if isinstance(found, MachineStart) and found.most > 1:
        _refuse_to_be_alone(found)
    _refuse_batch_script(environment)


def _refuse_to_be_alone(found: MachineStart) -> None:
    """For verbs other than train, which start nothing on other machines."""
    nnodes, nproc = found.most, found.nproc or 1
    if nnodes > 1:
        raise UserError(
            f"{found.name} started {nnodes} machines, and this command starts processes on none of "
            "the others; start it through torchrun on each of them (torchrun ... -m fourfold ...), "
            "or on one machine"
        )
    if nproc > 1:
        raise UserError(
            f"{found.name} asks for {nproc} processes on this machine; start them with --nproc "
            f"{nproc} or through torchrun, or unset PET_NPROC_PER_NODE"
        )


def _refuse_batch_script(environment: Mapping[str, str]) -> None:
    """A SLURM allocation of several machines, on the first of which a script or a shell runs."""
    if "SLURM_JOB_ID" not in environment or "SLURM_STEP_NUM_TASKS" in environment:
        return
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES", "1")
    if nodes != "1" and "RANK" not in environment:
        raise UserError(
            f"SLURM allocated {nodes} machines, and nothing starts processes on the others; write "
            "srun before the command, or srun --nodes=1 --ntasks=1 to use one machine"
        )


# -- launchers that start every process -----------------------------------------------------------


def _torchrun(environment: Mapping[str, str]) -> Launcher | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if not (is_torchrun or "LOCAL_RANK" in environment) and is_pod(environment):
        return None  # PyTorchJob's RANK is the pod's
    size = size_and_rank(environment, "WORLD_SIZE", "RANK")
    return Launcher("torchrun" if is_torchrun else "RANK and WORLD_SIZE", size)


def _open_mpi(environment: Mapping[str, str]) -> Launcher | None:
    prefix = "OMPI_COMM_WORLD_"
    if f"{prefix}RANK" not in environment:
        return None
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    names = [f"{prefix}{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    return _mpi(environment, "Open MPI", "mpirun -x MASTER_ADDR=HOST", names, job)


def _mpich(environment: Mapping[str, str]) -> Launcher | None:
    """MPICH's and Intel's mpiexec. In a SLURM allocation its proxies are srun's tasks, so it comes
    before SLURM; srun --mpi=pmi2 sets PMI_RANK too, but not the local rank."""
    if "PMI_RANK" not in environment or "MPI_LOCALRANKID" not in environment:
        return None
    names = ["PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"]
    # It has no name for a job; on one machine all processes have one proxy.
    proxy = _ancestor("hydra_pmi_proxy") if "MASTER_ADDR" not in environment else ""
    job = f"{environment.get('MASTER_ADDR', '')}/{proxy}"
    return _mpi(environment, "MPICH", "mpiexec -genv MASTER_ADDR HOST", names, job)


def _mpi(
    environment: Mapping[str, str], name: str, remedy: str, names: Sequence[str], job: str
) -> Launcher:
    """`names` are its words for WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and LOCAL_RANK."""
    size_name, rank_name, local_size_name, local_rank_name = names
    size = size_and_rank(environment, size_name, rank_name)
    local_rank = environment.get(local_rank_name, "0")
    variables = {
        "RANK": environment[rank_name],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(whole_number(local_rank_name, local_rank)),
        "MASTER_PORT": port_of(job),
    }
    local_size = environment.get(local_size_name)
    if local_size == str(size):
        variables["MASTER_ADDR"] = "127.0.0.1"
    elif size > 1 and "MASTER_ADDR" not in environment:
        raise UserError(
            f"{remedy.split()[0]} started {size} processes on several machines and does not say "
            f"where rank 0 is; give its host to all of them, with {remedy}"
        )
    return Launcher(name, size, variables, size > 1 and local_size == "1")


def _slurm(environment: Mapping[str, str]) -> Launcher | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun starts a step.
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    size = size_and_rank(environment, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    step = environment.get("SLURM_STEP_ID", "")
    local_rank = environment.get("SLURM_LOCALID", "0")
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(whole_number("SLURM_LOCALID", local_rank)),
        "MASTER_PORT": port_of(f"{environment.get('SLURM_JOB_ID', '')}.{step}"),
    }
    if "MASTER_ADDR" not in environment:
        variables["MASTER_ADDR"] = first_host(nodes)
    alone = size > 1 and environment.get("SLURM_STEP_NUM_NODES") == str(size)
    return Launcher("SLURM", size, variables, alone)


def _other_pmi(environment: Mapping[str, str]) -> Launcher | None:
    """A process manager that sets nothing but PMI's rank and size, and so no place of rank 0."""
    if "PMI_RANK" not in environment:
        return None
    size = size_and_rank(environment, "PMI_SIZE", "PMI_RANK")
    missing = [name for name in ("MASTER_ADDR", "LOCAL_RANK") if name not in environment]
    if size > 1 and missing:
        raise UserError(
            f"PMI_SIZE={size} processes were started and {' and '.join(missing)} not set; give "
            "each process the host of rank 0 and its own number on its machine"
        )
    variables = {"RANK": environment["PMI_RANK"], "WORLD_SIZE": str(size)}
    job = environment.get("MASTER_ADDR", "")
    return Launcher("PMI", size, {**variables, "MASTER_PORT": port_of(job)})


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


def _ancestor(name: str) -> str:
    """The process of that name that this one descends from; empty where there is none, or no
    /proc."""
    pid = os.getppid()
    try:
        while pid > 1:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            if f"({name})" in status:
                return str(pid)
            pid = int(status.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return ""


# In this order: torchrun's processes inherit what the scheduler set, mpirun's what srun did.
CONVENTIONS: tuple[Callable[[Mapping[str, str]], Launcher | MachineStart | None], ...] = (
    _torchrun,
    _open_mpi,
    _mpich,
    _slurm,
    _other_pmi,
    pod,
    skypilot,
)


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
    # By itself it kills ranks that need longer than 30 seconds for the save of a stop.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    # The signal that asks ranks for their stacks would end it.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    os.execv(command[0], command)
