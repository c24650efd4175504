"""What one device and its links can do, as numbers the cost model computes with.

A link moves a message in latency + bytes / bandwidth, so its effective bandwidth grows with the
message; that curve is what makes small collectives expensive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fourfold.cost.terms import Numbers


@dataclass(frozen=True)
class Machine:
    peak: Numbers  # FLOP/s of matrix products in the run's precision, as the maker states it
    sustained: Numbers  # share of the peak that large products reach
    units: Numbers  # multiprocessors: products smaller than a wave over them waste some
    memory_bandwidth: Numbers  # bytes/s
    memory_bytes: Numbers
    node: Numbers  # devices per node
    intra_bandwidth: Numbers  # bytes/s per device inside a node, bus bandwidth of a collective
    inter_bandwidth: Numbers  # bytes/s per device between nodes
    launch: Numbers  # seconds the host needs to issue one kernel
    intra_latency: Numbers  # seconds per hop of a ring
    inter_latency: Numbers
    layer_factor: Numbers = 1.0  # speed of element-wise work in a layer over the memory's
    logit_factor: Numbers = 1.0  # and of the loss, and of the optimizer
    update_factor: Numbers = 1.0
    step_factor: Numbers = 1.0  # how much longer a whole network takes than its parts
    serial: Numbers = False  # the host is the device: issuing an operation adds to running it
    crowd: Numbers = 1.0  # ranks that share a core, if more than one

    @property
    def layer_bandwidth(self) -> Numbers:
        return self.memory_bandwidth * self.layer_factor


def machine_columns(machines: Sequence[Machine]) -> Machine:
    values: dict[str, Any] = {
        field.name: np.array([getattr(machine, field.name) for machine in machines], dtype=float)
        for field in fields(Machine)
    }
    return Machine(**values)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them share a node."""

    size: Numbers
    per_node: Numbers

    @staticmethod
    def of(size: Numbers, stride: Numbers, machine: Machine) -> Group:
        """`size` ranks, neighbours `stride` apart, nodes filled in rank order."""
        in_node = np.maximum(1, np.floor(machine.node / stride))
        return Group(size, np.minimum(size, in_node))

    @property
    def crosses_nodes(self) -> Numbers:
        return np.asarray(self.per_node) < self.size


def bus_bandwidth(group: Group, machine: Machine) -> Numbers:
    """Bytes/s: between nodes a group has the network shares of its ranks in one node."""
    across = np.minimum(group.per_node * machine.inter_bandwidth, machine.intra_bandwidth)
    return np.where(group.crosses_nodes, across, machine.intra_bandwidth)


def _latency(group: Group, machine: Machine) -> Numbers:
    """A ring passes a piece from rank to rank; nodes are entered and left once each."""
    nodes = group.size / group.per_node
    inside = machine.intra_latency * (group.per_node - 1)
    return inside + np.where(group.crosses_nodes, machine.inter_latency * (nodes - 1), 0.0)


def gather_seconds(
    bytes_: Numbers, group: Group, machine: Machine, messages: Numbers = 1
) -> Numbers:
    """All-gather or reduce-scatter of `bytes_` in all, as `messages` messages."""
    moved = bytes_ * (group.size - 1) / group.size
    seconds = messages * _latency(group, machine) + moved / bus_bandwidth(group, machine)
    return np.where(np.asarray(group.size) > 1, seconds, 0.0)


def all_reduce_seconds(
    bytes_: Numbers, group: Group, machine: Machine, messages: Numbers = 1
) -> Numbers:
    return 2 * gather_seconds(bytes_, group, machine, messages)


def send_seconds(bytes_: Numbers, group: Group, machine: Machine) -> Numbers:
    """One message to the next rank of the group; the slowest pair sets the pace."""
    crosses = group.crosses_nodes
    bandwidth = np.where(crosses, machine.inter_bandwidth, machine.intra_bandwidth)
    latency = np.where(crosses, machine.inter_latency, machine.intra_latency)
    return np.where(np.asarray(group.size) > 1, latency + bytes_ / bandwidth, 0.0)
