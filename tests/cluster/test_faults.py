"""Faults of machines and networks: each is named, the run goes on, and its numbers do not show it.

`FAULTS` faults, chosen by `FAULTS_SEED`, hit a run over three machines one after the other. In the
end its losses and the samples it was trained on are those of one process that nothing happened to.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.machines import Machines, wait_until
from cluster.training import Training

FAULTS = int(os.environ.get("FAULTS", "6"))
SEED = int(os.environ.get("FAULTS_SEED", "1"))
LOST_SECONDS = 6
AWAY_SECONDS = 14  # longer than that, and than torch's keep-alive
GONE = "is gone"


class Chaos:
    """Faults of a run on three machines; each method returns a word that must be said of it."""

    def __init__(self, run: Training, choose: random.Random) -> None:
        self.run, self.machines, self.choose = run, run.machines, choose
        self.everyone = range(len(run.machines.names))

    def any(self) -> int:
        return self.choose.choice(self.everyone)

    def kill_rank(self) -> list[str]:
        machine = self.any()
        pids = self.run.rank_pids(machine)
        os.kill(self.choose.choice(pids), signal.SIGKILL)
        return [f"on node{machine} was killed by signal 9 (SIGKILL)"]

    def kill_agent(self) -> list[str]:
        machine = self.any()
        self.run.commands[machine].send_signal(signal.SIGKILL)
        self.run.commands[machine].wait()
        self.run.start(machine)
        return [f"node{machine}", GONE]

    def power_off(self) -> list[str]:
        machine = self.any()
        self.machines.power_off(machine, cut_first=self.choose.random() < 0.5)
        time.sleep(2)
        self.machines.boot(machine)
        self.run.start(machine)
        return [f"node{machine}", GONE]

    def cut(self) -> list[str]:
        machine = self.any()
        self.machines.cut(machine)
        time.sleep(AWAY_SECONDS)
        self.machines.mend(machine)
        return [f"node{machine}", GONE]

    def one_way(self) -> list[str]:
        machine = self.any()
        self.machines.wire(machine, loss_from=1.0)
        time.sleep(AWAY_SECONDS)
        self.machines.mend(machine)
        return [f"node{machine}", GONE]

    def twice(self) -> list[str]:
        """A second failure while the run recovers from the first."""
        words = self.kill_rank()
        time.sleep(self.choose.uniform(0.5, 4))
        return [*words, *self.power_off()]


@pytest.fixture
def trio(tmp_path: Path) -> Machines:
    with Machines(3, tmp_path) as machines:
        yield machines


def test_random_faults_leave_no_trace(trio: Machines) -> None:
    options = ("--max-restarts", "20", "--lost-seconds", str(LOST_SECONDS))
    run = Training(trio, "2:3", *options)
    run.start_all()
    chaos = Chaos(run, random.Random(SEED))
    kinds: list[Callable[[], list[str]]] = [
        *(chaos.kill_rank, chaos.kill_agent, chaos.power_off),
        *(chaos.cut, chaos.one_way, chaos.twice),
    ]
    print(f"\n{FAULTS} faults of seed {SEED}")
    for number in range(FAULTS):
        kind = kinds[number % len(kinds)] if number < len(kinds) else chaos.choose.choice(kinds)
        wait_until(lambda: run.world_size() == 3, 120, run.said)
        run.reach(run.step() + chaos.choose.randrange(3, 15))
        said, saved, before = run.said(), checkpoints(run), run.seen_rounds()
        began = time.time()
        words = kind()
        seconds = run.goes_on(before, began)
        print(f"{number}: {kind.__name__}: going on {seconds:.1f} s after it began", flush=True)
        new = run.said()[len(said) :] if run.said().startswith(said) else run.said()
        assert all(word in run.said() for word in words), (words, new)
        assert max(saved, default=0) <= max(checkpoints(run), default=0), "a checkpoint was lost"
    wait_until(lambda: run.world_size() == 3, 120, run.said)
    run.reach(run.step() + 5)
    codes = run.stop_all()
    assert set(codes.values()) == {0}, run.said()
    steps, largest = run.compare()
    print(f"{steps} steps; largest difference of a loss {largest:.1e}")


def checkpoints(run: Training) -> list[int]:
    names = [path.name for path in run.run.glob("step_*")]
    return [int(name.removeprefix("step_")) for name in names if name[5:].isdigit()]


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
        for step in checkpoints(run):
            machines.check(
                0,
                [
                    sys.executable,
                    "-m",
                    "fourfold",
                    "checkpoint",
                    "verify",
                    run.run / f"step_{step}",
                ],
            )


def cut_in_the_middle(machines: Machines, directory: Path) -> None:
    """Frames between nodes 0 and 1 on one side, 2 and 3 on the other are dropped."""
    sides = '{ "p0", "p1" }', '{ "p2", "p3" }'
    rules = [f"iifname {a} oifname {b} drop" for a, b in (sides, sides[::-1])]
    lines = ["type filter hook forward priority 0;", *rules]
    file = directory / "middle.nft"
    file.write_text("\n".join(["table bridge middle {", "chain c {", *lines, "}", "}", ""]))
    machines._in_switch(f"nft -f {file}")
