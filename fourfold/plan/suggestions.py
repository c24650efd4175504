"""Suggestions for a plan: what almost fits, what a single change buys, what the shape wastes.

Each sentence gives the arithmetic it rests on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.memory import fullest_stage
from fourfold.cost.workload import Spread, Workload
from fourfold.plan.cluster import GIB, PRESETS, Cluster
from fourfold.plan.planner import CUT, Candidate, Fit, Plan, candidate_of, fit_of
from fourfold.plan.search import legal_spreads, one_spread
from fourfold.terminal import count_of

WORTH_SAYING = 0.005  # of the step time or of the memory


def near_misses(plan: Plan, most: int = 3) -> Iterator[str]:
    """Cuts that would be faster than the best layout if they fitted, nearest first: how far off,
    and the cheapest change that makes them fit."""
    costs, best = plan.costs, plan.best
    if costs is None or best is None:
        return
    over = np.flatnonzero(
        (costs.bytes_ > plan.cluster.usable_bytes) & (costs.seconds < best.seconds)
    )
    seen: set[tuple[object, ...]] = set()
    nearness = np.round(costs.bytes_[over] / plan.cluster.usable_bytes, 2)
    for index in over[np.lexsort((costs.seconds[over], nearness))]:
        spread = one_spread(costs.spread, int(index))
        cut = tuple(getattr(spread, name) for name in CUT)
        if cut in seen:
            continue
        seen.add(cut)
        missed = _candidate(plan, spread)
        asked = f"why not {missed.layout}, {missed.details}?"
        yield f"{asked} {_shortfall(missed)}; {_fix(plan, missed)}"
        if len(seen) == most:
            return


def _shortfall(candidate: Candidate) -> str:
    terms = sorted(candidate.memory.values_at().items(), key=lambda item: -item[1])
    listed = " + ".join(f"{name} {value / GIB:.1f}" for name, value in terms if value > 0.05 * GIB)
    return (
        f"{listed} = {candidate.bytes_ / GIB:.1f} GiB on stage {candidate.fullest_stage}, "
        f"{(candidate.bytes_ - candidate.capacity) / GIB:.2f} GiB more than the "
        f"{candidate.capacity / GIB:.1f} of a device (a step would take {candidate.seconds:.4g} s)"
    )


def _fix(plan: Plan, missed: Candidate) -> str:
    """The fastest variant of the same cut that fits."""
    cut = {name: getattr(missed.spread, name) for name in CUT}
    same = [
        candidate
        for candidate in plan.candidates
        if all(getattr(candidate.spread, name) == value for name, value in cut.items())
    ]
    if not same:
        return "no variant of it fits"
    fixed = same[0]
    slower = fixed.seconds / missed.seconds - 1
    return (
        f"cheapest fix: {_changes(missed.spread, fixed.spread)} "
        f"({(fixed.bytes_ - missed.bytes_) / GIB:+.1f} GiB, {slower:+.1%} time)"
    )


def _changes(old: Spread, new: Spread) -> str:
    names = {
        "micro_batch": "micro_batch_size",
        "recompute": "recompute",
        "sequence_parallel": "sequence_parallel",
        "schedule": "pp_schedule",
        "virtual": "virtual_pp_degree",
        "stage": "sharding_stage",
    }
    changed = [
        f"{said} {getattr(old, name)} -> {getattr(new, name)}"
        for name, said in names.items()
        if getattr(old, name) != getattr(new, name)
    ]
    return ", ".join(changed) or "nothing"


@dataclass(frozen=True)
class Change:
    """What one knob does to a layout."""

    knob: str
    time: float  # relative change of the step time
    bytes_: float
    fit: Fit


def sensitivity(plan: Plan, candidate: Candidate) -> list[Change]:
    """Single changes to `candidate`, those that buy most first."""
    changes = []
    for knob, spread in _neighbours(plan, candidate.spread):
        other = _candidate(plan, spread)
        changes.append(_change(knob, candidate, other))
    for knob, altered in _other_conditions(plan):
        changes.append(_change(knob, candidate, _candidate(altered, candidate.spread)))
    worth = [
        change
        for change in changes
        if abs(change.time) > WORTH_SAYING or abs(change.bytes_) > WORTH_SAYING * candidate.capacity
    ]
    return sorted(worth, key=lambda change: (change.fit == "no", change.time))


def _change(knob: str, before: Candidate, after: Candidate) -> Change:
    return Change(knob, after.seconds / before.seconds - 1, after.bytes_ - before.bytes_, after.fit)


def _neighbours(plan: Plan, spread: Spread) -> Iterator[tuple[str, Spread]]:
    """Legal layouts that differ in one knob; of the micro-batch sizes, the next on either side."""
    around = legal_spreads(
        plan.workload, plan.cluster.world, {name: getattr(spread, name) for name in CUT}
    )
    if around is None:
        return
    sizes = np.unique(np.asarray(around.micro_batch))
    place = int(np.searchsorted(sizes, spread.micro_batch))
    near = set(sizes[max(0, place - 1) : place + 2].tolist())
    for index in range(len(np.asarray(around.mp))):
        other = one_spread(around, index)
        if len(_differing(spread, other)) == 1 and other.micro_batch in near:
            yield _changes(spread, other), other


def _differing(one: Spread, other: Spread) -> set[str]:
    knobs = {
        name
        for name in ("micro_batch", "recompute", "sequence_parallel", "stage")
        if getattr(one, name) != getattr(other, name)
    }
    if (one.schedule, one.virtual) != (other.schedule, other.virtual):
        knobs.add("pipeline")
    return knobs


def _other_conditions(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The same layout if the program or the cluster were different."""
    software, device = plan.workload.software, plan.cluster.device
    if not software.fused:
        compiled = replace(plan.workload, software=replace(software, fused=True))
        yield "Engine.graph_mode dynamic -> static", replace(plan, workload=compiled)
    for name, said in (("inter_gbps", "network between nodes"), ("intra_gbps", "links in a node")):
        doubled = device.model_copy(update={name: 2 * getattr(device, name)})
        cluster = plan.cluster.model_copy(update={"device": doubled})
        yield f"twice as fast {said}", replace(plan, cluster=cluster)


