"""What two machines say of a fault, under our launch and under torchrun's, and how they end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.machines import Command, Machines, children, wait_until
from cluster.training import Training

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Machines]:
    with Machines(2, tmp_path) as machines:
        yield machines


def started(machines: Machines, *options: str, step: int = 3) -> Training:
    run = Training(machines, "2", *options)
    run.start_all()
    run.reach(step)
    return run


def test_a_hang_is_named_with_its_host_and_all_stacks(pair: Machines) -> None:
    run = started(pair, "--hang-seconds", "8")
    (stopped,) = run.rank_pids(1)
    os.kill(stopped, signal.SIGSTOP)
    assert [command.wait() for command in run.commands.values()] == [1, 1]
    for command in run.commands.values():
        assert "rank 1 on node1 hangs; rank 0 waits in a collective" in command.output()
        assert "rank 1 on node1, at step" in command.output()
        assert "rank 0 on node0, at step" in command.output()


def test_a_stop_of_one_machine_is_saved_and_all_end_well(pair: Machines) -> None:
    run = started(pair, "--stopped-exit-code", "85")
    run.commands[1].send_signal(signal.SIGTERM)
    assert [command.wait() for command in run.commands.values()] == [85, 85]
    assert "the run is saved" in run.commands[0].output()
    assert "Traceback" not in run.said()
    assert (run.run / "latest").exists()
    logs = {path.relative_to(run.run / "logs") for path in run.run.rglob("rank_*.log")}
    assert logs == {Path(f"node{i}/attempt_0/rank_{i}.log") for i in (0, 1)}


def test_machines_that_disagree_are_named_before_the_first_step(pair: Machines) -> None:
    run = Training(pair, "2")
    run.start(0)
    run.start(1, "-o", "Optimizer.lr.max_lr=0.5")
    assert [command.wait() for command in run.commands.values()] == [2, 2]
    for command in run.commands.values():
        assert (
            "rank 1 on node1 disagrees with rank 0 on node0: Optimizer.lr.max_lr is 0.5 there"
            in (command.output())
        )


def test_a_lost_machine_is_named_by_the_other(pair: Machines) -> None:
    run = started(pair, "--lost-seconds", "6")
    pair.power_off(1)
    assert run.commands[0].wait() == 1
    assert "node1 (rank 1) has not been heard of for" in run.commands[0].output()
    assert "last at step" in run.commands[0].output()


def test_the_meeting_place_is_named_when_it_is_lost(pair: Machines) -> None:
    run = started(pair, "--lost-seconds", "6")
    pair.power_off(0)
    assert run.commands[1].wait() == 1
    said = run.commands[1].output()
    assert "node0:29500, where the machines meet, has been silent for 6 s" in said


def by_torchrun(machines: Machines, run: Training) -> list[Command]:
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "node0"]
    train = ["-m", "fourfold", "train", "-c", str(run.file)]
    words = [*TORCHRUN, *place, "--master-port", "29400"]
    return [machines.start(i, [*words, "--node-rank", str(i), *train]) for i in (0, 1)]


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_of_torchrun_name_a_machine_that_is_lost(lost: int, pair: Machines) -> None:
    run = Training(pair, "2")
    commands = by_torchrun(pair, run)
    run.reach(3)
    pair.power_off(lost)
    other = commands[1 - lost]
    other.wait()
    gone = (
        "rank 1 on node1 has not been heard of" if lost else "where the ranks met, does not answer"
    )
    assert gone in other.output()


def test_ranks_of_torchrun_name_a_rank_that_died(pair: Machines) -> None:
    run = Training(pair, "2")
    commands = by_torchrun(pair, run)
    run.reach(3)
    wait_until(lambda: children(commands[1].pid), 10)
    os.kill(children(commands[1].pid)[0], signal.SIGKILL)
    commands[0].wait()
    assert "rank 1 on node1 has not been heard of" in commands[0].output()
