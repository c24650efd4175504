"""`fourfold plan --calibrate RUN_DIR`: the cluster's numbers, moved to agree with a run.

A run says how long its steps took and how much memory it had. The four numbers a step depends on
most (products, memory bandwidth, launches, links) are moved as little as agreement needs, each in
proportion to its part in the step: one figure cannot determine four numbers, and does not try to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from fourfold.config import load_config
from fourfold.cost.flops import flops_per_token
from fourfold.cost.terms import Floats
from fourfold.cost.workload import Workload, spread_of, workload_of
from fourfold.errors import UserError
from fourfold.metrics.jsonl import FILE_NAME, read_facts, read_jsonl
from fourfold.parallel import layout_of
from fourfold.plan.cluster import GIB, Cluster
from fourfold.plan.machine import load_coefficients
from fourfold.plan.planner import Candidate, candidate_of

FEWEST_STEPS = 5
NARROWEST_BAND = 0.08
IMPLAUSIBLE = 0.75  # of the peak: no training run reaches it
MOVED = ("sustained", "memory_gbps", "launch_us", "intra_gbps", "inter_gbps")


@dataclass(frozen=True)
class Calibration:
    cluster: Cluster
    lines: list[str]


@dataclass(frozen=True)
class StepTime:
    seconds: float  # of one step, the median of the second half of the run
    scatter: float  # relative
    steps: int


@dataclass(frozen=True)
class RunRecord:
    """What a run's own records say: of its last start, if it was resumed."""

    path: Path
    world: int
    layout: str | None  # None if the run was of a version that did not record it
    times: list[tuple[int, float]]  # (global batch, seconds) of each logging window
    bytes_: float | None

    def step_time(self, batch: int) -> StepTime:
        times = [seconds for samples, seconds in self.times if samples == batch]
        if len(times) < FEWEST_STEPS:
            others = sorted({samples for samples, _ in self.times if samples != batch})
            batches = f" (the run's batches: {', '.join(map(str, others))})" if others else ""
            raise UserError(
                f"{self.path} has {len(times)} timed steps with a global batch of {batch}"
                f"{batches}; "
                f"calibrating needs at least {FEWEST_STEPS} such steps, and the file and -o that "
                "the run had"
            )
        late = times[len(times) // 2 :]
        median = statistics.median(late)
        low, high = np.quantile(late, [0.1, 0.9])
        return StepTime(median, float(high - low) / 2 / median, len(times))


def calibrate(
    path: Path, overrides: Sequence[str], cluster: Cluster, record: RunRecord
) -> Calibration:
    """`path` and `overrides` are what the run was started with."""
    config = load_config(path, overrides, record.world)
    layout = str(layout_of(config))
    if record.layout not in (layout, None):
        raise UserError(
            f"{record.path}: the run had the layout {record.layout}, but {path} gives its "
            f"{record.world} processes {layout}; name the file and the -o of the run (for a layout "
            "that was chosen, `fourfold plan --emit` writes such a file)"
        )
    measured = record.step_time(config.Data.batch_size.global_batch_size)
    # As the ranks of this run found it; what other numbers of them find was not calibrated.
    cluster = cluster.with_world(record.world).model_copy(update={"shared_by": {}})
    workload = workload_of(config, on_cpu=cluster.device.is_cpu)
    before = _predict(workload, cluster)
    moved = _fit(workload, cluster, measured.seconds)
    # A run whose steps vary that much says little, but what is written must be readable.
    band = min(max(NARROWEST_BAND, measured.scatter), 1.0)
    device = moved.device.model_copy(update={"band": band, "band_below": None})
    moved = moved.model_copy(update={"device": device})
    after = _predict(workload, moved)
    lines = [
        f"{measured.steps} steps of {record.world} process(es), {measured.seconds:.4g} s each "
        f"(second half, ±{measured.scatter:.1%}); predicted {before.seconds:.4g} s "
        f"({before.seconds / measured.seconds - 1:+.1%}), calibrated {after.seconds:.4g} s",
        *_moved_lines(cluster, moved),
        *_memory_lines(before, record),
        *_rate_lines(workload, before, cluster, measured),
    ]
    return Calibration(moved, lines)


def read_run(run: Path) -> RunRecord:
    path = run / FILE_NAME if run.is_dir() else run
    timed = list(_timed_steps(read_jsonl(path)))
    if not timed:
        raise UserError(f"{path} has no timed steps; name the output directory of a run")
    last = timed[-1][0]
    steps = [step for facts, step in timed if facts.world_size == last.world_size]
    peaks = [step.get("peak_device_bytes") or step.get("peak_rss_bytes") for step in steps]
    return RunRecord(
        path=path,
        world=last.world_size,
        layout=last.layout,
        times=[(int(step["global_batch_size"]), float(step["batch_seconds"])) for step in steps],
        bytes_=max((float(peak) for peak in peaks if peak), default=None),
    )


class _Start(NamedTuple):
    """What is known of a start of the run."""

    world_size: int
    layout: str | None


def _timed_steps(records: list[dict[str, Any]]) -> Iterator[tuple[_Start, dict[str, Any]]]:
    """Each with what the run knew of itself when it was last started."""
    start: _Start | None = None
    for record in records:
        if (facts := read_facts(record)) is not None:
            start = _Start(facts.world_size, facts.layout)
        elif record.get("kind") == "train" and _is_timed(record):
            yield start or _Start(_world_size(record), None), record


def _world_size(step: dict[str, Any]) -> int:
    """By the rates of all ranks and of one: earlier versions did not record it."""
    rates = [step.get(name) for name in ("ips_total", "ips")]
    total, one = (float(rate) if _is_positive(rate) else 1.0 for rate in rates)
    return max(1, round(total / one))


def _is_timed(step: dict[str, Any]) -> bool:
    return all(_is_positive(step.get(name)) for name in ("batch_seconds", "global_batch_size"))


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _predict(workload: Workload, cluster: Cluster) -> Candidate:
    spread = spread_of(workload.config)
    return candidate_of(
        workload, spread, cluster.with_world(int(spread.world)), load_coefficients()
    )


def _fit(workload: Workload, cluster: Cluster, seconds: float) -> Cluster:
    names = [name for name in MOVED if getattr(cluster.device, name) > 0]
    if workload.precision == "float32":
        names[names.index("sustained")] = "sustained_fp32"

    def with_numbers(numbers: Floats) -> Cluster:
        values = {
            name: min(float(number), 1.0) if name.startswith("sustained") else float(number)
            for name, number in zip(names, numbers, strict=True)
        }
        return cluster.model_copy(update={"device": cluster.device.model_copy(update=values)})

    def residuals(numbers: Floats) -> Floats:
        predicted = _predict(workload, with_numbers(numbers)).seconds
        return np.array([math.log(predicted / seconds)])

    start = np.array([float(getattr(cluster.device, name)) for name in names])
    fit = fit_numbers(residuals, start, np.array([1000.0]), pull=1.0, huber=10.0)
    return with_numbers(fit)


def _moved_lines(cluster: Cluster, moved: Cluster) -> Iterator[str]:
    for name in (*MOVED, "sustained_fp32"):
        old, new = getattr(cluster.device, name), getattr(moved.device, name)
        if old != new:
            yield f"  {name}: {old:.4g} -> {new:.4g}"


def _memory_lines(before: Candidate, record: RunRecord) -> Iterator[str]:
    if record.bytes_ is not None:
        yield (
            f"memory: predicted {before.bytes_ / GIB:.2f} GiB, measured {record.bytes_ / GIB:.2f} "
            f"({before.bytes_ / record.bytes_ - 1:+.1%})"
        )


def _rate_lines(
    workload: Workload, before: Candidate, cluster: Cluster, measured: StepTime
) -> Iterator[str]:
    spread = before.spread
    mode = None if spread.recompute == "none" else spread.recompute
    flops = flops_per_token(workload.shape, int(workload.network.seq), recompute=mode)
    rate = flops * workload.tokens_per_step / measured.seconds / int(spread.world)
    peak = float(cluster.machine(workload.precision).peak)
    warning = physics_check(rate, peak, "hardware FLOP/s of this run")
    if warning is not None:
        yield warning


def physics_check(flops_per_second: float, peak: float, what: str) -> str | None:
    """A rate no run reaches says that the label is wrong, not that the run is fast."""
    share = flops_per_second / peak
    if share <= IMPLAUSIBLE:
        return None
    return (
        f"{what}: {flops_per_second / 1e12:.1f} of {peak / 1e12:.0f} TFLOP/s is {share:.0%} of the "
        f"peak, above the {IMPLAUSIBLE:.0%} any training run reaches: check the model size, batch, "
        "device or precision it was labelled with"
    )


# -- a damped Gauss-Newton fit of positive numbers ------------------------------------------------


Predict = Callable[[Floats], Floats]  # numbers -> residuals


def fit_numbers(
    residuals_of: Predict,
    start: Floats,
    weights: Floats,
    *,
    pull: float = 0.05,
    huber: float = 0.15,
    rounds: int = 60,
) -> Floats:
    """The numbers that make the weighted residuals least; `pull` counts like a row's weight."""
    origin = np.log(start)
    point, damping = origin.copy(), 1e-2
    residuals = residuals_of(np.exp(point))
    cost = _cost(residuals, weights, huber, pull, point - origin)
    for _ in range(rounds):
        slopes = _slopes(residuals_of, point, residuals)
        soft = weights * np.minimum(1.0, huber / np.maximum(np.abs(residuals), 1e-12))
        normal = slopes.T @ (soft[:, None] * slopes) + pull * np.eye(len(point))
        gradient = slopes.T @ (soft * residuals) + pull * (point - origin)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = point + np.clip(step, -0.5, 0.5)
            trial_residuals = residuals_of(np.exp(trial))
            trial_cost = _cost(trial_residuals, weights, huber, pull, trial - origin)
            if trial_cost < cost:
                break
            damping *= 4
        else:
            break
        gain, point, residuals, cost = cost - trial_cost, trial, trial_residuals, trial_cost
        damping = max(damping / 3, 1e-6)
        if gain < 1e-7 * cost:
            break
    return np.exp(point)


def _slopes(residuals_of: Predict, point: Floats, residuals: Floats) -> Floats:
    step = 1e-4
    columns = []
    for index in range(len(point)):
        moved = point.copy()
        moved[index] += step
        columns.append((residuals_of(np.exp(moved)) - residuals) / step)
    return np.stack(columns, axis=1)


def _cost(residuals: Floats, weights: Floats, huber: float, pull: float, moved: Floats) -> float:
    size = np.abs(residuals)
    each = np.where(size <= huber, 0.5 * size**2, huber * (size - 0.5 * huber))
    return float(weights @ each + 0.5 * pull * moved @ moved)
