"""`fourfold doctor`: what this machine can do, measured, as a cluster description."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fourfold.cost.workload import Network, Software, Spread
from fourfold.plan.cluster import (
    GIB,
    UNCHECKED_BAND,
    Cluster,
    Device,
    find_device,
)
from fourfold.plan.layertime import (
    BACKWARD_KERNELS,
    LOGIT_MOVES,
    TILE,
    head_seconds,
    layer_time,
)
from fourfold.plan.machine import Machine, load_coefficients
from fourfold.plan.measuring import (
    HEAD_TOKENS,
    LAYER,
    LAYER_BATCHES,
    LAYER_SEQ,
    NETWORK,
    NETWORK_BATCH,
    UPDATED,
    Measured,
    Rates,
    disk_rate,
    measure,
    measure_together,
)
from fourfold.plan.steptime import OPTIMIZER_BYTES
from fourfold.processors import num_processors


@dataclass(frozen=True)
class Findings:
    cluster: Cluster
    lines: list[str]


def examine(processes: int, seconds: float, directory: Path) -> Findings:
    """Measure with `processes` at once; `seconds` is how long each measurement may take.

    On a processor what one rank can do depends on how many there are, so fewer are tried too.
    """
    disk = disk_rate(directory)
    counts = [processes]
    if not torch.cuda.is_available():
        counts += [2**power for power in range(processes.bit_length()) if 2**power < processes]
    found = {count: measure_together(count, seconds) for count in counts}
    devices = {count: _device(found[count], count) for count in counts}
    cluster = Cluster(
        nodes=1,
        devices_per_node=processes,
        disk_gbps=disk / 1e9,
        measured_on=f"{platform.node()}, {hardware()}",
        device=devices.pop(processes),
        shared_by=dict(sorted(devices.items())),
    )
    lines = list(_lines(cluster, found[processes], processes))
    for count, device in cluster.shared_by.items():
        lines.append(
            f"with {count} process(es): {1e3 * device.peak_tflops_fp32:.0f} GFLOP/s each, memory "
            f"{device.memory_gbps:.1f} GB/s"
        )
    return Findings(cluster, lines)


def this_cpu(processes: int) -> Device:
    """A quick look at this processor for `--cluster NxCPU`: no processes, no disk."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_processors() // processes))
    try:
        return _device(measure(torch.device("cpu"), 0.05), processes)
    finally:
        torch.set_num_threads(threads)


def crowded(device: Device, processes: int) -> Device:
    """What a rank has left of its core when it shares it with others."""
    share = min(1.0, num_processors() / processes)
    slower = ("peak_tflops", "peak_tflops_fp32", "memory_gbps")
    changed = {name: share * getattr(device, name) for name in slower}
    return device.model_copy(update=changed | {"launch_us": device.launch_us / share})


def _device(found: Measured, processes: int) -> Device:
    units, rate = _fit_units(found.rates)
    _, low_rate = _fit_units(found.low_rates)
    latency, bandwidth = _fit_link(found.messages, processes)
    device = _describe(processes).model_copy(
        update={
            "peak_tflops_fp32": rate / 1e12,
            "peak_tflops": low_rate / 1e12,
            "units": max(1, round(units)),
            "memory_gbps": found.memory_bandwidth / 1e9,
            "launch_us": 1e6 * found.launch,
            "intra_gbps": bandwidth / 1e9,
            "inter_gbps": bandwidth / 1e9,
            "intra_latency_us": 1e6 * latency,
            "inter_latency_us": 1e6 * latency,
        }
    )
    if not device.is_cpu:
        return device
    machine = Cluster(device=device, devices_per_node=processes).machine("float32")
    device = device.model_copy(update=_factors(machine, found))
    whole = Cluster(device=device, devices_per_node=processes).machine("float32")
    return crowded(device.model_copy(update={"step_factor": _step_factor(whole, found)}), processes)


def _factors(machine: Machine, found: Measured) -> dict[str, float]:
    """What explains the times of whole pieces of a step. A processor's caches make element-wise
    work faster than its memory, its functions cost arithmetic, and every operation has a launch
    cost: a copy alone would not show that."""
    few, many = (_layer(batch, machine, found) for batch in LAYER_BATCHES)
    # seconds = fixed + moving / factor + issue, for few and for many tokens
    factor = (many.moving - few.moving) / max(many.left - few.left, 1e-2 * many.moving)
    issue = max(few.left - few.moving / factor, 0.0)
    kernels = load_coefficients().kernels * (1 + BACKWARD_KERNELS)
    network, spread, software = _layer_inputs(1)
    network, spread = replace(network, seq=HEAD_TOKENS), replace(spread, micro_batch=1)
    c = load_coefficients()
    head = head_seconds(network, spread, software, machine, c)
    logits = LOGIT_MOVES * HEAD_TOKENS * network.vocab / machine.memory_bandwidth
    left = max(found.head_seconds - (head - logits), 0.05 * found.head_seconds)
    moved = c.optimizer * OPTIMIZER_BYTES * UPDATED / machine.memory_bandwidth
    return {
        "layer_factor": float(factor),
        "launch_us": 1e6 * issue / kernels,
        "logit_factor": float(logits / left),
        "update_factor": float(moved / found.update_seconds),
    }


