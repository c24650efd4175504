"""A rank that stops making progress: noticed, named, its stack shown, everything ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.supervised import add_up, attempt, meet, rank, run

from fourfold.heartbeat import beat


def sleep_forever() -> None:
    time.sleep(1000)


def test_the_rank_that_keeps_the_others_is_named(tmp_path: Path) -> None:
    def work() -> None:
        meet()
        beat(7, "reader")
        if rank() == 1 and attempt() == 0:
            sleep_forever()
        dist.barrier()

    console = run(work, 3, tmp_path, hang_seconds=1.5, max_restarts=1)
    assert console.code == 0
    assert console.told[0] == "fourfold: no rank has made progress for 1.5 s"
    assert console.told[1] == "fourfold: rank 1 hangs; ranks 0 and 2 wait in a collective"
    assert console.told[2].startswith("    rank 1, at step 7 (reader): sleep_forever (launch/")
    assert "barrier (distributed/distributed_c10d.py" in console.told[3]
    assert f"in the logs in {tmp_path / 'attempt_0'}" in console.said
    assert "in sleep_forever" in (tmp_path / "attempt_0" / "rank_1.log").read_text()
    assert not console.shown, "rank 0's stacks stay in its log"


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    def work() -> None:
        meet()
        beat(3, "optimizer")
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        add_up()

    console = run(work, 2, tmp_path, hang_seconds=1.5)
    assert console.code == 1
    assert "rank 0 hangs; rank 1 waits in a collective" in console.said
    assert "rank 0, at step 3 (optimizer): stopped by a signal" in console.said


def test_ranks_that_gave_up_waiting_are_not_to_blame(tmp_path: Path) -> None:
    """The collective's own timeout may come first; then only the waiting ranks have failed."""

    def work() -> None:
        meet(timeout_seconds=1.0)
        beat(1, "save")
        if rank() == 2:
            sleep_forever()
        add_up()

    console = run(work, 3, tmp_path, grace_seconds=0.5)
    assert console.code == 1
    assert "gave up waiting at step 1 (save)" in console.told[0]
    assert console.told[1] == "fourfold: rank 2 hangs"
    assert "sleep_forever" in console.told[2]


def test_waiting_for_an_operation_begun_earlier_is_waiting(tmp_path: Path) -> None:
    def work() -> None:
        meet()
        if rank() == 1:
            beat(4, "evaluate")
            sleep_forever()
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        assert pending is not None
        pending.wait()

    console = run(work, 2, tmp_path, hang_seconds=1.5)
    assert console.told[1] == "fourfold: rank 1 hangs; rank 0 waits in a collective"


def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    def work() -> None:
        meet()
        beat(1 + rank(), "evaluate")
        dist.recv(torch.zeros(1), src=1 - rank())

    console = run(work, 2, tmp_path, hang_seconds=1.5)
    assert console.code == 1
    assert "all ranks wait for each other; rank 0 is furthest behind" in console.said


def test_a_rank_that_hangs_after_the_others_have_left(tmp_path: Path) -> None:
    console = run(lambda: sleep_forever() if rank() else None, 2, tmp_path, hang_seconds=0.3)
    assert console.code == 1
    assert "fourfold: rank 1 hangs" in console.told


def test_beats_keep_a_run_alive(tmp_path: Path) -> None:
    def work() -> None:
        for step in range(12):
            beat(step, "forward_backward")
            time.sleep(0.1)

    assert run(work, 1, tmp_path, hang_seconds=0.8).code == 0
