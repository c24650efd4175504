"""Faults of machines and networks: each is named, the run goes on, and its numbers do not show it.

`FAULTS` faults, chosen by `FAULTS_SEED`, hit a run over `FAULTS_MACHINES` machines one after the
other; `chaos.py` has their kinds. In the end its losses and the samples it was trained on are those
of one process that nothing happened to.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest
from cluster.chaos import LOST_SECONDS, Chaos, bad_disk, checkpoints
from cluster.machines import Machines, wait_until, why_not
from cluster.training import Training

FAULTS = int(os.environ.get("FAULTS", "10"))
SEED = int(os.environ.get("FAULTS_SEED", "1"))
MACHINES = int(os.environ.get("FAULTS_MACHINES", "3"))


@pytest.fixture
def trio(tmp_path: Path) -> Machines:
    with Machines(3, tmp_path) as machines:
        yield machines


def needs(*programs: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(why_not(*programs)), reason=str(why_not(*programs)))


@needs("ethtool", "cc")
def test_random_faults_leave_no_trace(tmp_path: Path) -> None:
    with Machines(MACHINES, tmp_path) as machines:
        leave_no_trace(machines)


def leave_no_trace(machines: Machines) -> None:
    options = ("--max-restarts", "20", "--lost-seconds", str(LOST_SECONDS))
    run = Training(machines, f"2:{MACHINES}", *options, preload=bad_disk(machines.directory))
    run.start_all()
    chaos = Chaos(run, random.Random(SEED))
    print(f"\n{FAULTS} faults of seed {SEED} on {MACHINES} machines")
    try:
        for number, kind in enumerate(chaos.chosen(FAULTS)):
            print(f"{number}: {chaos.happen(kind)}", flush=True)
        chaos.settle()
        run.reach(run.step() + 5)
    finally:
        print(chaos.table())
    codes = run.stop_all()
    assert set(codes.values()) == {0}, run.said()
    steps, largest = run.compare()
    verify(run)
    print(f"{steps} steps; largest difference of a loss {largest:.1e}")


def verify(run: Training) -> None:
    """Every checkpoint is whole."""
    for step in checkpoints(run):
        path = run.run / f"step_{step}"
        words = [sys.executable, "-m", "fourfold", "checkpoint", "verify", path]
        run.machines.check(0, words)


def test_a_layout_that_heals(trio: Machines) -> None:
    """With `--auto` the layout is planned again for two, and for three when one comes back. A plan
    may choose other micro-batches, by which dropout is drawn."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    run = Training(trio, "2:3", "--auto", "--lost-seconds", str(LOST_SECONDS), model=still)
    run.start_all()
    wait_until(lambda: run.world_size() == 3, 120, run.said)
    run.reach(12)
    trio.power_off(2)
    wait_until(lambda: run.world_size() == 2, 120, run.said)
    run.reach(run.step() + 3)
    assert "legal layouts of 2 process(es)" in run.commands[0].output()
    trio.boot(2)
    run.start(2)
    wait_until(lambda: run.world_size() == 3, 120, run.said)
    run.reach(run.step() + 3)
    assert "1 more machine waits to join" in run.commands[0].output()
    assert set(run.stop_all().values()) == {0}, run.said()
    run.compare()


@needs("nft")
def test_a_network_cut_in_the_middle(tmp_path: Path) -> None:
    """Two and two: those with the meeting place go on, the others end their ranks and say why;
    mended, they are one run again, and nothing was written twice."""
    with Machines(4, tmp_path) as machines:
        options = ("--max-restarts", "20", "--lost-seconds", str(LOST_SECONDS))
        run = Training(machines, "2:4", *options)
        run.start_all()
        wait_until(lambda: run.world_size() == 4, 120, run.said)
        run.reach(12)
        before, began = run.seen_rounds(), time.time()
        cut_in_the_middle(machines, tmp_path)
        print(f"\ngoing on {run.goes_on(before, began):.1f} s after the cut")
        wait_until(lambda: run.world_size() == 2, 60, run.said)
        for cut_off in (2, 3):
            run.commands[cut_off].until("node0:29500, where the machines meet")
            assert not run.rank_pids(cut_off), "no rank is left on the other side"
        time.sleep(LOST_SECONDS)
        machines._in_switch("nft delete table bridge middle")
        wait_until(lambda: run.world_size() == 4, 120, run.said)
        run.reach(run.step() + 5)
        assert set(run.stop_all().values()) == {0}, run.said()
        run.compare()
        verify(run)


def cut_in_the_middle(machines: Machines, directory: Path) -> None:
    """Frames between nodes 0 and 1 on one side, 2 and 3 on the other are dropped."""
    sides = '{ "p0", "p1" }', '{ "p2", "p3" }'
    rules = [f"iifname {a} oifname {b} drop" for a, b in (sides, sides[::-1])]
    lines = ["type filter hook forward priority 0;", *rules]
    file = directory / "middle.nft"
    file.write_text("\n".join(["table bridge middle {", "chain c {", *lines, "}", "}", ""]))
    machines._in_switch(f"nft -f {file}")
