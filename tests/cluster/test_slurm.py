"""The job file of `fourfold submit --to slurm`, on a real SLURM: whatever ends a job early, the run
ends with the weights of one that nothing disturbed, to the bit."""

from __future__ import annotations

import contextlib
import io
import re
import signal
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from cluster.machines import Command, wait_until, why_not
from cluster.slurm import PROGRAMS, Slurm
from helpers.tiny_run import TINY

from fourfold.cli import main

pytestmark = pytest.mark.skipif(bool(why_not(*PROGRAMS)), reason=str(why_not(*PROGRAMS)))

STEPS = 60
WAIT = 180.0  # for what takes ten seconds on a machine with nothing else to do


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(3, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class Run:
    """A run of 2 x 2 ranks, submitted."""

    def __init__(self, slurm: Slurm, name: str, *words: str, sbatch: tuple[str, ...] = ()) -> None:
        self.slurm, self.directory = slurm, slurm.directory / name
        assert submit(self.directory, "slurm", *words) == "sbatch run.sbatch\n"
        # A machine that another test had taken out may not be back yet; which ones a job gets is
        # for the tests to know.
        slurm.wait_for_idle(slurm.count, WAIT)
        self.job = slurm.sbatch(*sbatch, self.directory / "run.sbatch")

    @property
    def output_dir(self) -> Path:
        return self.directory / "run"

    @property
    def log(self) -> str:
        return (self.output_dir / "logs" / f"slurm-{self.job}.log").read_text()

    @property
    def step(self) -> int:
        """The last that was reported."""
        file = self.output_dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [int(match[1]) for line in lines if (match := re.search(r'"step": ?(\d+)', line))]
        return max(found, default=0)

    @property
    def saved(self) -> str:
        return (self.output_dir / "latest").read_text().strip()

    def until_step(self, step: int) -> None:
        wait_until(
            lambda: self.step >= step,
            WAIT,
            lambda: f"step {step}: {self.slurm.job(self.job)}\n{self.slurm._tail()}",
        )

    def until(self, *states: str) -> dict[str, str]:
        return self.slurm.until(self.job, *states, seconds=WAIT)

    def until_restarted(self, times: int) -> None:
        wait_until(
            lambda: (
                self.slurm.job(self.job)["Restarts"] == str(times)
                and self.slurm.job(self.job)["JobState"] == "RUNNING"
            ),
            WAIT,
            lambda: f"restart {times}: {self.slurm.job(self.job)}\n{self.slurm._tail()}",
        )

    def weights(self) -> dict[str, bytes]:
        """The files with numbers of the last checkpoint."""
        assert self.saved == f"step_{STEPS}", self.log
        files = (self.output_dir / self.saved).rglob("*.safetensors")
        found = {file.name: file.read_bytes() for file in files}
        assert found
        return found


def submit(directory: Path, to: str, *words: str) -> str:
    """What `fourfold submit` prints for a run of 2 x 2 ranks in that directory."""
    directory.mkdir()
    values = deepcopy(TINY)
    values["Engine"] |= {"max_steps": STEPS, "eval_freq": 0}
    values["Engine"]["save_load"] = {"save_steps": 20, "output_dir": "run"}
    values["Data"]["batch_size"] = {"global_batch_size": 48, "micro_batch_size": 1}
    values["Distributed"] = {"timeout_seconds": 30}
    (directory / "run.yaml").write_text(yaml.safe_dump(values))
    given = ["--to", to, "--nodes", "2", "--nproc", "2", "-o", "Engine.save_load.save_steps=20"]
    printed = io.StringIO()
    with (
        contextlib.chdir(directory),
        contextlib.redirect_stdout(printed),
        pytest.raises(SystemExit) as end,
    ):
        main(["submit", "-c", "run.yaml", *given, *words])
    assert end.value.code == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> dict[str, bytes]:
    run = Run(slurm, "undisturbed")
    ended = run.until("COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), run.log
    assert ended["NumNodes"] == "2" and "dp4" in run.log
    return run.weights()


def test_a_chain_of_jobs_ends_with_the_same_weights(
    slurm: Slurm, undisturbed: dict[str, bytes]
) -> None:
    run = Run(slurm, "chain")
    for times, name in enumerate(("TERM", "USR1"), 1):
        run.until_step(15 * times)
        slurm.call(f"scancel --signal={name} {run.job}")
        run.until_restarted(times)
        assert f"stopped by SIG{name}" in run.log
        stop = int(re.findall(r"stopped by SIG\w+ at step (\d+); the run is saved", run.log)[-1])
        assert 15 * times <= stop < STEPS and f"saved: step_{stop}; queued again" in run.log
    assert run.until("COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert run.weights() == undisturbed


def test_scancel_saves_and_is_final(slurm: Slurm) -> None:
    run = Run(slurm, "cancelled")
    run.until_step(10)
    slurm.call(f"scancel {run.job}")
    ended = run.until("CANCELLED")
    wait_until(lambda: "saved: step_" in run.log.splitlines()[-1], WAIT, lambda: run.log)
    assert "stopped by SIGTERM" in run.log and "ended by SLURM or by its user" in run.log
    assert ended["Restarts"] == "0" and 10 <= int(run.saved.removeprefix("step_")) < STEPS


@pytest.mark.slow
def test_a_stop_file_is_final(slurm: Slurm) -> None:
    run = Run(slurm, "stopped")
    run.until_step(10)
    (run.output_dir / "STOP").touch()
    ended = run.until("COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), run.log
    assert 10 <= int(run.saved.removeprefix("step_")) < STEPS


@pytest.mark.slow
def test_a_machine_that_is_drained(slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    run = Run(slurm, "drained")
    run.until_step(10)
    before = run.until("RUNNING")["NodeList"]
    slurm.call("scontrol update nodename=node1 state=drain reason=service")
    try:
        assert run.until("RUNNING")["Restarts"] == "0"  # a job that runs may end
        slurm.call(f"scontrol requeue {run.job}")
        run.until_restarted(1)
        assert (before, run.until("RUNNING")["NodeList"]) == ("node[0-1]", "node[0,2]")
        assert "stopped by SIGTERM" in run.log
        run.until("COMPLETED", "FAILED")
    finally:
        slurm.call("scontrol update nodename=node1 state=resume")
    assert run.weights() == undisturbed


@pytest.mark.slow
def test_a_machine_that_loses_power(slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    run = Run(slurm, "lost")
    run.until_step(25)
    # Which machines it got is SLURM's affair: one that was just resumed may not answer yet.
    lost = int(re.findall(r"\d+", run.until("RUNNING")["NodeList"])[-1])
    slurm.machines.power_off(lost)
    try:
        run.until_restarted(1)
        left = {1: "node[0,2]", 2: "node[0-1]"}[lost]
        assert run.until("RUNNING")["NodeList"] == left
        run.until("COMPLETED", "FAILED")
    finally:
        slurm.reboot(lost)
        slurm.wait_for_idle(3)
    assert "resumed" in run.log and run.weights() == undisturbed


@pytest.mark.slow
def test_a_job_that_has_to_give_way(slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    run = Run(slurm, "preempted", "--partition", "low")
    run.until_step(10)
    hasty = slurm.sbatch("--partition=high", "--nodes=3", "--ntasks-per-node=2", "--wrap=sleep 1")
    slurm.until(hasty, "COMPLETED", seconds=WAIT)
    assert "stopped by SIGTERM" in run.log and "queued again" in run.log
    ended = run.until("COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), run.log
    assert run.weights() == undisturbed


@pytest.mark.slow
def test_a_time_limit(slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    """SLURM counts minutes, and sends a signal up to a minute early."""
    run = Run(slurm, "timed", sbatch=("--time=1", "--signal=TERM@48"))
    run.until_restarted(1)
    slurm.call(f"scontrol update jobid={run.job} timelimit=10")
    ended = run.until("COMPLETED", "FAILED", "TIMEOUT")
    assert ended["JobState"] == "COMPLETED", run.log
    assert run.weights() == undisturbed


@pytest.mark.slow
def test_a_rank_that_is_killed(slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    run = Run(slurm, "killed")
    run.until_step(25)
    kill_ranks(slurm, 1)
    run.until_restarted(1)
    assert "saved: step_20; queued again" in run.log
    ended = run.until("COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", run.log
    assert run.weights() == undisturbed


def kill_ranks(slurm: Slurm, machine: int) -> None:
    """kill -9 of every rank there."""
    pids = slurm.machines.check(machine, ["pgrep", "-f", "fourfold train"]).split()
    slurm.machines.check(machine, ["kill", "-9", *pids])


def test_a_mistake_is_not_repeated(slurm: Slurm) -> None:
    run = Run(slurm, "mistaken", "-o", "Data.dataset.input_dir=none")
    ended = run.until("FAILED", "COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0")
    assert "a mistake in the input, shown above" in run.log


@pytest.mark.slow
def test_a_failure_without_progress_is_repeated_so_often(slurm: Slurm) -> None:
    run = Run(slurm, "failing", "--max-restarts", "1")
    script = run.directory / "run.sbatch"
    slurm.call(f"scancel {run.job}")
    script.write_text(re.sub(r"-m fourfold train", "-c 'exit(1)'", script.read_text()))
    run.job = slurm.sbatch(script)
    ended = run.until("FAILED", "COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("1:0", "1")
    assert "nothing new saved after 1 restarts: not queued again" in run.log


@pytest.mark.slow
def test_the_script_for_each_machine(slurm: Slurm, undisturbed: dict[str, bytes]) -> None:
    """Without a scheduler: the same file on both, stopped on one, given again."""
    directory = slurm.directory / "by_hand"
    assert submit(directory, "torchrun").startswith("bash run.sh 0..1 HOST")
    run = Run.__new__(Run)
    run.slurm, run.directory, run.job = slurm, directory, ""

    def start() -> list[Command]:
        words = ["bash", directory / "run.sh"]
        return [slurm.machines.start(i, [*words, str(i), "node0"]) for i in (0, 1)]

    machines = start()
    wait_until(lambda: run.step >= 15, WAIT, lambda: machines[0].output())
    machines[1].send_signal(signal.SIGTERM)
    assert [machine.wait(WAIT) for machine in machines] == [0, 0], machines[0].output()
    assert 15 <= int(run.saved.removeprefix("step_")) < STEPS
    again = start()
    assert [machine.wait(WAIT) for machine in again] == [0, 0], again[0].output()
    assert run.weights() == undisturbed
