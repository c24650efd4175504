"""The numbers the time model computes with: a machine, its links, and fitted coefficients.

A link moves a message in latency + bytes / bandwidth, so its effective bandwidth grows with the
message; that curve is what makes small collectives expensive. Between nodes the bandwidth itself
depends on the message: many adapters are only filled by large ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
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
    linear_gain: Numbers = 1.0  # rate of a layer's products over that in 16 bits, if below 16
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


# Bytes/s of a node in collectives that were measured at the size of activations, 50 MB and less,
# on four adapters of 25 GB/s (vTrain's runs with mp16; NVIDIA/nccl-tests issue 119). What a node
# has beyond that has not been shown at that size: half of it counts at RAIL_BYTES.
SHOWN_BANDWIDTH = 100e9
RAIL_BYTES = 256e6


def bus_bandwidth(group: Group, machine: Machine, message: Numbers) -> Numbers:
    """Bytes/s of a collective of `message` bytes: between nodes a group has the network shares of
    its ranks in one node."""
    across = group.per_node * machine.inter_bandwidth
    beyond = np.maximum(across - SHOWN_BANDWIDTH, 0.0)
    filled = message / (message + RAIL_BYTES)
    across = np.minimum(across, SHOWN_BANDWIDTH) + beyond * filled
    across = np.minimum(across, machine.intra_bandwidth)
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
    bandwidth = bus_bandwidth(group, machine, bytes_ / messages)
    seconds = messages * _latency(group, machine) + moved / bandwidth
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


# -- coefficients ---------------------------------------------------------------------------------
#
# What physics does not give, fitted once on published runs. All are dimensionless or seconds,
# shared by every device and program; what differs between devices is in cluster.py. The values come
# from `python benchmarks/plan.py --fit`, which uses only the fit half of published_runs.csv (see
# published.py); docs/planning.md says how well they do on the rest. The file also holds what the
# fit gives without one family of runs, by which `--self-test` predicts that family (leave-one-out
# cross-validation).

COEFFICIENTS_FILE = Path(__file__).with_name("coefficients.json")


@dataclass(frozen=True)
class Coefficients:
    wave: float = 0.5  # of a wave of tiles that a product wastes, on average
    inner: float = 64.0  # inner dimension at which a product runs at half speed
    traffic: float = 1.5  # element-wise bytes over those a fused program would move
    scores: float = 1.0  # the same for the table of attention scores
    flash_forward: float = 0.5  # share of the sustained rate
    flash_backward: float = 0.4
    kernels: float = 40.0  # issued per layer and forward pass, without fusion
    collective_kernels: float = 1.5  # more for each rank that two all-reduces wait for
    host_sharpness: float = 4.0  # how sharply the slower of host and device decides
    send: float = 1.0  # pipeline messages: seconds over the link's own
    step_seconds: float = 0.01  # once per step: clipping, logging, the optimizer's launch
    micro_batch_seconds: float = 0.001
    optimizer: float = 1.5  # optimizer bytes over the least possible
    exposed: float = 0.3  # of communication behind compute: how much longer both take
    jitter: float = 0.02  # slowdown per doubling of the number of nodes


@dataclass(frozen=True)
class CoefficientFit:
    """What one fit finds: the coefficients, and by name of a rate (`RunPlace` in programs.py) the
    share of the peak that large products reach. Those of A100 and H100 are in cluster.PRESETS."""

    coefficients: Coefficients
    sustained: dict[str, float]


def load_coefficients(path: Path = COEFFICIENTS_FILE) -> Coefficients:
    return load_fit(path).coefficients


def load_fit(path: Path = COEFFICIENTS_FILE) -> CoefficientFit:
    """The fit to all families."""
    found = _read(path)
    return CoefficientFit(Coefficients(**found["values"]), found["sustained"])


def load_left_out(path: Path = COEFFICIENTS_FILE) -> dict[str, CoefficientFit]:
    """By family of published runs: the fit that saw none of its rows."""
    return {
        family: CoefficientFit(Coefficients(**fit["values"]), fit["sustained"])
        for family, fit in _read(path)["without"].items()
    }


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
