"""Reports of a plan: the table, the advice below it, JSON, days and cost, one layout explained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fourfold.cost.workload import options_of
from fourfold.plan.cluster import GIB, UNCHECKED_BAND, Cluster
from fourfold.plan.layertime import TILE, head_seconds, layer_time, linear_seconds, weight_shapes
from fourfold.plan.machine import Group, bus_bandwidth
from fourfold.plan.planner import Candidate, Plan, off_by
from fourfold.plan.published import PublishedMfu, best_published
from fourfold.plan.suggestions import near_misses, precision_advice, sensitivity, shape_lint
from fourfold.terminal import count_of

HEADINGS = (
    "#", "layout", "how", "GiB", "fit", "step s", "TGS", "MFU", "bubble", "comm",
)  # fmt: skip


def best_of_kind(plan: Plan) -> PublishedMfu | None:
    """What was published of such devices, against which a prediction is held."""
    if plan.cluster.device.is_cpu or plan.workload.precision == "float32":
        return None
    return best_published(plan.cluster.device.name, plan.cluster.nodes > 1)


def is_above(candidate: Candidate, published: PublishedMfu | None) -> bool:
    return published is not None and candidate.mfu > published.share


def headings(economics: Economics) -> list[str]:
    more = [] if economics.tokens is None else ["days"]
    more += [] if economics.tokens is None or economics.price is None else ["cost"]
    return [*HEADINGS, *more]


def row(
    number: str, candidate: Candidate, economics: Economics, published: PublishedMfu | None
) -> list[str]:
    cells = [
        number,
        candidate.layout,
        candidate.details,
        candidate.memory_text,
        candidate.fit,
        candidate.seconds_text,
        _rate(candidate.tokens_per_device),
        f"{candidate.mfu:.1%}{'!' * is_above(candidate, published)}",
        f"{candidate.bubble:.1%}",
        f"{candidate.exposed:.1%}",
    ]
    bill = economics.bill(candidate)
    if bill is not None:
        cells.append(f"{bill.days:,.1f}")
        if bill.cost is not None:
            cells.append(f"{bill.cost:,.0f}")
    return cells


def _rate(tokens_per_second: float) -> str:
    if tokens_per_second < 10:
        return f"{tokens_per_second:.2g}"
    return f"{tokens_per_second:,.0f}"


def table(plan: Plan, top: int, economics: Economics) -> list[list[str]]:
    """The best `top` rows, and the file's own layout wherever it ranks."""
    published = best_of_kind(plan)
    rows = [
        row(str(number), candidate, economics, published)
        for number, candidate in enumerate(plan.candidates[:top], start=1)
    ]
    if plan.own is not None:
        same = [c.spread == plan.own.spread for c in plan.candidates[:top]]
        if any(same):
            rows[same.index(True)][0] += " file"
        else:
            rows.append(row("file", plan.own, economics, published))
    return rows


def size_text(parameters: int) -> str:
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:.4g} {name}"


def heading_lines(plan: Plan) -> Iterator[str]:
    workload, costs = plan.workload, plan.costs
    looked = 0 if costs is None else len(costs)
    fitting = 0 if costs is None else int((costs.bytes_ <= plan.cluster.usable_bytes).sum())
    yield (
        f"{size_text(workload.parameters)} parameters, {plan.cluster} = "
        f"{count_of(plan.cluster.world, 'device')}, global batch {workload.global_batch} x "
        f"{workload.network.seq} tokens, {workload.precision}"
    )
    if options := options_of(workload.shape):
        yield f"network: {options}"
    ways = count_of(len(plan.candidates), "way")
    yield (
        f"{count_of(looked, 'legal layout')}, {fitting:,} fit in "
        f"{plan.cluster.device.memory_gib:.4g} GiB as predicted; {ways} to cut the ranks, each "
        "with its fastest variant"
    )


def memory_line(candidate: Candidate) -> str:
    parts = " + ".join(
        f"{name} {value / GIB:.2f}" for name, value in candidate.memory.values_at().items()
    )
    return (
        f"memory per device (stage {candidate.fullest_stage} needs most): {parts} = "
        f"{candidate.bytes_ / GIB:.2f} GiB, with up to {candidate.memory_band.above:.0%} more "
        f"{candidate.most_bytes / GIB:.1f} of {candidate.capacity / GIB:.1f}: {candidate.fit}"
    )


