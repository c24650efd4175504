"""The search space of a plan: every layout a model and a cluster allow, and what each costs.

Enumeration uses the arithmetic of the configuration's own checks (config/rules.py), so a layout
is offered if and only if training accepts it. Only what cannot be best is left out: a schedule
that needs more memory than another one and is never faster, where that other one is legal. The
zero-bubble schedules are tried when asked for: torch's cannot evaluate, and lose gradients with
stage 3. Micro-batches go up to 64 samples and ranks hold up to 8 stages. Costs are computed for
all layouts at once, times only for those within twice the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TypeVar

import numpy as np

from fourfold.config.rules import SPLIT_SCHEDULES, divides_model, schedule_fits, stages_fit
from fourfold.cost.memory import fullest_stage
from fourfold.cost.terms import Breakdown, Floats, Numbers
from fourfold.cost.workload import RECOMPUTE_MODES, Spread, Workload, take
from fourfold.plan.cluster import Cluster
from fourfold.plan.machine import Coefficients, Machine
from fourfold.plan.steptime import step_time_of

LARGEST_MICRO_BATCH = 64
MOST_STAGES_PER_RANK = 8
NEARLY_FULL = 0.92  # of the memory: above it, fragmentation decides
SEARCHED_SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")

Value = TypeVar("Value")
Fixed = Mapping[str, object]  # field of Spread -> the only value allowed


@dataclass(frozen=True)
class Costs:
    """Layouts and what they cost, as columns; `seconds` is infinite where it was not computed."""

    spread: Spread
    memory: Breakdown
    fullest: Floats  # the pipeline stage that needs most
    bytes_: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.bytes_)


def legal_spreads(workload: Workload, world: int, fixed: Fixed | None = None) -> Spread | None:
    """All legal layouts of `world` ranks as columns; None when there is none."""
    fixed = fixed or {}
    rows = [
        (*degrees, *pipeline)
        for degrees in _degrees(workload, world, fixed)
        for pipeline in _pipelines(workload, degrees, fixed)
    ]
    if not rows:
        return None
    names = ("mp", "pp", "dp", "sharding", "micro_batch", "micro_batches", "schedule", "virtual")
    columns = dict(
        zip(names, (np.array(column) for column in zip(*rows, strict=True)), strict=True)
    )
    return _with_variants(columns, workload, fixed)


def _degrees(workload: Workload, world: int, fixed: Fixed) -> Iterator[tuple[int, int, int, int]]:
    network = workload.network
    for mp in _allowed(_divisors(world), fixed, "mp"):
        if not divides_model(mp, network.heads, network.ffn, network.shared_heads):
            continue
        for pp in _allowed(_divisors(world // mp), fixed, "pp"):
            data = world // (mp * pp)
            if pp > network.layers or any(batch % data for batch in workload.batches):
                continue
            for sharding in _allowed(_divisors(data), fixed, "sharding"):
                if fixed.get("dp", data // sharding) == data // sharding:
                    yield mp, pp, data // sharding, sharding


def _pipelines(
    workload: Workload, degrees: tuple[int, int, int, int], fixed: Fixed
) -> Iterator[tuple[int, int, str, int]]:
    """(micro_batch, micro_batches, schedule, stages per rank)."""
    _, pp, dp, sharding = degrees
    shares = [batch // (dp * sharding) for batch in workload.batches]
    for micro_batch in _allowed(_divisors(math.gcd(*shares)), fixed, "micro_batch"):
        if micro_batch > LARGEST_MICRO_BATCH and "micro_batch" not in fixed:
            continue
        counts = [local // micro_batch for local in shares]
        for schedule, virtual in _schedules(workload.network.layers, pp, counts, fixed):
            yield micro_batch, counts[-1], schedule, virtual


def _schedules(
    layers: int, pp: int, micro_batches: list[int], fixed: Fixed
) -> Iterator[tuple[str, int]]:
    """Schedules and stages per rank that run each of these numbers of micro-batches."""
    asked = fixed.get("schedule")
    if pp == 1:
        if asked in (None, "1F1B") and fixed.get("virtual", 1) == 1:
            yield "1F1B", 1
        return
    names = SEARCHED_SCHEDULES if asked is None else (str(asked),)
    found: set[int] = set()
    for name in names:
        for virtual in _allowed(range(1, MOST_STAGES_PER_RANK + 1), fixed, "virtual"):
            if name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble") and virtual == 1:
                continue
            # GPipe and LoopedBFS idle as long as 1F1B and the interleaved order, and hold more.
            dominated = asked is None and name in ("GPipe", "LoopedBFS") and virtual in found
            # With several stages a rank, uneven ones make every turn wait for the longest.
            dominated |= virtual > 1 and layers % (pp * virtual) > 0 and "virtual" not in fixed
            if dominated or not stages_fit(layers, pp, virtual):
                continue
            if all(schedule_fits(name, pp, virtual, count) for count in micro_batches):
                found.add(virtual)
                yield name, virtual


def _with_variants(columns: dict[str, np.ndarray], workload: Workload, fixed: Fixed) -> Spread:
    """Cross every row with the sharding stages, recompute modes and sequence parallelism."""
    seq = workload.network.seq
    count = len(columns["mp"])
    picks = []
    for stage in _allowed((1, 2, 3), fixed, "stage"):
        for mode in _allowed(RECOMPUTE_MODES, fixed, "recompute"):
            for split in _allowed((False, True), fixed, "sequence_parallel"):
                legal = np.ones(count, dtype=bool)
                if stage > 1 and "stage" not in fixed:
                    legal &= columns["sharding"] > 1
                if stage > 1:
                    legal &= ~np.isin(columns["schedule"], SPLIT_SCHEDULES)
                if mode == "ops":
                    legal &= ~np.isin(columns["schedule"], SPLIT_SCHEDULES)
                    legal &= workload.config.Engine.graph_mode != "static"
                if split:
                    legal &= (columns["mp"] > 1) & (seq % columns["mp"] == 0)
                picks.append((np.flatnonzero(legal), stage, mode, split))
    index = np.concatenate([pick[0] for pick in picks])
    lengths = [len(pick[0]) for pick in picks]
    return Spread(
        **{name: column[index] for name, column in columns.items()},
        stage=np.repeat([pick[1] for pick in picks], lengths),
        recompute=np.repeat([pick[2] for pick in picks], lengths),
        sequence_parallel=np.repeat([pick[3] for pick in picks], lengths),
    )


def cost_of(
    workload: Workload,
    spread: Spread,
    machine: Machine,
    coefficients: Coefficients,
    *,
    time_all: bool = False,
) -> Costs:
    """Memory of all; time of those within twice the memory, or of all."""
    memory, stage = fullest_stage(workload.network, spread, workload.software)
    bytes_ = np.asarray(memory.total, dtype=float)
    wanted = np.ones(len(bytes_), dtype=bool) if time_all else bytes_ <= 2 * machine.memory_bytes
    seconds = np.full(len(bytes_), np.inf)
    if wanted.any():
        some = take(spread, wanted)
        timed = step_time_of(workload.network, some, workload.software, machine, coefficients)
        seconds[wanted] = np.asarray(timed.total)
    return Costs(spread, memory, np.asarray(stage, dtype=float), bytes_, seconds)


def concerns(bytes_: Floats, capacity: float, above: Numbers) -> Floats:
    """What ranks before time: 0 fits even with the share `above` of what is predicted on top, 1
    fits as predicted, 2 nearly fills the device, 3 does not fit."""
    most = np.asarray(bytes_ * (1 + above))
    tight = np.where(np.asarray(bytes_) > NEARLY_FULL * capacity, 2.0, 1.0)
    found = np.where(most > capacity, tight, 0.0)
    return np.asarray(np.where(np.asarray(bytes_) > capacity, 3.0, found))


def search(
    workload: Workload,
    cluster: Cluster,
    coefficients: Coefficients,
    fixed: Fixed | None = None,
) -> Costs | None:
    spread = legal_spreads(workload, cluster.world, fixed)
    if spread is None:
        return None
    return cost_of(workload, spread, cluster.machine(workload.precision), coefficients)


def one_spread(spread: Spread, index: int) -> Spread:
    """Row `index` of columns as plain numbers."""
    values = {}
    for field in fields(spread):
        value = np.asarray(getattr(spread, field.name))
        values[field.name] = value[index].item() if value.ndim else value.item()
    return Spread(**values)


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return tuple(sorted({*low, *(number // value for value in low)}))


def _allowed(values: Iterable[Value], fixed: Fixed, name: str) -> list[Value]:
    """Those of `values` that --fix leaves."""
    return [value for value in values if name not in fixed or fixed[name] == value]
