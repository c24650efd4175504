"""Chaos: `fourfold train` under random signals, kills, full disks, deleted logs and second starts.

A run is started with the same command again and again, as a scheduler would, and disturbed until
it has had its share; then it is left alone. Whatever happened, no committed checkpoint may be lost
or damaged: each must equal, to the bit, that of the same step of a run that nobody disturbed, and
so must the finished weights.

    FOURFOLD_CHAOS_SECONDS=60 FOURFOLD_CHAOS_SEED=7 pytest -s -m slow tests/parallel/test_chaos.py

plays for a minute from a seed that an earlier test printed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
from helpers.layout_runs import Command, Runs, different, records
from test_kills import be_patient_for

from fourfold.checkpoint import verify
from fourfold.errors import USER_ERROR_EXIT
from fourfold.signals import STACKS_SIGNAL, STOP_SIGNALS

ALONE = "alone"  # one process, without a supervisor
LAYOUTS = (ALONE, "dp1", "dp2", "pp2", "mp2", "sh2 stage3", "dp2 pp2", "sh2 stage2 mp2")
STEPS = 60
SETTINGS = (
    "Model.hidden_dropout_prob=0.1",
    f"Engine.max_steps={STEPS}",
    "Engine.save_load.save_steps=4",
    "Engine.save_load.keep_last=2",
)
DISK_BYTES = 24 << 20
OTHER_AT_WORK = "in use by another run"
STEP = "global step"
SAVED = re.compile(r"stopped by .* at step (\d+); the run is saved")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for the runs, so that it can be filled; without the right to mount one,
    a directory that is never full."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield place
    if mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By layout, a run that nobody disturbed, with the checkpoint of every step."""
    undisturbed = Runs(tmp_path_factory.mktemp("straight"))
    every_step = ("Engine.save_load.save_steps=1", "Engine.save_load.keep_last=0")

    def finished(layout: str) -> Path:
        layout = "dp1" if layout == ALONE else layout
        run = undisturbed.folder / layout.replace(" ", "_")
        if not (run / f"step_{STEPS}").exists():
            undisturbed.fit(layout, run.name, *SETTINGS, *every_step)
        return run

    return finished