def advice_lines(plan: Plan, top: int, economics: Economics) -> Iterator[str]:
    best = plan.best
    if best is None:
        return
    yield memory_line(best)
    yield from economics.lines(best)
    if plan.own_problem is not None:
        yield f"the file's own layout is not in the table: {plan.own_problem}"
    yield from near_misses(plan)
    changes = sensitivity(plan, best)
    if changes:
        yield "one change to the best layout:"
    for change in changes[:8]:
        yield (
            f"  {change.knob}: {change.time:+.1%} time, {change.bytes_ / GIB:+.1f} GiB"
            + ("" if change.fit == "fits" else f" ({change.fit})")
        )
    for remark in shape_lint(plan.workload, best):
        yield f"shape: {remark}"
    yield from precision_advice(plan)
    published = best_of_kind(plan)
    shown = [*plan.candidates[:top], *([] if plan.own is None else [plan.own])]
    if published is not None and any(is_above(one, published) for one in shown):
        yield _above_line(plan, published)
    yield _band_line(best, plan)


def _above_line(plan: Plan, published: PublishedMfu) -> str:
    where = "several nodes" if plan.cluster.nodes > 1 else "one node"
    return (
        f"!: above anything published for this kind, 16 bits on {where} of "
        f"{plan.cluster.device.name.partition('-')[0]}: the most is {published.share:.1%} MFU "
        f"({published.model} on {published.devices}, {published.source}); expect less"
    )


def _band_line(best: Candidate, plan: Plan) -> str:
    device = plan.cluster.device
    known = "" if device.band < UNCHECKED_BAND else ", on which no published run could be checked"
    whose = (
        ""
        if device.is_cpu
        else ". These are errors on runs of programs like Megatron: Fourfold itself has not been "
        "measured on a GPU"
    )
    above, below = (float(share) for share in best.memory_band)
    memory = off_by(above, below, lambda share: f"{share:.0%}")
    return (
        f"step times on {device.name}{known} may be off by {best.band_text}, memory by "
        f"{memory}{whose}; --self-test shows how this is known, --calibrate narrows "
        "it with a run of your own"
    )


def as_json(plan: Plan, top: int, economics: Economics) -> dict[str, Any]:
    published = best_of_kind(plan)

    def entry(candidate: Candidate) -> dict[str, Any]:
        bill = economics.bill(candidate)
        return {
            "layout": candidate.layout,
            "details": candidate.details,
            "overrides": candidate.overrides(),
            "fit": candidate.fit,
            "memory_bytes": candidate.memory.values_at(),
            "total_bytes": candidate.bytes_,
            "least_bytes": candidate.least_bytes,
            "most_bytes": candidate.most_bytes,
            "fullest_stage": candidate.fullest_stage,
            "step_seconds": candidate.seconds,
            "band": candidate.band,
            "band_below": candidate.band_below,
            "time_seconds": candidate.time.values_at(),
            "tokens_per_second": candidate.tokens_per_second,
            "tokens_per_second_per_device": candidate.tokens_per_device,
            "mfu": candidate.mfu,
            "above_published": is_above(candidate, published),
            "bubble": candidate.bubble,
            "exposed_communication": candidate.exposed,
            "days": None if bill is None else bill.days,
            "cost": None if bill is None else bill.cost,
        }

    return {
        "cluster": plan.cluster.model_dump(),
        "parameters": plan.workload.parameters,
        "global_batch_size": plan.workload.global_batch,
        "layouts": 0 if plan.costs is None else len(plan.costs),
        "candidates": [entry(candidate) for candidate in plan.candidates[:top]],
        "own": None if plan.own is None else entry(plan.own),
        "own_problem": plan.own_problem,
        "published_mfu": None if published is None else published._asdict(),
        "near_misses": list(near_misses(plan)),
        "goodput": economics.goodput.share,
    }


# -- from step time to calendar and cost ----------------------------------------------------------
#
# Goodput is the share of the time that ends up in the model: the rest goes into saving, into
# restarting, and into work that an interruption undid. Saving at the interval of Young and Daly
# (the square root of twice the time of a save times the time between failures) loses least.

DEADLINES = (30, 60, 90)
FIXED_SAVE_SECONDS = 5.0
DAY = 86400.0


