"""`fourfold plan --self-test`: predictions against published runs, family by family.

Nothing here is fitted to what it is judged by: coefficients come from the fit rows of four
families; the check rows of those, and all rows of every other family, were not used. Families are
never pooled. Each fitted one is also predicted by the fit that left it out (leave-one-out
cross-validation; coefficients.json holds those fits, `benchmarks/plan.py --fit` makes them).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourfold.cost.memory import fullest_stage, memory_of
from fourfold.cost.terms import Floats
from fourfold.cost.workload import CONTEXT_BYTES, FRAGMENTATION, Network, Software, Spread
from fourfold.model import ModelShape
from fourfold.plan.cluster import PIPELINE_BAND, STAGE_BAND, parse_cluster
from fourfold.plan.machine import CoefficientFit, Coefficients, load_fit, load_left_out
from fourfold.plan.planner import Fit, fit_of
from fourfold.plan.programs import MEGATRON
from fourfold.plan.published import (
    FILE,
    MEMORY_PARTS,
    Evidence,
    PublishedRun,
    published_runs,
    unjudged_ooms,
)
from fourfold.plan.steptime import step_time_of

FEWEST_TO_RANK, FEWEST_SETTINGS = 3, 4
NOISY = {"bigscience v100"}  # its authors warn that the same run varied by 40 %
SMALLEST_MODEL = 1024  # hidden size from which a run says something about memory
SEED_TGS = (142.0, 156.0)  # 175B, tp8 pp8, 64 A100, flash attention: tokens/s per device


@dataclass(frozen=True)
class Target:
    name: str
    text: str
    met: bool

    def line(self) -> str:
        return f"  {'met   ' if self.met else 'MISSED'}  {self.name}: {self.text}"


def self_test_lines(rows: Path | None = None) -> Iterator[str]:
    runs = published_runs(FILE if rows is None else rows)
    evidence = Evidence.of(runs)
    fit = load_fit()
    yield f"{len(runs)} published measurements, {len(evidence.runs)} of them step times"
    targets: list[Target] = []
    if evidence.runs:
        errors = evidence.errors(fit.coefficients, fit.sustained)
        yield from _step_times(evidence, errors, load_left_out() if rows is None else {})
        yield from _ranking(evidence, errors, targets)
        targets += _time_targets(evidence, errors)
    yield from _memory(runs, targets)
    yield from _fits(runs, unjudged_ooms(FILE if rows is None else rows), targets)
    targets.append(_seed_target(fit.coefficients))
    yield "targets:"
    yield from (target.line() for target in targets)


def _step_times(
    evidence: Evidence, errors: Floats, without: dict[str, CoefficientFit]
) -> Iterator[str]:
    yield ""
    yield "step time, predicted against measured (mean absolute error, mean error, worst):"
    heads = f"{'rows':>5}{'mean |e|':>10}{'mean e':>9}{'worst':>8}  left out"
    yield f"  {'family':<24}{'part':<8}{heads}"
    for family in sorted(set(evidence.family)):
        for part in ("fit", "check", "quoted"):
            chosen = (evidence.family == family) & (evidence.part == part)
            if not chosen.any():
                continue
            e = errors[chosen]
            out = ""
            if family in without and part == "check":
                out = f"{_left_out(evidence, family, without[family]):9.1%}"
            yield (
                f"  {family:<24}{part:<8}{len(e):>5}{np.abs(e).mean():>10.1%}{e.mean():>+9.1%}"
                f"{np.abs(e).max():>8.0%}  {out}"
            )
    yield "  quoted: figures recalled from papers, shown for orientation only"


def _left_out(evidence: Evidence, family: str, fit: CoefficientFit) -> float:
    """Error on all rows of a family by a fit that saw none of them."""
    rows = evidence.where(evidence.family == family)
    return float(np.abs(rows.errors(fit.coefficients, fit.sustained)).mean())


def _ranking(evidence: Evidence, errors: Floats, targets: list[Target]) -> Iterator[str]:
    """Of runs that differ in layout only: how much slower the predicted best was than the best."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, run in enumerate(evidence.runs):
        if run.part != "quoted":
            groups[run.setting].append(index)
    regrets: dict[str, list[float]] = defaultdict(list)
    predicted = evidence.seconds * (1 + errors)
    for members in groups.values():
        layouts = {evidence.runs[i].spread for i in members}
        if len(layouts) < FEWEST_TO_RANK:
            continue
        chosen = min(members, key=lambda i: predicted[i])
        best = min(evidence.seconds[i] for i in members)
        regrets[evidence.runs[chosen].family].append(evidence.seconds[chosen] / best - 1)
    yield ""
    yield "ranking: how much slower the layout predicted fastest was than the fastest measured"
    for family, values in sorted(regrets.items()):
        mean = float(np.mean(values))
        yield (
            f"  {family:<24}{len(values):>4} settings: mean {mean:.1%}, median "
            f"{np.median(values):.1%}, worst {max(values):.0%}; best chosen in "
            f"{np.mean(np.array(values) < 0.005):.0%}"
        )
        if family not in NOISY and len(values) >= FEWEST_SETTINGS:
            targets.append(Target(f"top-1 regret, {family}", f"{mean:.1%} (5%)", mean <= 0.05))