def shape_lint(workload: Workload, candidate: Candidate | None) -> Iterator[str]:
    """What wastes time in the shape itself."""
    network = workload.network
    head = network.hidden // network.heads
    if head % 8:
        yield (
            f"head size {network.hidden} / {network.heads} = {head} is not a multiple of 8: matrix "
            "units work on multiples of 8, and attention falls back to slow kernels"
        )
    elif head > 256:
        yield f"head size {head} is above 256: flash attention does not take it"
    if network.vocab % 128:
        padded = -(-network.vocab // 128) * 128
        yield (
            f"vocab_size {network.vocab} is not a multiple of 128; {padded} costs "
            f"{padded - network.vocab} rows and makes the head's product run at full rate"
        )
    if candidate is None:
        return
    spread = candidate.spread
    if network.layers % spread.pp:
        most = -(-network.layers // spread.pp)
        yield (
            f"{network.layers} layers over pp{spread.pp}: the fullest stage holds {most}, so "
            f"{1 - network.layers / (most * spread.pp):.1%} of the pipeline waits"
        )
    if spread.pp > 1 and spread.micro_batches < 4 * spread.pp:
        yield (
            f"{spread.micro_batches} micro-batch{'es' * (spread.micro_batches > 1)} over "
            f"pp{spread.pp}: the bubble takes "
            f"{candidate.bubble:.1%} of the step; 4 x {spread.pp} or more make it small"
        )
    if network.ffn % (64 * spread.mp) or network.hidden % (64 * spread.mp):
        yield (
            f"hidden {network.hidden} and ffn {network.ffn} over mp{spread.mp} are not multiples "
            "of 64 per rank: tiles of matrix products are partly empty"
        )


def precision_advice(plan: Plan) -> Iterator[str]:
    """Where another number format is faster on this device."""
    device, precision = plan.cluster.device, plan.workload.precision
    if precision == "bfloat16" and not device.has_bf16:
        yield f"{device.name} has no bfloat16 products: fp32 rates are assumed; float16 is faster"
    if not device.is_cpu or precision == "float32":
        return
    low, full = plan.cluster.machine(precision), plan.cluster.machine("float32")
    faster = float(full.peak * full.sustained) / float(low.peak * low.sustained)
    if faster > 1 + WORTH_SAYING:
        yield (
            f"products in float32 are {faster:.2g} times as fast as in {precision} on this "
            "processor; use -o Engine.mix_precision.dtype=float32"
        )


def impossible(plan: Plan) -> Iterator[str]:
    """Nothing fits: by how much, and what would."""
    workload, cluster = plan.workload, plan.cluster
    if plan.costs is None:
        yield (
            f"no layout of {cluster.world} ranks is legal for {workload.network.heads} heads, "
            f"{workload.network.layers} layers and a global batch of {workload.global_batch}: data "
            "ranks must divide the batch; change Data.batch_size.global_batch_size or the cluster"
        )
        return
    least = _candidate(plan, one_spread(plan.costs.spread, int(plan.costs.bytes_.argmin())))
    yield (
        f"no layout fits {cluster}: the smallest is {least.layout}, {least.details}, with "
        f"{_shortfall(least)}"
    )
    enough = smallest_world(workload, cluster)
    if enough is not None:
        name = cluster.device.name
        devices = count_of(enough.world, "device")
        yield f"smallest cluster of {name} that would: {enough} ({devices})"
    for device in sorted(PRESETS.values(), key=lambda device: device.memory_gib):
        other = cluster.model_copy(update={"device": device})
        band = other.memory_band(least.spread.pp)
        if fit_of(least.bytes_, other.usable_bytes, band) == "fits":
            yield f"the same number of devices would with {device.memory_gib:g} GiB each: {other}"
            return


def smallest_world(workload: Workload, cluster: Cluster, most: int = 2**15) -> Cluster | None:
    """The fewest devices, in nodes of this size, of which some layout fits: found in growing
    strides, then node by node."""

    def enough(nodes: int) -> bool:
        grown = cluster.model_copy(update={"nodes": nodes})
        return _least_bytes(workload, grown) <= grown.usable_bytes

    low = high = 1
    while not enough(high):
        low, high = high + 1, high + max(1, high // 4)
        if high * cluster.devices_per_node > most:
            return None
    nodes = next(nodes for nodes in range(low, high + 1) if enough(nodes))
    return cluster.model_copy(update={"nodes": nodes})


def _least_bytes(workload: Workload, cluster: Cluster) -> float:
    """What the smallest layout of a cluster may need at most; recomputing everything in
    micro-batches of one needs least, so only that is looked at."""
    spread = legal_spreads(workload, cluster.world, {"micro_batch": 1, "recompute": "full"})
    if spread is None:
        return float("inf")
    memory, _ = fullest_stage(workload.network, spread, workload.software)
    return float((np.asarray(memory.total) * (1 + cluster.memory_band(spread.pp).above)).min())


def _candidate(plan: Plan, spread: Spread) -> Candidate:
    return candidate_of(plan.workload, spread, plan.cluster, plan.coefficients)