def _step_factor(machine: Machine, found: Measured) -> float:
    """What a whole network takes over its parts: caches and pages it has to share."""
    network, spread, software = _layer_inputs(NETWORK_BATCH)
    network = replace(network, layers=NETWORK.num_layers, seq=NETWORK.max_position_embeddings)
    c = load_coefficients()
    layer = layer_time(network, spread, software, machine, c).all
    parts = network.layers * (layer.device + layer.host)
    return float(
        found.network_seconds / (parts + head_seconds(network, spread, software, machine, c))
    )


@dataclass(frozen=True)
class LayerShare:
    """Seconds of the timed layer: what is left without its products, and what moving would take
    at the memory's own speed."""

    left: float
    moving: float


def _layer(batch: int, machine: Machine, found: Measured) -> LayerShare:
    time = layer_time(*_layer_inputs(batch), machine, load_coefficients()).all
    left = found.layer_seconds[batch] - float(time.products + time.attention)
    return LayerShare(left, float(time.elementwise))


def _layer_inputs(batch: int) -> tuple[Network, Spread, Software]:
    network = Network.of(LAYER, LAYER_SEQ)
    return network, Spread(micro_batch=batch), Software(compute_bytes=4, residual_bytes=4)


def _describe(processes: int) -> Device:
    """What needs no measuring: names, memory, and the links of a machine without several GPUs."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        memory = torch.cuda.get_device_properties(0).total_memory
        return _plain_device(name.replace(" ", "-"), memory / GIB, is_cpu=False)
    return plain_cpu(processes)


def plain_cpu(processes: int) -> Device:
    return _plain_device("CPU", _host_bytes() / processes / GIB, is_cpu=True)


def _plain_device(name: str, memory_gib: float, *, is_cpu: bool) -> Device:
    like = find_device("A100-80G")
    return like.model_copy(
        update={
            "name": name,
            "memory_gib": memory_gib,
            "sustained": 1.0,
            "sustained_fp32": 1.0,
            "intra_gbps": 2.0 if is_cpu else like.intra_gbps,
            "inter_gbps": 1.0 if is_cpu else like.inter_gbps,
            "intra_latency_us": 50.0 if is_cpu else like.intra_latency_us,
            "inter_latency_us": 100.0 if is_cpu else like.inter_latency_us,
            "band": UNCHECKED_BAND,
            "band_below": None,
            "is_cpu": is_cpu,
            "cores": num_processors() if is_cpu else 0,
        }
    )


def hardware() -> str:
    """What computes here, by name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _host_bytes() -> int:
    """Memory of this machine, or of the container that holds us."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit)) if limit.isdecimal() else total


def _fit_units(rates: Rates) -> tuple[float, float]:
    """The waste of small products and the rate of large ones that fit the measured rates best."""
    c = load_coefficients()
    sizes = np.array([m * n for m, n, _ in rates], dtype=float)
    inner = np.array([1 + c.inner / k for _, _, k in rates])
    measured = np.array(list(rates.values()))
    best = (np.inf, 1.0, float(measured.max()))
    for units in np.geomspace(1, 300, 60):
        whole = measured * inner * (1 + c.wave * units * TILE / sizes)
        rate = float(np.exp(np.log(whole).mean()))
        error = float(np.abs(np.log(whole / rate)).sum())
        best = min(best, (error, float(units), rate))
    return best[1], best[2]


def _fit_link(messages: dict[int, float], processes: int) -> tuple[float, float]:
    """Latency per hop and bandwidth of seconds = 2 (n - 1) (latency + bytes / n / bandwidth)."""
    if not messages:
        device = _describe(processes)
        return device.intra_latency_us * 1e-6, device.intra_gbps * 1e9
    hops = 2 * (processes - 1)
    latency = min(messages.values()) / hops
    largest = max(messages)
    moving = max(messages[largest] - hops * latency, 1e-6)
    return latency, hops * largest / processes / moving


def _lines(cluster: Cluster, found: Measured, processes: int) -> Iterator[str]:
    device = cluster.device
    yield f"{processes} process(es) on {device.name}, {device.memory_gib:.1f} GiB each"
    for name, rates in (("fp32", found.rates), ("bf16", found.low_rates)):
        listed = ", ".join(f"{m}x{n}x{k} {rate / 1e9:.0f}" for (m, n, k), rate in rates.items())
        yield f"products in {name}, GFLOP/s: {listed}"
    listed = ", ".join(
        f"{batch * LAYER_SEQ} tokens {1e3 * took:.1f} ms"
        for batch, took in found.layer_seconds.items()
    )
    yield (
        f"one layer, hidden {LAYER.hidden_size}, forward and backward: {listed}; head and loss "
        f"{HEAD_TOKENS} tokens {1e3 * found.head_seconds:.1f} ms"
    )
    yield (
        f"a network of {NETWORK.num_layers} such layers: {1e3 * found.network_seconds:.1f} ms, "
        f"{device.step_factor:.2f} of the sum of its parts"
    )
    yield (
        f"memory {found.memory_bandwidth / 1e9:.1f} GB/s copying; {device.launch_us:.1f} us per "
        f"operation; {1e9 * found.update_seconds / UPDATED:.1f} ns to update a parameter"
    )
    yield f"disk {cluster.disk_gbps:.2f} GB/s"
    if found.messages:
        listed = ", ".join(
            f"{size >> 10} KiB {1e3 * took:.2f} ms" for size, took in found.messages.items()
        )
        yield f"all-reduce over {processes}: {listed}"
    else:
        yield "collectives not measured: give --nproc 2 or more; typical figures are written"
