"""Preflight and stragglers on four machines: what is slow is named by host, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.machines import Command, Machines, wait_until
from helpers.tiny_run import TINY

COUNT = 4
# How many clean runs must name nobody; many take long.
CLEAN_RUNS = int(os.environ.get("FOURFOLD_CLEAN_RUNS", "2"))
# From the fault to its name, with room for a machine that also does other work.
PATIENCE = float(os.environ.get("FOURFOLD_NAMED_WITHIN", "90"))
needs_ethtool = pytest.mark.skipif(
    shutil.which("ethtool") is None, reason="not installed: ethtool; `make test-cluster` does that"
)
WIRES = {
    "rate": ({"rate": 2_000_000}, "rate"),
    "loss": ({"loss": 0.05}, "loss"),
    "delay": ({"delay": 0.02}, "latency"),
}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(COUNT, tmp_path_factory.mktemp("four")) as made:
        yield made


@pytest.fixture
def place(machines: Machines, request: pytest.FixtureRequest) -> Path:
    """A directory that all machines see."""
    made = machines.directory / "".join(c if c.isalnum() else "_" for c in request.node.name)
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def slow_disk(machines: Machines) -> Path:
    """A library that makes the disk of the process that loads it slow."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("not installed: cc")
    library = machines.directory / "bad_disk.so"
    source = Path(__file__).with_name("bad_disk.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def start_all(
    machines: Machines, words: list[str], port: int, odd: dict[int, dict[str, Any]] | None = None
) -> list[Command]:
    """`fourfold WORDS` as one rank on each machine; `odd` has a machine's prefix and variables."""
    started = []
    for rank in range(COUNT):
        special = (odd or {}).get(rank, {})
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(COUNT),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **special.get("env", {}),
        }
        command = [*special.get("prefix", []), sys.executable, "-m", "fourfold", *words]
        started.append(machines.start(rank, command, env=variables))
    return started