class Chaos:
    """One run, the command that starts it, and what is done to it."""

    def __init__(
        self, disk: Path, straight: Callable[[str], Path], seed: int, disturbances: int
    ) -> None:
        """`disturbances` is their number over all starts."""
        self.disturbances = disturbances
        self.chance = random.Random(seed)
        self.layout = self.chance.choice(LAYOUTS)
        self.straight = straight(self.layout)
        self.disk, self.name = disk, f"run_{seed}"
        self.run = disk / self.name
        self.runs = Runs(disk)
        saving = f"Engine.save_load.async_save={self.chance.choice([True, False])}"
        self.settings = (*SETTINGS, saving)
        self.newest = 0  # step of the newest checkpoint ever seen under its name
        self.played: Counter[str] = Counter()
        self.story: list[str] = [f"{self.layout}, {saving}"]
        self.full = False  # whether the disk was filled since the last start

    def play(self) -> None:
        """Start, disturb and start again, until the run has come to its end."""
        left = self.disturbances
        while True:
            self.full = False
            with ExitStack() as mess, self._start("console") as command:
                while left and command.ended() is None:
                    self._wait(command, self.chance.random())
                    if command.ended() is None:
                        self._disturb(command, mess)
                        left -= 1
                mess.close()
                code, said = command.wait(), command.said()
            self.played["starts"] += 1
            self.story.append(f"exit code {code}")
            self.check(said)
            if code == 0 and self.newest == STEPS:
                return
            assert code or "stopped by" in said, self._told(said)
            assert self.played["starts"] <= 2 * self.disturbances, self._told(said)

    def _start(self, console: str) -> Command:
        layout = "dp1" if self.layout == ALONE else self.layout
        supervised = ("--max-restarts", "2")
        words = self.runs.command(layout, self.name, *self.settings, options=supervised)
        if self.layout == ALONE:
            at = words.index("--nproc")
            del words[at : at + 2 + len(supervised)]
        # Consoles are elsewhere: the test must be able to read them when the disk is full.
        return Command(words, self.disk.parent / f"{console}_{self.name}", be_patient_for(0.5))

    def _wait(self, command: Command, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and command.ended() is None:
            self.newest = max([self.newest, *self._steps()])
            time.sleep(0.01)

    def _steps(self) -> list[int]:
        """Of the checkpoints that have their name."""
        names = [path.name for path in self.run.iterdir()] if self.run.exists() else []
        return [int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d+)", name))]

    def _told(self, said: str) -> str:
        return "\n".join([*self.story, "the last console:", said])

    # -- what is done -----------------------------------------------------------------------------

    def _disturb(self, command: Command, mess: ExitStack) -> None:
        act = self.chance.choice(
            [
                *2 * [partial(self._signal, command, number) for number in STOP_SIGNALS],
                partial(self._signal, command, STACKS_SIGNAL),
                partial(self._signal, command, signal.SIGKILL),
                partial(self._signal_rank, command, signal.SIGKILL),
                partial(self._signal_rank, command, signal.SIGKILL),
                partial(self._signal_rank, command, STACKS_SIGNAL),
                partial(self._pause, command, self._signal_rank),
                partial(self._pause, command, self._signal),
                partial(self._fill_disk, command, mess),
                partial(self._fill_disk, command, mess),
                self._delete_logs,
                partial(self._start_another, command),
            ]
        )
        act()

    def _note(self, what: str) -> None:
        self.played[what] += 1
        self.story.append(what)

    def _signal(self, command: Command, number: int) -> int | None:
        """To the command; its process id, or None if it was too early for that."""
        if number == STACKS_SIGNAL and not command.said():
            return None  # it has just been forked, and does not yet know what this means
        self._note(f"{signal.Signals(number).name} to the command")
        os.kill(command.pid, number)
        return command.pid

    def _signal_rank(self, command: Command, number: int) -> int | None:
        ranks = sorted(command.ranks().items())
        if not ranks:
            return None
        _, pid = self.chance.choice(ranks)
        self._note(f"{signal.Signals(number).name} to a rank")
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def _pause(self, command: Command, send: Callable[[Command, int], int | None]) -> None:
        pid = send(command, signal.SIGSTOP)
        if pid is not None:
            # Not by `_wait`: a child that is stopped has not ended, and need not be asked.
            time.sleep(0.5)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _fill_disk(self, command: Command, mess: ExitStack) -> None:
        if not self.disk.is_mount():
            return
        self._note("full disk")
        self.full = True
        filler = self.disk / "filler"
        mess.callback(filler.unlink, missing_ok=True)
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        self._wait(command, 3 * self.chance.random())
        if self.chance.random() < 0.7:
            filler.unlink(missing_ok=True)

    def _delete_logs(self) -> None:
        self._note("deleted logs")
        shutil.rmtree(self.run / "logs", ignore_errors=True)

    def _start_another(self, command: Command) -> None:
        self._note("second start")
        with self._start("second") as second:
            done = None  # by the first, when the second began to train
            while second.ended() is None:
                if done is None and STEP in second.said():
                    done = command.said().count(STEP)
                time.sleep(0.02)
            code, said = second.ended(), second.said()
        if OTHER_AT_WORK in said:
            assert code == USER_ERROR_EXIT, self._told(said)
            self.played["second starts refused"] += 1
        elif done is not None:
            # The first had just ended, and the second was simply the next.
            command.wait()
            assert command.said().count(STEP) == done, self._told(said)

    # -- what must hold ---------------------------------------------------------------------------

    def check(self, said: str) -> None:
        """After each end: nothing committed is lost or damaged, and failures were explained."""
        steps = self._steps()
        assert max(steps, default=0) >= self.newest, self._told(f"{steps} {self.newest}\n{said}")
        self.newest = max([self.newest, *steps])
        for step in steps:
            problems = verify(self.run / f"step_{step}")
            assert not problems, self._told(f"step_{step}: {problems}\n{said}")
            odd = different(self.run / f"step_{step}", self.straight / f"step_{step}")
            assert not odd, self._told(f"step_{step}: {odd}\n{said}")
            self.played["checkpoints verified"] += 1
        if saved := SAVED.search(said):
            assert self.newest >= int(saved[1]), self._told(said)
        assert "Traceback" not in said, self._told(said)


def play(disk: Path, straight: Callable[[str], Path], seed: int, disturbances: int) -> Counter[str]:
    """A whole run of chaos, compared with the straight one; how often what was done."""
    chaos = Chaos(disk, straight, seed, disturbances)
    try:
        chaos.play()
        assert not different(chaos.run / f"step_{STEPS}", chaos.straight / f"step_{STEPS}")
        told = {record["step"]: record["loss"] for record in records(chaos.run)}
        expected = {r["step"]: r["loss"] for r in records(chaos.straight)}
        assert told.items() <= expected.items(), chaos.story
    except BaseException:
        print(f"FOURFOLD_CHAOS_SEED={seed}", *chaos.story, sep="\n  ")
        raise
    shutil.rmtree(chaos.run)
    return chaos.played


@pytest.mark.slow
def test_a_run_survives_a_little_chaos(disk: Path, straight: Callable[[str], Path]) -> None:
    played = play(disk, straight, seed=1, disturbances=3)
    done = set(played) - {"starts", "checkpoints verified"}
    assert done and played["checkpoints verified"] > 0


@pytest.mark.slow
def test_runs_survive_chaos(
    disk: Path, straight: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = float(os.environ.get("FOURFOLD_CHAOS_SECONDS", "600"))
    first = int(os.environ.get("FOURFOLD_CHAOS_SEED", random.randrange(10**6)))
    deadline, total, runs = time.monotonic() + seconds, Counter[str](), 0
    with capsys.disabled():
        print(f"\nchaos for {seconds:g} s from FOURFOLD_CHAOS_SEED={first}")
    while time.monotonic() < deadline:
        total += play(disk, straight, first + runs, disturbances=10)
        runs += 1
    with capsys.disabled():
        print(f"{runs} runs: {dict(total)}")
    assert runs
