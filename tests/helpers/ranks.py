"""Several ranks in one test: forked from the warm test process, so they start at once."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

import fourfold.parallel.fsdp

# Imported once here instead of by every forked rank.
import fourfold.parallel.pipeline
import fourfold.parallel.tensor  # noqa: F401

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[int], T], seconds: float = 300.0) -> list[T]:
    """What `work(rank)` returns on each of `size` processes; fails if any of them does."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sys.stdout.flush()
        sys.stderr.flush()
        children = [_start(rank, size, work, place) for rank in range(size)]
        failed = _wait(children, time.monotonic() + seconds)
        if failed:
            errors = [place / f"error_{rank}" for rank in failed]
            said = "\n".join(path.read_text() for path in errors if path.exists())
            raise AssertionError(f"ranks {failed} of {size} failed or hung\n{said}")
        results = [place / f"result_{rank}" for rank in range(size)]
        return [pickle.loads(path.read_bytes()) for path in results]  # noqa: S301  our own bytes


def _start(rank: int, size: int, work: Callable[[int], object], place: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ["FOURFOLD_STORE"] = str(place / "store")
        (place / f"result_{rank}").write_bytes(pickle.dumps(work(rank)))
        status = 0
    except BaseException:
        (place / f"error_{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(status)


def _wait(children: list[int], deadline: float) -> list[int]:
    """Wait for all; those that failed. Past the deadline, or once one failed, none is left."""
    running, failed = dict(enumerate(children)), []
    while running:
        for rank, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[rank]
                if status != 0:
                    failed.append(rank)
        if running and (time.monotonic() > deadline or failed):
            # Give the others a moment to say what they saw.
            time.sleep(0.5)
            for rank, pid in running.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                failed.append(rank)
            break
        time.sleep(0.005)
    return failed