def examined(
    machines: Machines, place: Path, odd: dict[int, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """What `fourfold doctor --nodes` found, and that its exit code says whether it did."""
    words = ["doctor", "--nodes", "--json", "--directory", str(place)]
    commands = start_all(machines, words, 29600, odd)
    codes = {command.wait(180) for command in commands}
    said = commands[0].output()
    found: dict[str, Any] = json.loads(said[said.index("\n{") if "\n{" in said else 0 :])
    assert codes == {1 if found["findings"] else 0}, said
    return found


def named(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(finding["what"], finding["host"]) for finding in found["findings"]}


@needs_ethtool
@pytest.mark.parametrize("fault", WIRES)
def test_a_bad_link_is_named_before_the_run(fault: str, machines: Machines, place: Path) -> None:
    wire, what = WIRES[fault]
    machines.wire(2, **wire)  # type: ignore[arg-type]
    try:
        found = examined(machines, place)
    finally:
        machines.mend(2)
    assert (f"link {what}", "node2") in named(found), found
    assert {host for _, host in named(found)} == {"node2"}, found["findings"]
    assert found["seconds"] < 30


def test_a_niced_rank_a_slow_disk_and_nothing_else_are_named_before_the_run(
    machines: Machines, slow_disk: Path, place: Path
) -> None:
    control = place / "control"
    control.write_text("1000000 0.2")
    odd = {
        # Not 19: on a machine with other work it would hardly get to start.
        1: {"prefix": ["nice", "-n", "5"]},
        3: {"env": {"LD_PRELOAD": str(slow_disk), "BAD_DISK": str(control)}},
    }
    found = examined(machines, place, odd)
    assert {("priority", "node1"), ("disk", "node3")} <= named(found), found
    assert {host for _, host in named(found)} == {"node1", "node3"}, found["findings"]


def test_a_directory_that_is_not_shared_is_named(machines: Machines) -> None:
    """Each machine has a /tmp of its own."""
    found = examined(machines, Path("/tmp"))
    assert named(found) == {("directory", f"node{rank}") for rank in (1, 2, 3)}


# -- during the run -------------------------------------------------------------------------------


def describe(place: Path, steps: int) -> Path:
    values = json.loads(json.dumps(TINY))
    values["Engine"] |= {"max_steps": steps, "eval_freq": 0, "test_iters": 0}
    values["Engine"]["save_load"] = {"save_steps": 10, "output_dir": str(place / "run")}
    values["Data"]["batch_size"] = {"global_batch_size": 8, "micro_batch_size": 1}
    # Enough to send that a slow link counts.
    values["Model"] |= {"hidden_size": 128, "num_layers": 4}
    values["Data"]["dataset"]["cache_dir"] = str(place / "cache")
    values["Distributed"] = {"dp_degree": COUNT, "timeout_seconds": 120}
    file = place / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def records(place: Path, kind: str) -> list[dict[str, Any]]:
    file = place / "run" / "metrics.jsonl"
    if not file.exists():
        return []
    lines = (line for line in file.read_text().splitlines() if line.endswith("}"))
    return [record for record in map(json.loads, lines) if record.get("event") == kind]


@contextmanager
def busy_processors() -> Iterator[None]:
    """As many processes that only compute as there are processors."""
    burn = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burn) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


class Watched:
    """A run on all machines, of which one after the other something becomes slow."""

    def __init__(self, machines: Machines, place: Path, odd: dict[int, dict[str, Any]]) -> None:
        words = ["train", "-c", str(describe(place, 100_000))]
        self.place, self.machines = place, machines
        self.commands = start_all(machines, words, 29601, odd)
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Watched:
        last = self.commands[0]
        wait_until(lambda: len(steps_of(self.place)) > 20, 180, lambda: last.output()[-3000:])
        early = [*records(self.place, "straggler"), *records(self.place, "preflight")]
        assert not early, json.dumps(early, indent=1)
        return self

    def until_named(self, phase: str, host: str, rank: int | None) -> None:
        """From the fault, which has just happened, to its name, and no other."""
        began, known = time.monotonic(), len(records(self.place, "straggler"))

        def is_named() -> bool:
            assert self.commands[0].returncode is None, self.commands[0].output()[-3000:]
            return any(
                (each["phase"], each["host"], each["rank"]) == (phase, host, rank)
                for each in records(self.place, "straggler")
            )

        wait_until(is_named, PATIENCE, lambda: f"{phase} of {host} to be named")
        self.seconds[f"{phase} {host}"] = round(time.monotonic() - began, 1)
        new = records(self.place, "straggler")[known:]
        assert {each["host"] for each in new} == {host}, json.dumps(new, indent=1)

    def __exit__(self, *raised: object) -> None:
        print("named after", self.seconds)
        for machine in range(COUNT):
            self.machines.mend(machine)
        for command in self.commands:
            if command.returncode is None:
                command.send_signal(9)


@needs_ethtool
def test_a_slow_disk_and_bad_links_are_named_during_the_run(
    machines: Machines, slow_disk: Path, place: Path
) -> None:
    control = place / "control"
    odd = {3: {"env": {"LD_PRELOAD": str(slow_disk), "BAD_DISK": str(control)}}}
    with Watched(machines, place, odd) as run:
        control.write_text("1000000 0.5")
        run.until_named("disk", "node3", 3)
        control.unlink()
        for fault, machine in (("delay", 2), ("rate", 1), ("loss", 0)):
            machines.wire(machine, **WIRES[fault][0])  # type: ignore[arg-type]
            run.until_named("link", f"node{machine}", None)
            machines.mend(machine)


def test_a_niced_rank_is_named_during_the_run(machines: Machines, place: Path) -> None:
    with Watched(machines, place, {}) as run, busy_processors():
        pid = run.commands[1].pid
        subprocess.run(["renice", "-n", "19", "-p", str(pid)], check=True)
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():  # where it is, nice counts among processes of one session only
            group.write_text("19")
        run.until_named("compute", "node1", 1)


def steps_of(place: Path) -> list[dict[str, Any]]:
    file = place / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if '"kind": "train"' in line and line.endswith("}")]


@pytest.mark.parametrize("number", range(CLEAN_RUNS))
def test_a_clean_run_names_nobody(number: int, machines: Machines, place: Path) -> None:
    words = ["train", "-c", str(describe(place, 60))]
    commands = start_all(machines, words, 29610 + number)
    assert [command.wait(240) for command in commands] == [0] * COUNT, commands[0].output()
    named = [*records(place, "straggler"), *records(place, "preflight")]
    assert not named, json.dumps(named, indent=1)
