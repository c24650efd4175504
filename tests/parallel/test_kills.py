"""Kill -9 of a random rank at a random moment: found, named, and the run ends as if nothing was.

`fourfold train --nproc 4 --max-restarts N` must bring the run to its end whatever its ranks are
doing when they are killed: starting, computing, saving, or committing what was saved.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable

import pytest
from helpers.layout_runs import Command, Runs, different, losses

from fourfold.launch.supervisor import supervise

slow = pytest.mark.slow
KILLED = re.compile(r"fourfold: rank (\d) was killed by signal 9 \(SIGKILL\)")
RESTARTED = "restarting all ranks from"
DROPOUT = ("Model.hidden_dropout_prob=0.1", "Model.attention_probs_dropout_prob=0.1")
SETTINGS = (*DROPOUT, "Engine.save_load.save_steps=3", "Engine.save_load.keep_last=2")


class Killer:
    """Kills ranks of a run until it has killed enough or the run has ended."""

    def __init__(self, command: Command, kills: int, seed: int) -> None:
        self.command, self.left = command, kills
        self.chance = random.Random(seed)
        self.killed: list[int] = []

    def go(self) -> int:
        """Until the run has ended; its exit code."""
        while self.left > 0:
            if (code := self._wait_for_a_moment()) is not None:
                return code
            rank, pid = self.chance.choice(sorted(self.command.ranks().items()) or [(-1, 0)])
            if pid == 0:
                continue
            restarts = self._restarts()
            os.kill(pid, signal.SIGKILL)
            if (code := self._wait(restarts + 1)) is not None:
                return code
            self.killed.append(rank)
            self.left -= 1
        return self.command.wait()

    def _wait_for_a_moment(self) -> int | None:
        """Some steps after the start, give or take; the exit code if the run ends before."""
        goal = self.chance.randint(0, 5)
        while self._steps() < goal:
            if (code := self.command.ended()) is not None:
                return code
            time.sleep(0.005)
        time.sleep(0.1 * self.chance.random())
        return self.command.ended()

    def _wait(self, restarts: int) -> int | None:
        """Until the command has started again so often; the exit code if it ends before."""
        deadline = time.monotonic() + 60.0
        while self._restarts() < restarts:
            if (code := self.command.ended()) is not None:
                return code
            assert time.monotonic() < deadline, self.command.said()
            time.sleep(0.005)
        return None

    def _restarts(self) -> int:
        return self.command.said().count(RESTARTED)

    def _steps(self) -> int:
        """How many the present attempt has told of."""
        return self.command.said().rpartition(RESTARTED)[2].count("global step")


def be_patient_for(seconds: float) -> Callable[[], None]:
    """While ranks look for each other or save together they wait for one that died: the time the
    launcher leaves them decides what such a death costs."""

    def prepare() -> None:
        assert supervise.__kwdefaults__["grace_seconds"] == 10.0
        supervise.__kwdefaults__["grace_seconds"] = seconds
        supervise.__kwdefaults__["first_pause_seconds"] = 0.1

    return prepare


@pytest.mark.parametrize(
    ("layout", "asynchronous", "steps", "kills", "grace"),
    [
        ("dp2 pp2", False, 12, 3, 0.5),
        pytest.param("dp2 pp2", False, 40, 10, 10.0, marks=slow),
        pytest.param("sh2 stage3 mp2", True, 40, 10, 10.0, marks=slow),
    ],
)
def test_a_run_survives_the_death_of_its_ranks(
    layout: str, asynchronous: bool, steps: int, kills: int, grace: float, runs: Runs
) -> None:
    settings = (*SETTINGS, f"Engine.max_steps={steps}")
    straight = runs.fit(layout, "straight", *settings)
    settings = (*settings, f"Engine.save_load.async_save={asynchronous}")
    done = 0
    while done < kills:
        # A run that ends before it was killed often enough is followed by another.
        name = f"killed_after_{done}"
        words = runs.command(layout, name, *settings, options=("--max-restarts", str(kills)))
        with Command(words, runs.folder / f"console_{name}", be_patient_for(grace)) as command:
            killer = Killer(command, kills - done, seed=done + kills)
            code, said = killer.go(), command.said()
        assert code == 0, said
        assert [int(rank) for rank in KILLED.findall(said)] == killer.killed, said
        run = runs.folder / name
        assert losses(run) == losses(straight)
        assert not different(run / f"step_{steps}", straight / f"step_{steps}")
        done += len(killer.killed)