def _time_targets(evidence: Evidence, errors: Floats) -> Iterator[Target]:
    check = evidence.part == "check"
    for families, limit in (
        (("vtrain single",), 0.10),
        (("vtrain multi",), 0.10),
        (("llm-foundry a100", "llm-foundry h100"), 0.15),
        (("bloom",), 0.10),
        (("megatron h100", "megatron h100 fp8"), 0.15),
    ):
        chosen = check & np.isin(evidence.family, families)
        if chosen.any():
            error = float(np.abs(errors[chosen]).mean())
            name = f"step time, {' and '.join(families)} check rows"
            yield Target(name, f"{error:.1%} ({limit:.0%})", error <= limit)
    for family, metric, limit in (
        ("korthikanti", "iter_time_s", 0.08),
        ("seeds", "tokens_per_s_per_gpu", 0.25),
    ):
        own = [
            abs(float(error))
            for error, run in zip(errors, evidence.runs, strict=True)
            if run.family == family and run.metric == metric
        ]
        if own:
            worst = max(own)
            text = f"worst of {len(own)} {worst:.1%} ({limit:.0%})"
            yield Target(f"step time, {family}", text, worst <= limit)


def _memory(runs: Sequence[PublishedRun], targets: list[Target]) -> Iterator[str]:
    yield ""
    yield "memory, predicted against measured (mean absolute error, mean error, worst):"
    yield f"  {'family':<24}{'what':<20}{'rows':>5}{'mean |e|':>10}{'mean e':>9}{'worst':>8}"
    groups: dict[tuple[str, str], list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if np.isfinite(run.bytes_):
            tiny = run.network.hidden < SMALLEST_MODEL
            groups[run.family, _measured_part(run) + (", hidden 512" if tiny else "")].append(run)
    for (family, what), members in sorted(groups.items()):
        e = np.array([_expected(run) / run.bytes_ - 1 for run in members])
        yield (
            f"  {family:<24}{what:<20}{len(e):>5}{np.abs(e).mean():>10.1%}{e.mean():>+9.1%}"
            f"{np.abs(e).max():>8.0%}"
        )
        limit = {"megatron goldens": 0.06, "seeds": 0.08}.get(family)
        if limit is not None and "hidden" not in what:
            worst = float(np.abs(e).max())
            targets.append(
                Target(f"memory, {family}, {what}", f"{worst:.1%} ({limit:.0%})", worst <= limit)
            )
    yield from _bands(runs, targets)


def _bands(runs: Sequence[PublishedRun], targets: list[Target]) -> Iterator[str]:
    """By kind of run: how far what was held is from what a plan counts, and the band it has."""
    yield ""
    yield "memory that runs held, over what a plan counts with its reserve (from, to; the band):"
    for kind, band in (("one stage", STAGE_BAND), ("pipeline", PIPELINE_BAND)):
        members = [run for run in runs if _kind(run) == kind]
        whole = [run for run in members if _is_whole(run)]
        out = [run for run in members if not run.fits]
        if not whole:
            continue
        held = [run.bytes_ / _needed(run) - 1 for run in whole]
        # One that ran out of memory would have held at least all of it.
        held += [max(run.place.machine.memory_bytes / _needed(run) - 1, 0.0) for run in out]
        text = f"{min(held):+.1%} to {max(held):+.1%} (+{band.above:.0%} -{band.below:.0%})"
        yield f"  {kind:<24}{len(whole):>5} runs, {len(out)} out of memory: {text}"
        inside = -float(band.below) <= min(held) and max(held) <= float(band.above)
        targets.append(Target(f"memory, {kind}", text, inside))


def _kind(run: PublishedRun) -> str:
    """Toy models say nothing of large ones: the context of the device is most of what they hold."""
    if run.network.hidden < SMALLEST_MODEL:
        return "toy"
    return "pipeline" if run.spread.pp > 1 else "one stage"


def _is_whole(run: PublishedRun) -> bool:
    return bool(np.isfinite(run.bytes_)) and run.metric not in MEMORY_PARTS


def _measured_part(run: PublishedRun) -> str:
    if run.metric == "mem_gb_nvidia_smi":
        return "nvidia-smi"
    parts = MEMORY_PARTS.get(run.metric, ("all",))
    return parts[0] if len(parts) == 1 else "states"


def _expected(run: PublishedRun) -> float:
    """nvidia-smi shows what the allocator does not know of, too."""
    return _needed(run) if run.metric == "mem_gb_nvidia_smi" else _allocated(run)


def _allocated(run: PublishedRun) -> float:
    """Goldens are what the last rank wrote; others what the fullest rank needs; or a part of it."""
    if run.family == "megatron goldens":
        memory = memory_of(run.network, run.spread, run.software, run.spread.pp - 1)
    else:
        memory, _ = fullest_stage(run.network, run.spread, run.software)
    parts = MEMORY_PARTS.get(run.metric)
    return float(memory.total if parts is None else sum(memory[name] for name in parts))


def _needed(run: PublishedRun) -> float:
    """With the reserve a plan adds."""
    return _allocated(run) * (1 + FRAGMENTATION) + CONTEXT_BYTES


def _fit(run: PublishedRun) -> Fit:
    band = PIPELINE_BAND if run.spread.pp > 1 else STAGE_BAND
    return fit_of(_needed(run), float(run.place.machine.memory_bytes), band)


def _fits(
    runs: Sequence[PublishedRun], unjudged: Sequence[str], targets: list[Target]
) -> Iterator[str]:
    """Runs that ran must not be called impossible; none that ran out of memory may be said to
    fit."""
    judged = [run for run in runs if run.counted and run.metric not in MEMORY_PARTS]
    ran = [_fit(run) for run in judged if run.fits and run.part != "quoted"]
    out = [_fit(run) for run in judged if not run.fits]
    yield ""
    yield (
        f"fit or not: of {len(ran)} runs that ran, {ran.count('no')} are predicted not to fit "
        f"({ran.count('no') / max(len(ran), 1):.1%}) and {ran.count('tight')} to be tight; of "
        f"{len(out)} that ran out of memory, {out.count('no')} are predicted not to fit, "
        f"{out.count('tight')} to be tight, {out.count('fits')} to fit"
    )
    alarms = [run.family for run in judged if run.fits and _fit(run) == "no"]
    for family in sorted(set(alarms)):
        yield f"  predicted not to fit, {family}: {alarms.count(family)}"
    for row in unjudged:
        yield f"  out of memory, not judged: {row}"
    if out:
        caught = len(out) - out.count("fits")
        text = f"{caught} of {len(out)} are not said to fit (all)"
        targets.append(Target("out of memory", text, caught == len(out)))


def _seed_target(coefficients: Coefficients) -> Target:
    """Seed 004: Megatron-DeepSpeed with flash attention, no recomputation, 1536 micro-batches."""
    cluster = parse_cluster("8x8xA100-80G")
    shape = ModelShape(51200, 12288, 96, 96, 49152, 2048, 0.1, 0.1)
    network = Network.of(shape, 2048)
    spread = Spread(mp=8, pp=8, micro_batch=1, micro_batches=1536)
    software = Software(
        flash=True, overlap=MEGATRON.overlap, reduce_bytes=2, data_inside_pipeline=True,
        split_sends=True,
    )  # fmt: skip
    time = step_time_of(network, spread, software, cluster.machine("float16"), coefficients)
    rate = 1536 * 2048 / 64 / float(time.total)
    band = cluster.device.band
    low, high = rate / (1 + band), rate / (1 - band)
    return Target(
        "175B tp8 pp8 on 64 A100",
        f"{rate:.0f} tokens/s per device, band {low:.0f} to {high:.0f}; measured "
        f"{SEED_TGS[0]:.0f} to {SEED_TGS[1]:.0f}",
        low <= SEED_TGS[0] and SEED_TGS[1] <= high,
    )
