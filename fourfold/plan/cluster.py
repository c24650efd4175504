"""Clusters: presets, the notation `16x8xA100-80G`, and `cluster.yaml`.

Rates of matrix products are the makers' dense figures (metrics/peaks.py); `sustained` is the share
of them that large products reach. Link bandwidths are what collectives were measured to reach, not
what the cable could carry. Every number can be replaced in a `cluster.yaml`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import yaml
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fourfold.atomic_files import replace_text
from fourfold.config.findings import did_you_mean, nearest
from fourfold.cost.terms import Numbers
from fourfold.errors import UserError
from fourfold.metrics.peaks import PEAKS
from fourfold.plan.machine import Machine

Positive = Annotated[float, Gt(0), Le(1e18)]
NotNegative = Annotated[float, Ge(0), Le(1e18)]
Share = Annotated[float, Gt(0), Le(1)]
Count = Annotated[int, Ge(1), Le(2**20)]

LARGEST_FILE = 1 << 20
MOST_DEVICES = 2**20
GIB = 2.0**30
UNCHECKED_BAND = 0.35  # of a device no published run was available for


class MemoryBand(NamedTuple):
    """By how much of what is predicted, the reserve counted, runs held more, and less."""

    above: Numbers
    below: Numbers


# The extremes over published runs of that kind (--self-test). A run that ran out of memory held at
# least what its device has; of pipelines one such sets the upper end. On a processor: our own runs.
STAGE_BAND, PIPELINE_BAND = MemoryBand(0.33, 0.11), MemoryBand(0.42, 0.11)
CPU_BAND = MemoryBand(0.23, 0.08)


class Device(BaseModel):
    """One accelerator (or processor) and its links."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(description="What to call it.")
    memory_gib: Positive = Field(description="Memory of one device, as it reports it.")
    peak_tflops: Positive = Field(description="Dense products in 16-bit numbers.")
    peak_tflops_fp32: Positive = Field(description="Products in fp32.")
    sustained: Share = Field(description="Share of the peak that large products reach.")
    sustained_fp32: Share = Field(default=0.9, description="The same in fp32.")
    units: Count = Field(description="Multiprocessors.")
    memory_gbps: Positive = Field(description="Memory bandwidth, GB/s.")
    intra_gbps: Positive = Field(description="Bus bandwidth of collectives in a node, GB/s.")
    inter_gbps: Positive = Field(description="Network share of one device, GB/s.")
    launch_us: NotNegative = Field(default=20.0, description="Host time to issue one kernel.")
    intra_latency_us: NotNegative = Field(default=6.0, description="Per hop inside a node.")
    inter_latency_us: NotNegative = Field(default=17.0, description="Per hop between nodes.")
    band: Share = Field(
        default=UNCHECKED_BAND, description="How much longer than predicted steps may take."
    )
    band_below: Share | None = Field(
        default=None, description="How much shorter they may be; null: as much."
    )
    memory_band: NotNegative | None = Field(
        default=None,
        description="How much more memory than predicted may be needed; null: by kind of run.",
    )
    has_bf16: bool = Field(default=True, description="False: 16-bit products are fp16 only.")
    is_cpu: bool = Field(default=False, description="A processor: gloo, no flash with dropout.")
    cores: Annotated[int, Ge(0), Le(2**20)] = Field(
        default=0, description="Cores that the ranks of a node share; 0: each has its own device."
    )
    layer_factor: Positive = Field(
        default=1.0, description="Speed of element-wise work in a layer over memory_gbps."
    )
    logit_factor: Positive = Field(default=1.0, description="The same of the loss.")
    update_factor: Positive = Field(default=1.0, description="The same of the optimizer.")
    step_factor: Positive = Field(
        default=1.0, description="Seconds of a whole network over those of its parts."
    )


def _device(
    name: str,
    memory_gib: float,
    sustained: float,
    units: int,
    memory_gbps: float,
    intra_gbps: float,
    inter_gbps: float,
    band: float = UNCHECKED_BAND,
    band_below: float | None = None,
) -> Device:
    peaks = PEAKS[name.partition("-")[0]]
    return Device(
        band=band,
        band_below=band_below,
        name=name,
        memory_gib=memory_gib,
        peak_tflops=peaks.fp16,
        peak_tflops_fp32=peaks.tf32 or peaks.fp32,
        sustained=sustained,
        units=units,
        memory_gbps=memory_gbps,
        intra_gbps=intra_gbps,
        inter_gbps=inter_gbps,
        has_bf16=peaks.bf16 is not None,
    )


