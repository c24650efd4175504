"""The whole arithmetic behind one layout, for `--explain`: from peak rates to days."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fourfold.plan.cluster import GIB
from fourfold.plan.layertime import TILE, head_seconds, layer_time, linear_seconds, weight_shapes
from fourfold.plan.machine import Group, bus_bandwidth
from fourfold.plan.planner import Candidate, Plan
from fourfold.plan.report import Economics

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
        f"{candidate.most_bytes / GIB:.3f} (+{candidate.memory_band:.0%}), of "
        f"{candidate.capacity / GIB:.1f}: {candidate.fit}"
    )


def _layer(plan: Plan, candidate: Candidate) -> Iterator[str]:
    """One layer, one micro-batch: what the step's per-layer seconds are made of."""
    subject, spread, c = plan.subject, candidate.spread, plan.coefficients
    network, software = subject.network, subject.software
    machine = plan.cluster.machine(subject.precision)
    tokens = spread.micro_batch * network.seq
    size = software.compute_bytes
    yield f"one layer, one micro-batch of {spread.micro_batch} x {network.seq} = {tokens} tokens:"
    yield (
        f"  a product of (m, k) and (k, n) runs at {float(machine.peak) / 1e12:g} TFLOP/s x "
        f"{float(machine.sustained):.3f} / (1 + {c.wave:.3f} x {machine.units} x {TILE} / (m n)) / "
        f"(1 + {c.inner:.1f} / k), or as fast as its operands can be moved"
    )
    for name, (n, k) in weight_shapes(network, spread.mp).items():
        forward, backward = linear_seconds(tokens, n, k, machine, c, size)
        yield (
            f"  {name:<6}m {tokens} n {float(n):.0f} k {float(k):.0f}: "
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
        group = Group.of(spread.mp, 1, machine)
        yield (
            f"  all-reduce over mp{spread.mp} of {size * tokens * network.hidden / 1e6:.1f} MB at "
            f"{float(bus_bandwidth(group, machine)) / 1e9:.1f} GB/s, two in each direction"
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
    subject, world = plan.subject, plan.cluster.world
    machine = plan.cluster.machine(subject.precision)
    yield (
        f"tokens/s = {subject.tokens_per_step:,} / {candidate.seconds:.4f} s = "
        f"{candidate.tokens_per_second:,.0f}; TGS = {candidate.tokens_per_device:,.1f}"
    )
    yield (
        f"MFU = {subject.model_flops:.4g} model FLOPs (full attention, recomputation not counted) "
        f"/ {candidate.seconds:.4f} s / ({world} x {float(machine.peak) / 1e12:g} TFLOP/s) = "
        f"{candidate.mfu:.1%}"
    )
    yield (
        f"collectives reach {float(machine.intra_bandwidth) / 1e9:g} GB/s in a node and "
        f"{float(machine.inter_bandwidth) / 1e9:g} GB/s per device between nodes; nodes of "
        f"{plan.cluster.devices_per_node}, mp innermost, then sharding, pipeline, data"
    )
