"""Faults of machines and networks: each is named, the run goes on, and its numbers do not show it.

`FAULTS` faults, chosen by `FAULTS_SEED`, hit a run over three machines one after the other. In the
end its losses and the samples it was trained on are those of one process that nothing happened to.
"""

from __future__ import annotations

import os
import random
import signal
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
        said, saved, began = run.said(), checkpoints(run), time.monotonic()
        words = kind()
        seconds = run.goes_on() + time.monotonic() - began
        print(f"{number}: {kind.__name__}: going on {seconds:.1f} s after it began", flush=True)
        new = run.said()[len(said) :] if run.said().startswith(said) else run.said()
        assert all(word in run.said() for word in words), (words, new)
        assert max(saved, default=0) <= max(checkpoints(run)), "a checkpoint was lost"
    wait_until(lambda: run.world_size() == 3, 120, run.said)
    run.reach(run.step() + 5)
    codes = run.stop_all()
    assert set(codes.values()) == {0}, run.said()
    steps, largest = run.compare()
    print(f"{steps} steps; largest difference of a loss {largest:.1e}")


def checkpoints(run: Training) -> list[int]:
    names = [path.name for path in run.run.glob("step_*")]
    return [int(name.removeprefix("step_")) for name in names if name[5:].isdigit()]