# Memory is what the driver reports, less than the name says. A800 and H800 are A100 and H100 with
# fewer links. Bands are ninth deciles over check rows (benchmarks/plan.py --fit); H100, with fewer
# rows, has that of A100. On V100 runs took 3 to 42 % longer than predicted, and none was faster.
PRESETS: dict[str, Device] = {
    device.name: device
    for device in (
        _device("V100-16G", 15.7, 0.75, 80, 900, 135, 3.1, 0.45, 0.05),
        _device("V100-32G", 31.7, 0.75, 80, 900, 135, 3.1, 0.45, 0.05),
        _device("A100-40G", 39.4, 0.862, 108, 1555, 229, 25, 0.23, 0.10),
        _device("A100-80G", 79.1, 0.862, 108, 2039, 229, 25, 0.23, 0.10),
        _device("A800-80G", 79.1, 0.862, 108, 2039, 153, 25),
        _device("H100-80G", 79.1, 0.664, 132, 3350, 370, 50, 0.23, 0.10),
        _device("H800-80G", 79.1, 0.664, 132, 3350, 164, 50),
        _device("H200", 139.8, 0.664, 132, 4800, 370, 50),
        _device("B200", 178.3, 0.664, 148, 7700, 650, 50),
        _device("MI300X", 191.5, 0.5, 304, 5300, 310, 50),
    )
}