class Economics:
    """What training on `tokens` takes on the cluster of a plan; without `tokens`, nothing."""

    def __init__(self, plan: Plan, tokens: float | None, price: float | None) -> None:
        self.plan, self.tokens, self.price = plan, tokens, price
        self.goodput: Goodput = goodput_of(plan.workload.checkpoint_bytes, plan.cluster)

    def bill(self, candidate: Candidate) -> Bill | None:
        if self.tokens is None:
            return None
        world = self.plan.cluster.world
        return bill_of(self.tokens, candidate.tokens_per_second, self.goodput, world, self.price)

    def lines(self, candidate: Candidate) -> Iterator[str]:
        bill = self.bill(candidate)
        if bill is None or self.tokens is None:
            return
        rate = candidate.tokens_per_device
        cost = "" if bill.cost is None else f", {bill.cost:,.0f} at {self.price:g} per device-hour"
        yield (
            f"{self.tokens:.4g} tokens: {bill.days:.1f} days on {self.plan.cluster}{cost}; "
            f"{self.goodput.text()}"
        )
        saved = self.plan.workload.checkpoint_bytes
        needed = [
            (days, devices_for(days, self.tokens, rate, saved, self.plan.cluster))
            for days in DEADLINES
        ]
        listed = ", ".join(f"{devices:,} for {days} days" for days, devices in needed)
        yield f"devices needed at this rate per device: {listed}"
        if bill.days > 365:
            devices = count_of(self.plan.cluster.world, "device")
            years = f"{bill.days / 365:.1f} years"
            yield f"{years}: on {devices} this is a benchmark, not a training run"


@dataclass(frozen=True)
class Goodput:
    mtbf_hours: float  # of the whole cluster
    save_seconds: float
    interval_seconds: float  # between saves
    share: float  # of the time that ends up in the model

    def text(self) -> str:
        return (
            f"one interruption every {_hours(self.mtbf_hours)}, a save takes "
            f"{self.save_seconds:.0f} s, saving every {self.interval_seconds / 60:.0f} min "
            f"loses least: {self.share:.1%} of the time is training"
        )


def goodput_of(checkpoint_bytes: float, cluster: Cluster) -> Goodput:
    mtbf = cluster.device_mtbf_hours * 3600 / cluster.world
    save = FIXED_SAVE_SECONDS + checkpoint_bytes / (cluster.nodes * cluster.disk_gbps * 1e9)
    interval = math.sqrt(2 * save * mtbf)
    lost = save / interval + (interval / 2 + 60 * cluster.restart_minutes) / mtbf
    return Goodput(mtbf / 3600, save, interval, 1 / (1 + lost))


@dataclass(frozen=True)
class Bill:
    """A whole run: how long, and for how much if a price is known."""

    tokens: float
    days: float  # interruptions included
    cost: float | None


def bill_of(
    tokens: float, tokens_per_second: float, goodput: Goodput, world: int, price: float | None
) -> Bill:
    days = tokens / (tokens_per_second * goodput.share) / DAY
    return Bill(tokens, days, None if price is None else 24 * days * world * price)


def devices_for(
    days: float, tokens: float, per_device: float, checkpoint_bytes: float, cluster: Cluster
) -> int:
    """Devices, in whole nodes, that read `tokens` in `days` at `per_device` tokens/s each."""
    needed = tokens / (per_device * days * DAY)
    for _ in range(20):  # more devices fail more often, so a little more is needed
        nodes = max(1, math.ceil(needed / cluster.devices_per_node))
        grown = cluster.model_copy(update={"nodes": min(nodes, 2**20)})
        more = tokens / (per_device * days * DAY * goodput_of(checkpoint_bytes, grown).share)
        if math.ceil(more / cluster.devices_per_node) <= nodes:
            break
        needed = more
    return nodes * cluster.devices_per_node


def _hours(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} h"


# -- the arithmetic behind one layout, for `--explain` --------------------------------------------


MS = 1e3


def explain(plan: Plan, candidate: Candidate, economics: Economics) -> Iterator[str]:
    """Every term of a layout's memory and time, with the numbers it was made of."""
    yield f"{candidate.layout}, {candidate.details}"
    for assignment in candidate.overrides():
        yield f"  -o {assignment}"
    yield ""
    yield from _memory(candidate)
    yield ""
    yield from _layer(plan, candidate)
    yield ""
    yield from _step(plan, candidate)
    yield ""
    yield from _rates(plan, candidate)
    yield from economics.lines(candidate)


def _memory(candidate: Candidate) -> Iterator[str]:
    yield f"memory of one rank of stage {candidate.fullest_stage}, the fullest:"
    for name, value, text in candidate.memory.lines():
        yield f"  {name:<16}{value / GIB:10.3f} GiB = {text}"
    yield (
        f"  {'sum':<16}{candidate.bytes_ / GIB:10.3f} GiB, at most "
        f"{candidate.most_bytes / GIB:.3f} (+{candidate.memory_band.above:.0%}), of "
        f"{candidate.capacity / GIB:.1f}: {candidate.fit}"
    )


