"""Schedulers that start one process on each machine: Kubeflow, Kubernetes's Jobs, SkyPilot.

Their variables say how many machines there are, which of them this is and where the first one
listens; the processes of each machine are ours to start. Nothing is set here.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context

from fourfold.errors import UserError
from fourfold.processors import num_processors

# Below the ports that Linux hands out on its own (32768 and up), above the well-known ones.
FIRST_PORT, PORTS = 12000, 20000
TORCHRUN_PORT = "29500"  # torchrun's own, and that of Kubeflow's runtimes


@dataclass(frozen=True)
class MachineStart:
    """Who started one process on each machine, and where this one is among them.

    `nnodes` is as of `--nnodes`: a number, or the fewest and the most. `nproc` is how many
    processes a machine is to start, None where that is not said.
    """

    name: str
    nnodes: str = "1"
    node_rank: int | None = 0
    master: str = ""
    nproc: int | None = None

    @property
    def most(self) -> int:
        return int(self.nnodes.rpartition(":")[2])


_POD = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "JOB_COMPLETION_INDEX")


def is_pod(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in _POD)


def pod(environment: Mapping[str, str]) -> MachineStart | None:
    """Kubeflow's TrainJob and PyTorchJob, which set torchrun's options as PET_*; Kubernetes's
    indexed Jobs and JobSets, which set an index and leave the rest to the job file."""
    if not is_pod(environment):
        return None
    index = environment.get("JOB_COMPLETION_INDEX")
    name = "an indexed Job" if "PET_NODE_RANK" not in environment and index else "Kubeflow"
    nproc = _processes_of_pod(environment.get("PET_NPROC_PER_NODE"))
    rank_name = next(
        (name for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK") if name in environment),
        "PET_NODE_RANK",
    )
    rank = environment.get(rank_name)
    if "PET_NNODES" not in environment and (index is not None or rank not in (None, "0")):
        raise UserError(
            f"{rank_name}={rank} is one of several pods, and nothing says of how many; set "
            "PET_NNODES to the number of pods that train together (1 where each trains by itself)"
        )
    nnodes, most = _num_nodes(environment.get("PET_NNODES", "1"))
    if most == 1:
        return MachineStart(name, nproc=nproc)
    if rank is None and nnodes == str(most):
        raise UserError(
            f"PET_NNODES={nnodes} and nothing says which of them this is; set PET_NODE_RANK"
        )
    node_rank = None if rank is None else whole_number(rank_name, rank)
    if node_rank is not None and node_rank >= most:
        raise UserError(
            f"{rank_name}={node_rank} does not exist among PET_NNODES={nnodes}; number the pods "
            f"from 0 to {most - 1}"
        )
    return MachineStart(name, nnodes, node_rank, _first_of_pods(environment, nnodes), nproc)


def _first_of_pods(environment: Mapping[str, str], nnodes: str) -> str:
    """Host and port of the first pod."""
    host = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR")
    if not host and (endpoint := environment.get("PET_RDZV_ENDPOINT")):
        return endpoint if ":" in endpoint else f"{endpoint}:{TORCHRUN_PORT}"
    if not host and (index := environment.get("JOB_COMPLETION_INDEX")) is not None:
        host = first_pod(socket.getfqdn(), index)
    if not host:
        raise UserError(
            f"PET_NNODES={nnodes} and nothing says where the first of them is; set PET_MASTER_ADDR "
            "to its host name (for an indexed Job: JOB-0.SERVICE of a headless service)"
        )
    port = environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT") or TORCHRUN_PORT
    return host_and_port(host, port)


def first_pod(host: str, index: str) -> str | None:
    """The host name of the first pod of an indexed Job, from that of the pod `index`; None where
    the pods have no headless service, and so no names that others can look up."""
    pod, _, service = host.partition(".")
    job = pod.removesuffix(f"-{index}")
    return f"{job}-0.{service}" if service and job != pod else None


def skypilot(environment: Mapping[str, str]) -> MachineStart | None:
    if environment.get("SKYPILOT_NUM_NODES", "1") == "1":
        return None
    nnodes = size_and_rank(environment, "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")
    if nnodes == 1:
        return None
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if len(addresses) != nnodes:
        raise UserError(
            f"SKYPILOT_NUM_NODES={nnodes} and SKYPILOT_NODE_IPS has {len(addresses)} addresses; "
            "leave both as SkyPilot set them, or unset SKYPILOT_NUM_NODES to use one machine"
        )
    gpus = environment.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    nproc = whole_number("SKYPILOT_NUM_GPUS_PER_NODE", gpus)
    # The name is one for all machines, and another for each job on them.
    master = host_and_port(addresses[0], port_of(environment.get("SKYPILOT_TASK_ID", "")))
    node_rank = int(environment["SKYPILOT_NODE_RANK"])
    return MachineStart("SkyPilot", str(nnodes), node_rank, master, nproc or None)


def _num_nodes(text: str) -> tuple[str, int]:
    """As `--nnodes` takes it, and the most there may be."""
    ends = [whole_number("PET_NNODES", end) for end in text.split(":")]
    if len(ends) > 2 or ends[0] == 0 or ends[-1] < ends[0]:
        raise UserError(
            f"PET_NNODES={text!r} is not a number of machines, as in 4, nor the fewest and the "
            "most of them, as in 2:4"
        )
    return ":".join(map(str, dict.fromkeys(ends))), ends[-1]


def _processes_of_pod(text: str | None) -> int | None:
    """torchrun's --nproc-per-node: a number, or what to count. Its `auto` without a GPU is a
    process for each core, of which a GPT has no use: ours is one."""
    if not text:
        return None
    if text in ("auto", "gpu"):
        return num_gpus() or 1
    if text == "cpu":
        return num_processors()
    nproc = whole_number("PET_NPROC_PER_NODE", text)
    if nproc == 0:
        raise UserError("PET_NPROC_PER_NODE=0: a machine needs at least one process")
    return nproc


@cache
def num_gpus() -> int:
    """Counted in a separate process: one that has initialised CUDA must not fork ranks."""
    import torch

    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as aside:
        return aside.submit(torch.cuda.device_count).result()


# -- what all launchers' variables are read by ----------------------------------------------------


def port_of(job: str) -> str:
    """A port that all ranks of a job agree on and other jobs on the machine are unlikely to use."""
    return str(FIRST_PORT + zlib.crc32(job.encode(errors="surrogateescape")) % PORTS)


def whole_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(
            f"{name}={text!r} is not a whole number; unset it, or leave it as the launcher set it"
        )
    return int(text)


def host_and_port(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def size_and_rank(environment: Mapping[str, str], size_name: str, rank_name: str) -> int:
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
