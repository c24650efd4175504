"""A machine is lost with everything in its memory: the run goes on from the step it had come to.

Every machine has a /dev/shm of its own here (`Machines`), which goes with it. The measured times
are printed (`pytest -s`).
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from cluster.machines import Machines, wait_until
from cluster.training import Training

COPIES = ("-o", "Engine.save_load.memory_copy_steps=1")
RARELY = ("-o", "Engine.save_load.save_steps=1000")
LOST = ("--lost-seconds", "6", "--max-restarts", "20")
# A plan may choose other micro-batches, by which dropout is drawn.
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture
def trio(tmp_path: Path) -> Machines:
    with Machines(3, tmp_path) as machines:
        yield machines


def resumed_steps(run: Training) -> list[int]:
    """The steps of copies in memory that rounds began from, as rank 0's machine said."""
    text = "\n".join(command.output() for command in [*run.earlier, *run.commands.values()])
    return [int(step) for step in re.findall(r"resumed from copies in memory at step (\d+)", text)]


def lose(run: Training, machine: int, choose: random.Random) -> int:
    """Power off a machine after a few steps; the last step that was in the log before."""
    run.reach(run.step() + choose.randrange(3, 9))
    before, since, at = run.seen_rounds(), time.time(), run.step()
    run.machines.power_off(machine, cut_first=choose.random() < 0.5)
    seconds = run.goes_on(before, since)
    print(f"node{machine} lost at step {at}: going on {seconds:.1f} s later", flush=True)
    return at


def left_in_memory(machines: Machines, machine: int) -> str:
    return machines.check(machine, ["find", "/dev/shm", "-name", "fourfold-*"])


@pytest.mark.parametrize("auto", [False, True], ids=["fixed", "auto"])
def test_losing_a_machine_loses_no_step(trio: Machines, auto: bool) -> None:
    """No checkpoint is ever written before the end: all rounds begin from memory."""
    layout = ["--auto"] if auto else []
    run = Training(trio, "2:3", *layout, *LOST, *COPIES, *RARELY, model=STILL)
    run.start_all()
    choose = random.Random(3)
    wait_until(lambda: run.world_size() == 3, 120, run.said)
    at = lose(run, 2, choose)
    wait_until(lambda: run.world_size() == 2, 120, run.said)
    run.reach(at + 3)
    steps = resumed_steps(run)
    # The step in the log last may not have been copied everywhere when the machine went.
    assert steps and steps[0] >= at - 1, (at, steps, run.said())
    trio.boot(2)
    run.start(2)
    wait_until(lambda: run.world_size() == 3, 120, run.said)  # saved to the disk to take it in
    at = lose(run, 1, choose)
    run.reach(at + 3)
    steps = resumed_steps(run)
    assert steps[-1] >= at - 1, (at, steps, run.said())
    assert set(run_codes(run, lost=1)) == {0}, run.said()
    compared, largest = run.compare()
    print(f"{compared} steps; largest difference of a loss {largest:.1e}")
    print(*re.findall(r".*copies in memory, .* on average.*", run.commands[0].output()), sep="\n")
    for machine in (0, 2):
        assert not left_in_memory(trio, machine), "removed at the end of the run"


def run_codes(run: Training, lost: int) -> list[int]:
    del run.commands[lost]
    return [*run.stop_all().values()]


def test_two_machines_at_once_cost_the_steps_since_the_checkpoint(trio: Machines) -> None:
    """One neighbour may be lost, not two that follow each other: then the disk is used."""
    run = Training(trio, "1:3", *LOST, *COPIES, "-o", "Engine.save_load.save_steps=10")
    run.start_all()
    wait_until(lambda: run.world_size() == 3, 120, run.said)
    run.reach(13)
    before, since = run.seen_rounds(), time.time()
    trio.power_off(1)
    trio.power_off(2)
    print(f"going on {run.goes_on(before, since):.1f} s later")
    run.reach(16)
    output = run.commands[0].output()
    assert "in memory cannot be used: it is incomplete, nothing is left of rank 1" in output
    assert not resumed_steps(run)
    for machine in (1, 2):
        del run.commands[machine]
    assert set(run.stop_all().values()) == {0}, run.said()
    run.compare()


def test_too_little_shared_memory_is_refused_before_the_first_step(trio: Machines) -> None:
    trio.check(1, ["mount", "-o", "remount,size=64k", "/dev/shm"])
    run = Training(trio, "3", *COPIES)
    run.start_all()
    codes = {machine: command.wait() for machine, command in run.commands.items()}
    assert set(codes.values()) == {2}, run.said()
    assert "memory_copy_steps=1 takes" in run.said() and "on node1" in run.said(), run.said()
    assert not run.records()