class Cluster(BaseModel):
    """`nodes` x `devices_per_node` of one device."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    nodes: Count = 1
    devices_per_node: Count = 8
    disk_gbps: Positive = 2.0
    device_mtbf_hours: Positive = 50000.0
    restart_minutes: NotNegative = 10.0
    measured_on: str | None = Field(
        default=None, description="Host and processor or GPU the figures were measured on."
    )
    device: Device
    shared_by: dict[Count, Device] = Field(
        default={}, description="A processor as other numbers of ranks than this find it."
    )

    @model_validator(mode="after")
    def _check_size(self) -> Cluster:
        if self.world > MOST_DEVICES:
            raise ValueError(f"{self.world} devices are more than {MOST_DEVICES}")
        return self

    @property
    def world(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def usable_bytes(self) -> float:
        return self.device.memory_gib * GIB

    def memory_band(self, pp: Numbers) -> MemoryBand:
        """Of layouts with `pp` pipeline ranks."""
        device = self.device
        if device.is_cpu:
            found = CPU_BAND
        else:
            piped = np.asarray(pp) > 1
            found = MemoryBand(
                *(
                    np.where(piped, many, one)
                    for many, one in zip(PIPELINE_BAND, STAGE_BAND, strict=True)
                )
            )
        above = found.above if device.memory_band is None else device.memory_band
        return MemoryBand(above + np.zeros(np.shape(pp)), found.below + np.zeros(np.shape(pp)))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices_per_node}x{self.device.name}"

    def with_world(self, world: int) -> Cluster:
        """`world` of the same devices, in nodes as full as they can be filled alike: 12 in nodes
        of 8 are two of 6."""
        most = min(self.devices_per_node, world)
        per_node = next(count for count in range(most, 0, -1) if world % count == 0)
        nodes = world // per_node
        return self.model_copy(
            update={
                "nodes": nodes,
                "devices_per_node": per_node,
                "device": self.shared_by.get(per_node, self.device),
            }
        )

    def machine(self, precision: Literal["float32", "bfloat16", "float16"]) -> Machine:
        device = self.device
        low = precision == "float16" or (precision == "bfloat16" and device.has_bf16)
        return Machine(
            peak=1e12 * (device.peak_tflops if low else device.peak_tflops_fp32),
            sustained=device.sustained if low else device.sustained_fp32,
            units=device.units,
            memory_bandwidth=1e9 * device.memory_gbps,
            memory_bytes=self.usable_bytes,
            node=self.devices_per_node,
            intra_bandwidth=1e9 * device.intra_gbps,
            inter_bandwidth=1e9 * device.inter_gbps,
            launch=1e-6 * device.launch_us,
            intra_latency=1e-6 * device.intra_latency_us,
            inter_latency=1e-6 * device.inter_latency_us,
            layer_factor=device.layer_factor,
            logit_factor=device.logit_factor,
            update_factor=device.update_factor,
            step_factor=device.step_factor,
            serial=device.is_cpu,
            crowd=max(1.0, self.devices_per_node / device.cores) if device.cores else 1.0,
        )


_NOTATION = re.compile(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?([A-Za-z][A-Za-z0-9.+_-]*)", re.ASCII)
_SPELLINGS = {"A100": "A100-80G", "V100": "V100-32G", "H100": "H100-80G"}
_SPELLINGS |= {"A800": "A800-80G", "H800": "H800-80G"}


def parse_cluster(text: str) -> Cluster:
    """`16x8xA100-80G` (nodes x devices x device), `8xH100`, `V100-32G`, or a cluster.yaml."""
    if text.endswith((".yaml", ".yml")):
        return load_cluster(Path(text))
    match = _NOTATION.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"--cluster {text!r} is not NODESxDEVICESxDEVICE such as 16x8xA100-80G, nor the path "
            "of a cluster.yaml; `fourfold doctor` writes one for this machine"
        )
    first, second, name = match.groups()
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    if not 1 <= nodes * per_node <= MOST_DEVICES:
        raise UserError(
            f"--cluster {text!r}: {nodes * per_node} devices are not between 1 and {MOST_DEVICES}"
        )
    if name.upper() == "CPU":
        from fourfold.plan.doctor import this_cpu

        return Cluster(nodes=nodes, devices_per_node=per_node, device=this_cpu(per_node))
    if second is None and per_node > 8 and per_node % 8 == 0:
        nodes, per_node = per_node // 8, 8
    return Cluster(nodes=nodes, devices_per_node=per_node, device=find_device(name))


def find_device(name: str) -> Device:
    plain = name.upper().replace("GB", "G").replace("-SXM", "")
    plain = _SPELLINGS.get(plain, plain)
    if plain not in PRESETS:
        meant = nearest(plain, list(PRESETS))
        raise UserError(
            f"device {name!r} is unknown{did_you_mean(meant)}; known are {', '.join(PRESETS)} and "
            "CPU (this one); any other can be described in a cluster.yaml"
        )
    return PRESETS[plain]


def load_cluster(path: Path) -> Cluster:
    """A cluster file; `device` may be a preset's name, or a preset with some numbers replaced."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    if len(raw) > LARGEST_FILE:
        raise UserError(f"{path} is larger than any cluster description; check the path")
    try:
        values = yaml.safe_load(raw.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold the keys nodes, devices_per_node and device")
    device = values.get("device")
    if isinstance(device, str):
        values["device"] = find_device(device).model_dump()
    elif isinstance(device, dict) and isinstance(device.get("preset"), str):
        changed = {key: value for key, value in device.items() if key != "preset"}
        values["device"] = find_device(device["preset"]).model_dump() | changed
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}") from error


def save_cluster(cluster: Cluster, path: Path, heading: str) -> None:
    """Write `cluster` with a comment for each number."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for name in ("nodes", "devices_per_node", "disk_gbps", "device_mtbf_hours", "restart_minutes"):
        lines.append(f"{name}: {_shown(getattr(cluster, name))}")
    lines.append(f"measured_on: {json.dumps(cluster.measured_on)}")
    lines += ["device:", *_device_lines(cluster.device, "  ")]
    if cluster.shared_by:
        lines.append("shared_by:  # the device as each of other numbers of ranks finds it")
    for ranks, device in cluster.shared_by.items():
        lines += [f"  {ranks}:", *_device_lines(device, "    ")]
    replace_text(path, "\n".join(lines) + "\n")


def _device_lines(device: Device, indent: str) -> list[str]:
    return [
        f"{indent}{name}: {_shown(getattr(device, name))}  # {field.description}"
        for name, field in Device.model_fields.items()
    ]


def _shown(value: object) -> object:
    if value is None:
        return "null"
    return float(f"{value:.6g}") if isinstance(value, float) else value
