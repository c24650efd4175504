"""Several machines: the command that hands a run to torchrun on each of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fourfold.errors import UserError
from fourfold.signals import STACKS_SIGNAL, STOP_SIGNALS


@dataclass(frozen=True)
class Nodes:
    """Which of how many machines this is, and where the first one listens."""

    nnodes: int
    node_rank: int
    master: str

    def address(self) -> tuple[str, int]:
        """Host and port of `HOST:PORT`; an IPv6 address stands in brackets."""
        host, colon, port = self.master.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        plain = host[1:-1] if bracketed else host
        good_host = plain and (bracketed or ":" not in plain) and not set(plain) & set("[]/ ")
        if not (colon and good_host and port.isascii() and port.isdigit()) or len(port) > 5:
            raise UserError(f"--master {self.master!r} is not HOST:PORT, such as node0:29500")
        if not 1 <= int(port) <= 65535:
            raise UserError(f"--master {self.master!r}: a port is a number from 1 to 65535")
        return plain, int(port)


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
    """Go on as torchrun. It would end at a signal that asks its ranks for their stacks."""
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    os.execv(command[0], command)
