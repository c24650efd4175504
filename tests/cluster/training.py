"""A run over machines for tests: started on each, looked at from outside, compared with one alone.

run = Training(machines, nnodes="2:3")
run.start_all()
run.reach(12)                                   # the step it has come to
machines.power_off(1)
run.goes_on()                                   # seconds until there is a step of a new round
run.compare(run.stop_all())                     # samples and losses, against one process
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import yaml
from cluster.machines import REPOSITORY, Command, Machines, children, wait_until

FIXTURE = REPOSITORY / "tests" / "fixtures" / "megatron_single"
RECORDED = Path(__file__).with_name("recorded.py")
PATIENCE = 150.0


class Training:
    """`fourfold train --nnodes` on every machine, in the machines' shared directory."""

    def __init__(
        self,
        machines: Machines,
        nnodes: str,
        *options: str,
        nproc: int = 1,
        model: dict[str, object] | None = None,
        preload: Path | None = None,
    ) -> None:
        self.preload = preload
        self.machines, self.nnodes, self.options, self.nproc = machines, nnodes, options, nproc
        self.run = machines.directory / "run"
        self.reads = machines.directory / "reads"
        self.reads.mkdir()
        self.file = machines.directory / "tiny.yaml"
        described = settings(machines.directory)
        described["Model"] |= model or {}  # type: ignore[operator]
        self.file.write_text(yaml.safe_dump(described))
        self.commands: dict[int, Command] = {}
        self.earlier: list[Command] = []

    def start(self, machine: int, *more: str) -> Command:
        if machine in self.commands:
            self.earlier.append(self.commands[machine])
        words = [sys.executable, RECORDED, self.reads, "train", "-c", self.file]
        place = ["--nnodes", self.nnodes, "--node-rank", str(machine), "--master", "node0:29500"]
        numbers = ["--nproc", str(self.nproc)]
        variables = {}
        if self.preload is not None:
            variables = {"LD_PRELOAD": str(self.preload), "BAD_DISK": str(self.control(machine))}
        self.commands[machine] = self.machines.start(
            machine, [*words, *place, *numbers, *self.options, *more], variables
        )
        return self.commands[machine]

    def control(self, machine: int) -> Path:
        """Where `bad_disk.c`, if it is preloaded, is told what is wrong with that machine's."""
        return self.machines.directory / f"disk_of_{self.machines.names[machine]}"

    def start_all(self, *more: str) -> None:
        for machine in range(len(self.machines.names)):
            self.start(machine, *more)

    # -- what it has come to ----------------------------------------------------------------------

    def records(self) -> list[dict[str, object]]:
        return _records(self.run / "metrics.jsonl")

    def step(self) -> int:
        return max((int(r["step"]) for r in self.records() if r["kind"] == "train"), default=0)

    def rounds(self) -> list[dict[str, object]]:
        """A record of each start of the ranks that is still in the history."""
        return [record for record in self.records() if record["kind"] == "run"]

    def world_size(self) -> int:
        rounds = self.rounds()
        return int(rounds[-1]["world_size"]) if rounds else 0

    def reach(self, step: int, seconds: float = PATIENCE) -> None:
        wait_until(
            lambda: self.step() >= step,
            seconds,
            lambda: f"step {step}, now at {self.step()}:\n{self.said()}",
        )

    def goes_on(self, before: set[str], since: float, seconds: float = PATIENCE) -> float:
        """Seconds from `since` (wall clock) until ranks of a round not among `before` had done a
        step."""

        def found() -> list[float]:
            return [float(r["time"]) for r in self.done() if r["round"] not in before]  # type: ignore

        wait_until(found, seconds, lambda: f"a new round:\n{self.said()}")
        return min(found()) - since

    def seen_rounds(self) -> set[str]:
        return {str(read["round"]) for read in self.samples()}

    def first_steps(self, rounds: set[str]) -> dict[str, int]:
        """With which step each of these began."""
        first: dict[str, int] = {}
        for read in self.samples():
            if (name := str(read["round"])) in rounds:
                step = int(read["step"])  # type: ignore[call-overload]
                first[name] = min(first.get(name, step), step)
        return first

    def longest_pause(self, since: float) -> float:
        """Between two steps that were done, in seconds."""
        times = sorted({float(done["time"]) for done in self.done()})  # type: ignore[arg-type]
        later = [since, *(moment for moment in times if moment > since)]
        return max(after - before for before, after in pairwise(later))

    def events(self, kind: str) -> list[dict[str, object]]:
        """Those of this kind since the ranks were last started."""
        records = self.records()
        last = max((i for i, r in enumerate(records) if r["kind"] == "run"), default=0)
        return [record for record in records[last:] if record.get("event") == kind]

    def samples(self) -> list[dict[str, object]]:
        """What was read, by which round, for which step."""
        return [record for record in self._notes() if "samples" in record]

    def done(self) -> list[dict[str, object]]:
        """When each rank of each round had done each step."""
        return [record for record in self._notes() if "done" in record]

    def _notes(self) -> list[dict[str, object]]:
        return [record for file in sorted(self.reads.iterdir()) for record in _records(file)]

    def marks(self) -> dict[Command, int]:
        """How much each command has said by now."""
        return {command: len(command.output()) for command in self._all_commands()}

    def said(self, marks: Mapping[Command, int] = MappingProxyType({})) -> str:
        """What all have said, since those marks if there are any, without rank 0's lines."""
        return "\n".join(
            f"--- {command.machine} ({command.returncode})\n{lines}"
            for command in self._all_commands()
            if (lines := _own_lines(command, marks.get(command, 0))) or not marks
        )

    def said_by(self, marks: Mapping[Command, int]) -> dict[str, str]:
        """The same, by machine."""
        found: dict[str, str] = {}
        for command in self._all_commands():
            lines = _own_lines(command, marks.get(command, 0))
            found[command.machine] = found.get(command.machine, "") + lines + "\n"
        return found

    def _all_commands(self) -> list[Command]:
        return [*self.earlier, *self.commands.values()]

    def rank_pids(self, machine: int) -> list[int]:
        """The processes of the ranks of a machine; its reaper comes first."""
        return children(self.commands[machine].pid)[1:]

    def stop_all(self, number: int = signal.SIGTERM) -> dict[int, int]:
        for command in self.commands.values():
            command.send_signal(number)
        return {machine: command.wait() for machine, command in self.commands.items()}

    # -- against a run that nothing happened to ---------------------------------------------------

    def compare(self) -> tuple[int, float]:
        """How many steps, and the largest difference of a loss; each step's samples are compared
        on the way, and each loss is there once."""
        steps = self.step()
        losses, samples = undisturbed(self.machines.directory, steps)
        history = [r for r in self.records() if r["kind"] == "train"]
        assert [r["step"] for r in history] == [*range(1, steps + 1)], "each step once, in order"
        assert self.last_samples(steps) == samples
        largest = max(abs(float(r["loss"]) - losses[int(r["step"])]) for r in history)  # type: ignore
        assert largest < 1e-5
        return steps, largest

    def last_samples(self, steps: int) -> Counter[tuple[int, int]]:
        """(step, sample) of the last round that did each step."""
        reads = self.samples()
        latest: dict[int, tuple[float, str]] = {}
        for read in reads:
            step = int(read["step"])  # type: ignore[call-overload]
            latest[step] = max(
                latest.get(step, (0.0, "")), (float(read["time"]), str(read["round"]))
            )  # type: ignore
        return Counter(
            (int(read["step"]), sample)  # type: ignore[call-overload]
            for read in reads
            if int(read["step"]) <= steps and latest[int(read["step"])][1] == read["round"]  # type: ignore
            for sample in read["samples"]  # type: ignore[attr-defined]
        )


