"""Predicted against measured on this machine: ten layouts of 1, 2 and 4 processes.

    python benchmarks/plan_here.py [--rounds 5] [--cluster cluster.yaml]

runs `fourfold doctor` (unless a cluster file is given), predicts step time and bytes of each layout
from what it found, then runs all of them through the engine, turn by turn, so that a disturbance of
the machine meets all alike. The last rows are what `--auto` would choose for each number of
processes, measured next to the others. Bytes are those of all tensors alive at once, counted in the
first step; a process shows more, for its libraries and for holes its allocator cannot fill. Takes
four to five minutes on two cores; the machine must be idle.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from parallel_memory import run_step
from parallel_ranks import Desk, Ranks, say, table

from fourfold.accept.trials import LiveBytes
from fourfold.config import Config
from fourfold.cost.workload import spread_of, workload_of
from fourfold.engine import build_engine
from fourfold.mesh import Layout
from fourfold.parallel import preload
from fourfold.plan import Candidate, candidate_of, plan
from fourfold.plan.cluster import Cluster, load_cluster
from fourfold.plan.machine import load_coefficients
from fourfold.processors import num_processors

BATCH, LENGTH, VOCABULARY = 16, 256, 8192
MODEL = [
    f"Model.vocab_size={VOCABULARY}",
    "Model.hidden_size=256",
    "Model.num_layers=4",
    "Model.num_attention_heads=4",
    f"Model.max_position_embeddings={LENGTH}",
    f"Data.dataset.max_seq_len={LENGTH}",
    f"Data.batch_size.global_batch_size={BATCH}",
]
MICRO, MP, PP = "Data.batch_size.micro_batch_size", "Distributed.mp_degree", "Distributed.pp_degree"
SHARDING, STAGE = "Distributed.sharding.sharding_degree", "Distributed.sharding.sharding_stage"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1: whole batch": (1, [f"{MICRO}=16"]),
    "1: recompute full": (1, [f"{MICRO}=4", "Model.use_recompute=True"]),
    "2: dp2": (2, [f"{MICRO}=8"]),
    "2: mp2": (2, [f"{MP}=2", f"{MICRO}=8"]),
    "2: pp2, 8 micro-batches": (2, [f"{PP}=2", f"{MICRO}=2"]),
    "2: sharding2 stage 3": (2, [f"{SHARDING}=2", f"{STAGE}=3", f"{MICRO}=8"]),
    "4: dp4": (4, [f"{MICRO}=4"]),
    "4: dp2 mp2": (4, [f"{MP}=2", f"{MICRO}=8"]),
    "4: pp4, 8 micro-batches": (4, [f"{PP}=4", f"{MICRO}=2"]),
    "4: dp2 sharding2 stage 2": (4, [f"{SHARDING}=2", f"{STAGE}=2", f"{MICRO}=4"]),
}
WARM_UP = 2


@dataclass
class Case:
    """A layout, what was predicted of it, and what it did."""

    world: int
    config: Config
    predicted: Candidate
    seconds: list[float] = field(default_factory=list)
    bytes_: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def predicted_bytes(self) -> float:
        """Without the libraries a process has before it has a model."""
        return self.predicted.bytes_ - float(self.predicted.memory["reserve"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each layout")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each of doctor's figures")
    parser.add_argument("--cluster", type=Path, help="instead of running doctor")
    arguments = parser.parse_args()
    if arguments.cluster is not None:
        cluster = load_cluster(arguments.cluster)
    else:
        cluster = run_doctor(arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder), MODEL, tokens=400_000, vocab_size=VOCABULARY)
        cases = make_cases(desk, cluster)
        measure(cases, arguments.rounds)
    report(cases)


def run_doctor(seconds: float) -> Cluster:
    """In a process of its own: one that has computed with threads cannot fork ranks that do."""
    say("doctor")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "cluster.yaml"
        command = [sys.executable, "-m", "fourfold", "doctor", "--nproc", "4"]
        subprocess.run([*command, "--seconds", str(seconds), "--out", str(found)], check=True)
        return load_cluster(found)


def make_cases(desk: Desk, cluster: Cluster) -> dict[str, Case]:
    coefficients, cases = load_coefficients(), {}
    for name, (world, overrides) in LAYOUTS.items():
        config = desk.config(world, overrides)
        workload = workload_of(config, on_cpu=True)
        ranks = cluster.with_world(world)
        predicted = candidate_of(workload, spread_of(config), ranks, coefficients)
        cases[name] = Case(world, config, predicted)
    for world in (1, 2, 4):
        best = plan(desk.config(1, [f"{MICRO}=1"]), cluster.with_world(world)).best
        assert best is not None
        config = desk.config(world, best.overrides())
        cases[f"{world}: auto, {best.layout} {best.details}"] = Case(world, config, best)
    return cases


def measure(cases: dict[str, Case], rounds: int) -> None:
    preload(Layout(dp=1, pp=2, sharding=2, mp=2))
    teams = {
        name: Ranks(
            case.world,
            partial(steps, case.config, case.world),
            threads=max(1, num_processors() // case.world),
        )
        for name, case in cases.items()
    }
    try:
        for name, team in teams.items():
            say(f"{name}, first step")
            cases[name].bytes_ = max(team.turn())
        for round_ in range(-WARM_UP, rounds):
            for name, team in teams.items():
                say(f"{name}{', warm-up' if round_ < 0 else ''}")
                elapsed = team.timed_turn()
                if round_ >= 0:
                    cases[name].seconds.append(elapsed)
    finally:
        for team in teams.values():
            team.close()


def steps(config: Config, world: int) -> Iterator[float]:
    """A step a turn; the first one gives the most bytes of tensors that were alive at once."""
    with LiveBytes() as alive:
        engine = build_engine(config, world)
        run_step(engine, 0)
    yield alive.most
    for step in count(1):
        run_step(engine, step)
        yield 0.0


def report(cases: dict[str, Case]) -> None:
    rows = []
    for name, case in cases.items():
        time_error = case.predicted.seconds / case.median - 1
        bytes_error = case.predicted_bytes / case.bytes_ - 1
        rows.append(
            [
                name,
                f"{case.predicted.seconds:.3f}",
                f"{case.median:.3f}",
                f"{time_error:+.0%}",
                f"{case.predicted_bytes / 1e6:.0f}",
                f"{case.bytes_ / 1e6:.0f}",
                f"{bytes_error:+.0%}",
            ]
        )
    table("layout | predicted s | measured s | error | predicted MB | measured MB | error", rows)
    for world in (1, 2, 4):
        same = {name: case for name, case in cases.items() if case.world == world}
        chosen = next(case for name, case in same.items() if ": auto" in name)
        best = min(case.median for case in same.values())
        print(
            f"{world} process(es): the chosen layout is {chosen.median / best - 1:.1%} slower than "
            "the fastest measured"
        )


if __name__ == "__main__":
    main()
