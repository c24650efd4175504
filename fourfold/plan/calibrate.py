"""`fourfold plan --calibrate RUN_DIR`: the cluster's numbers, moved to agree with a run.

A run says how long its steps took and how much memory it had. The four numbers a step depends on
most (products, memory bandwidth, launches, links) are moved as little as agreement needs, each in
proportion to its part in the step: one figure cannot tell four numbers apart, and does not try to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.metrics.jsonl import FILE_NAME, read_jsonl
from fourfold.model import flops_per_token
from fourfold.plan.advice import physics_check
from fourfold.plan.cluster import GIB, Cluster
from fourfold.plan.coefficients import load_coefficients
from fourfold.plan.fitting import fit_numbers
from fourfold.plan.planner import Candidate, candidate_of
from fourfold.plan.subject import Subject, own_spread, subject_of
from fourfold.plan.terms import Floats

FEWEST_STEPS = 5
NARROWEST_BAND = 0.08
MOVED = ("sustained", "memory_gbps", "launch_us", "intra_gbps", "inter_gbps")


@dataclass(frozen=True)
class Calibration:
    cluster: Cluster
    lines: list[str]


@dataclass(frozen=True)
class RunRecord:
    seconds: float  # of one step, the median of the second half of the run
    scatter: float  # relative
    bytes_: float | None
    steps: int


def calibrate(config: Config, cluster: Cluster, run: Path) -> Calibration:
    record = read_run(run)
    # As the ranks of this run found it; what other numbers of them find was not calibrated.
    ranks = int(own_spread(config).world)
    cluster = cluster.with_world(ranks).model_copy(update={"shared_by": {}})
    subject = subject_of(config, on_cpu=cluster.device.is_cpu)
    before = _predict(subject, cluster)
    moved = _fit(subject, cluster, record.seconds)
    device = moved.device.model_copy(update={"band": max(NARROWEST_BAND, record.scatter)})
    moved = moved.model_copy(update={"device": device})
    after = _predict(subject, moved)
    return Calibration(moved, list(_lines(subject, cluster, record, before, after, moved)))


def read_run(run: Path) -> RunRecord:
    path = run / FILE_NAME if run.is_dir() else run
    steps = [record for record in read_jsonl(path) if record.get("kind") == "train"]
    times = [float(step["batch_seconds"]) for step in steps if _is_time(step.get("batch_seconds"))]
    if len(times) < FEWEST_STEPS:
        raise UserError(
            f"{path} has {len(times)} timed steps; calibrating needs at least {FEWEST_STEPS}, the "
            "first of which are left out"
        )
    late = times[len(times) // 2 :]
    median = statistics.median(late)
    low, high = np.quantile(late, [0.1, 0.9])
    peaks = [step.get("peak_device_bytes") or step.get("peak_rss_bytes") for step in steps]
    known = [float(peak) for peak in peaks if peak]
    return RunRecord(median, (high - low) / 2 / median, max(known, default=None), len(times))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _predict(subject: Subject, cluster: Cluster) -> Candidate:
    spread = own_spread(subject.config)
    return candidate_of(subject, spread, cluster.with_world(int(spread.world)), load_coefficients())


def _fit(subject: Subject, cluster: Cluster, seconds: float) -> Cluster:
    names = [name for name in MOVED if getattr(cluster.device, name) > 0]
    if subject.precision == "float32":
        names[names.index("sustained")] = "sustained_fp32"

    def with_numbers(numbers: Floats) -> Cluster:
        values = {
            name: min(float(number), 1.0) if name.startswith("sustained") else float(number)
            for name, number in zip(names, numbers, strict=True)
        }
        return cluster.model_copy(update={"device": cluster.device.model_copy(update=values)})

    def residuals(numbers: Floats) -> Floats:
        predicted = _predict(subject, with_numbers(numbers)).seconds
        return np.array([math.log(predicted / seconds)])

    start = np.array([float(getattr(cluster.device, name)) for name in names])
    fit = fit_numbers(residuals, start, np.array([1000.0]), pull=1.0, huber=10.0)
    return with_numbers(fit)


def _lines(
    subject: Subject,
    cluster: Cluster,
    record: RunRecord,
    before: Candidate,
    after: Candidate,
    moved: Cluster,
) -> Iterator[str]:
    yield (
        f"{record.steps} steps, {record.seconds:.4g} s each (second half, ±{record.scatter:.1%}); "
        f"predicted {before.seconds:.4g} s ({before.seconds / record.seconds - 1:+.1%}), "
        f"calibrated {after.seconds:.4g} s"
    )
    for name in (*MOVED, "sustained_fp32"):
        old, new = getattr(cluster.device, name), getattr(moved.device, name)
        if old != new:
            yield f"  {name}: {old:.4g} -> {new:.4g}"
    if record.bytes_ is not None:
        yield (
            f"memory: predicted {before.bytes_ / GIB:.2f} GiB, measured {record.bytes_ / GIB:.2f} "
            f"({before.bytes_ / record.bytes_ - 1:+.1%})"
        )
    spread = before.spread
    mode = None if spread.recompute == "none" else spread.recompute
    flops = flops_per_token(subject.shape, int(subject.network.seq), recompute=mode)
    rate = flops * subject.tokens_per_step / record.seconds / int(spread.world)
    peak = float(cluster.machine(subject.precision).peak)
    warning = physics_check(rate, peak, "hardware FLOP/s of this run")
    if warning is not None:
        yield warning
