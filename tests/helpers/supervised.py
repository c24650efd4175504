"""Runs of `supervise` with small works, and a look at what they leave behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.launch.supervisor import supervise
from fourfold.signals import answer_with_stacks


@dataclass
class Console:
    """What a supervised run showed: rank 0's lines, and the supervisor's own."""

    code: int = -1
    shown: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        return "\n".join(self.told)


def run(work: Callable[[], None], nproc: int, log_dir: Path, **options: float) -> Console:
    """Supervise `work` from this process; none of its processes may be left after it."""
    console, before = Console(), children()
    answer_with_stacks()  # as the command does before it supervises
    console.code = supervise(
        work, nproc, log_dir, echo=console.shown.append, tell=console.told.append, **options
    )
    assert children() <= before
    return console


def start_supervisor(work: Callable[[], None], nproc: int, log_dir: Path, **options: float) -> int:
    """A supervisor in a process of its own, to be sent signals; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 99
        answer_with_stacks()
        try:
            with (log_dir / "told").open("w", buffering=1) as told:
                code = supervise(
                    work,
                    nproc,
                    log_dir,
                    max_restarts=3,
                    grace_seconds=0.5,
                    echo=lambda line: None,
                    tell=lambda line: print(line, file=told),
                    **options,
                )
        finally:
            os._exit(code)
    return pid


def exit_status(pid: int) -> int:
    """How a supervisor ended; one that does not end is killed."""
    if not eventually(lambda: is_gone(pid), 60.0):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def children() -> set[int]:
    """The children of this process, zombies included; other tests may have left some."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    return {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()}


def is_gone(pid: int) -> bool:
    """Ended; what init has not yet collected counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def rank() -> int:
    return int(os.environ["RANK"])


def attempt() -> int:
    return int(os.environ["FOURFOLD_ATTEMPT"])


def meet(timeout_seconds: float = 30.0) -> None:
    """Join the other ranks over gloo."""
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.environ["FOURFOLD_STORE"], size),
        rank=rank(),
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def add_up() -> float:
    """A collective: one from every rank."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)
