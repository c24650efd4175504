"""Ranks of torchrun or srun, without a supervisor of ours: they still say whose fault it was."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.tiny_run import exit_status, start_child

from fourfold import heartbeat
from fourfold.errors import RunError
from fourfold.launch.unsupervised import speaking_for
from fourfold.meeting import open_store

HOST = socket.gethostname()
SIZE = 3


def on_launched_ranks(work: Callable[[int], None], place: Path) -> list[str]:
    """What each rank's error was in the end; "" for one that was killed or succeeded."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            with speaking_for(rank, SIZE, 20.0):
                store = open_store(rank, SIZE, 20.0)
                wait = timedelta(seconds=6)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=SIZE, timeout=wait
                )
                heartbeat.beat(5, "forward_backward")
                work(rank)
        except (RunError, ValueError) as error:
            (place / f"said_{rank}").write_text(f"{type(error).__name__}: {error}")

    pids = [start_child(lambda rank=rank: run(rank)) for rank in range(SIZE)]
    for pid in pids:
        exit_status(pid)
    files = [place / f"said_{rank}" for rank in range(SIZE)]
    return [file.read_text() if file.exists() else "" for file in files]


def wait_for_the_others() -> None:
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_rank_that_failed_is_named_by_all(culprit: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == culprit:
            raise ValueError("out of luck")
        wait_for_the_others()

    said = on_launched_ranks(work, tmp_path)
    assert said.pop(culprit) == "ValueError: out of luck"
    for text in said:
        named = f"RunError: rank {culprit} on {HOST} failed at step 5 (forward_backward)"
        assert text.startswith(named), text
        assert "ValueError: out of luck" in text and "noticed at step 5" in text


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            time.sleep(2)  # so that it has said where it is
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_the_others()

    first, _, last = on_launched_ranks(work, tmp_path)
    assert f"rank 1 on {HOST} has not been heard of" in first
    assert "last at step 5 (forward_backward)" in last


@pytest.mark.slow
def test_a_rank_the_others_wait_for_is_named_with_its_stack(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            sleeps_too_long()
        wait_for_the_others()

    first, _, last = on_launched_ranks(work, tmp_path)
    assert f"rank 1 on {HOST} hangs" in first and "sleeps_too_long" in first
    assert f"rank 1 on {HOST} hangs" in last


def sleeps_too_long() -> None:
    time.sleep(30)