def settings(directory: Path) -> dict[str, object]:
    return {
        "Global": {"device": "cpu", "seed": 1024},
        "Engine": {
            "max_steps": 100_000,
            "logging_freq": 1,
            "eval_freq": 0,
            "test_iters": 0,
            "tensorboard": False,
            "mix_precision": {"dtype": "float32"},
            "save_load": {"save_steps": 10, "output_dir": str(directory / "run")},
        },
        "Data": {
            "batch_size": {"global_batch_size": 12, "micro_batch_size": 1},
            "dataset": {
                "input_dir": str(FIXTURE),
                "cache_dir": str(directory / "cache"),
                "split": "90,8,2",
                "max_seq_len": 16,
                "eos_token_id": 0,
            },
        },
        "Model": {
            "vocab_size": 1024,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 16,
        },
        "Optimizer": {
            "lr": {"decay_steps": 4000, "warmup_rate": 0.05, "max_lr": 1e-3, "min_lr": 1e-4}
        },
        "Distributed": {"timeout_seconds": 20},
    }


def undisturbed(directory: Path, steps: int) -> tuple[dict[int, float], Counter[tuple[int, int]]]:
    """Losses and samples of the same run in one process; it reads what the steps to come read."""
    alone, reads = directory / "alone", directory / "alone_reads"
    reads.mkdir(exist_ok=True)
    words = [sys.executable, str(RECORDED), str(reads), "train", "-c", str(directory / "tiny.yaml")]
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*words, "-o", f"Engine.save_load.output_dir={alone}"],
        env=variables,
        stdout=subprocess.DEVNULL,
    )
    try:
        metrics = alone / "metrics.jsonl"
        wait_until(lambda: f'"step": {steps + 1},' in _text(metrics), PATIENCE)
    finally:
        process.kill()
        process.wait()
    losses = {
        int(r["step"]): float(r["loss"])  # type: ignore
        for r in _records(metrics)
        if r["kind"] == "train" and int(r["step"]) <= steps  # type: ignore[call-overload]
    }
    taken = Counter(
        (int(read["step"]), sample)  # type: ignore[call-overload]
        for file in reads.iterdir()
        for read in _records(file)
        if "samples" in read and int(read["step"]) <= steps  # type: ignore[call-overload]
        for sample in read["samples"]  # type: ignore[attr-defined]
    )
    return losses, taken


def _own_lines(command: Command, start: int = 0) -> str:
    """What the agent said from there on, without rank 0's lines."""
    lines = command.output()[start:].splitlines()
    return "\n".join(line for line in lines if "global step" not in line and " INFO]" not in line)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _records(path: Path) -> list[dict[str, object]]:
    """All whole lines; it may be growing."""
    lines = _text(path).split("\n")[:-1]
    return [json.loads(line) for line in lines]