def _layer(plan: Plan, candidate: Candidate) -> Iterator[str]:
    """One layer, one micro-batch: what the step's per-layer seconds are made of."""
    workload, spread, c = plan.workload, candidate.spread, plan.coefficients
    network, software = workload.network, workload.software
    machine = plan.cluster.machine(workload.precision)
    tokens = spread.micro_batch * network.seq
    size = software.compute_bytes
    yield f"one layer, one micro-batch of {spread.micro_batch} x {network.seq} = {tokens} tokens:"
    yield (
        f"  a product of (m, k) and (k, n) runs at {float(machine.peak) / 1e12:g} TFLOP/s x "
        f"{float(machine.sustained):.3f} / (1 + {c.wave:.3f} x {machine.units} x {TILE} / (m n)) / "
        f"(1 + {c.inner:.1f} / k), or as fast as its operands can be moved"
    )
    for name, (n, k, times) in weight_shapes(network, spread.mp).items():
        if not times:
            continue
        forward, backward = linear_seconds(tokens, n, k, machine, c, size)
        called = "q" if name == "qkv" and n < 3 * network.key_width / spread.mp else name
        yield (
            f"  {called:<6}m {tokens} n {float(n):.0f} k {float(k):.0f}"
            f"{' twice' if times == 2 else ''}: "
            f"{2 * tokens * float(n) * float(k):.4g} FLOPs forward in "
            f"{MS * float(forward):.3f} ms, twice that backward in {MS * float(backward):.3f} ms"
        )
    time = layer_time(network, spread, software, machine, c)
    for name, one in (
        ("forward", time.forward), ("repeated", time.repeated), ("backward", time.backward)
    ):  # fmt: skip
        yield (
            f"  {name:<9}products {MS * float(one.products):.3f} + attention "
            f"{MS * float(one.attention):.3f} + element-wise {MS * float(one.elementwise):.3f} + "
            f"all-reduce {MS * float(one.tensor_parallel):.3f} = {MS * float(one.device):.3f} ms "
            f"on the device, {MS * float(one.host):.3f} ms on the host"
        )
    head = head_seconds(network, spread, software, machine, c)
    yield f"  head and loss, forward and backward: {MS * float(head):.3f} ms"
    if spread.mp > 1:
        group, message = Group.of(spread.mp, 1, machine), size * tokens * network.hidden
        yield (
            f"  all-reduce over mp{spread.mp} of {message / 1e6:.1f} MB at "
            f"{float(bus_bandwidth(group, machine, message)) / 1e9:.1f} GB/s, two in each direction"
        )


def _step(plan: Plan, candidate: Candidate) -> Iterator[str]:
    nodes, jitter = plan.cluster.nodes, plan.coefficients.jitter
    yield (
        f"time of one step (on {nodes} nodes all that a stage does takes 1 + {jitter:.4f} x "
        f"log2({nodes}) = {1 + jitter * math.log2(nodes):.4f} times as long as above):"
    )
    for name, value, text in candidate.time.lines():
        yield f"  {name:<16}{value:10.4f} s   = {text}"
    yield f"  {'sum':<16}{candidate.seconds:10.4f} s, {candidate.band_text}"


def _rates(plan: Plan, candidate: Candidate) -> Iterator[str]:
    workload, world = plan.workload, plan.cluster.world
    machine = plan.cluster.machine(workload.precision)
    yield (
        f"tokens/s = {workload.tokens_per_step:,} / {candidate.seconds:.4f} s = "
        f"{candidate.tokens_per_second:,.0f}; TGS = {candidate.tokens_per_device:,.1f}"
    )
    yield (
        f"MFU = {workload.model_flops:.4g} model FLOPs (full attention, recomputation not counted) "
        f"/ {candidate.seconds:.4f} s / ({world} x {float(machine.peak) / 1e12:g} TFLOP/s) = "
        f"{candidate.mfu:.1%}"
    )
    yield (
        f"collectives reach {float(machine.intra_bandwidth) / 1e9:g} GB/s in a node and "
        f"{float(machine.inter_bandwidth) / 1e9:g} GB/s per device between nodes; nodes of "
        f"{plan.cluster.devices_per_node}, mp innermost, then sharding, pipeline, data"
    )
