"""Programs that others published runs of, and the machines they ran on.

A source says what its program did (attention kernels, gradient types, rank order); that is a
property of the program, known from its code, and not fitted. A source's rows are one family, apart
by device and number format where these decide the rate of products.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fourfold.cost.workload import Software
from fourfold.plan.cluster import PRESETS, Cluster, Device, find_device
from fourfold.plan.machine import Machine

# The first name that occurs in a source counts.
FAMILIES = {
    "vTrain MICRO24 ground_truth_single": "vtrain single",
    "vTrain MICRO24 ground_truth_multi": "vtrain multi",
    "Korthikanti": "korthikanti",
    "Megatron-LM SC21": "sc21",
    "Megatron-LM golden": "megatron goldens",
    "Megatron-LM README": "megatron h100",
    "BigScience experiments/gpt2": "bigscience v100",
    "BigScience": "bloom",
    "MegaScale": "megascale",
    "MT-NLG": "mt-nlg",
    "FleetX release": "fleetx readme",
    "Megatron-LM 0bb597b4": "fleetx readme",
    "seed002": "seeds",
    "PaddleFleetX": "seeds",
    "PaddleNLP": "paddlenlp",
    "DeepSpeed autotuning": "deepspeed v100",
    "litgpt": "litgpt",
    "torchtitan": "torchtitan",
    "nanotron": "nanotron",
}
# Dense TFLOP/s of products in 8 and in 4 bits, as NVIDIA states them.
LOW_PEAKS = {
    "H100": {8: 1979.0},
    "B200": {8: 4500.0, 4: 9000.0},
    "GB200": {8: 5000.0, 4: 10000.0},
    "GB300": {8: 5000.0, 4: 15000.0},
}


def bits_of(precision: str) -> int:
    """Of the numbers that a layer's products multiply."""
    words = precision.lower()
    return 8 if "fp8" in words else 4 if "fp4" in words else 16


def family_of(source: str, gpu: str, precision: str) -> str:
    bits = bits_of(precision)
    if source.startswith("llm-foundry"):
        kind = "h100" if gpu.startswith("H100") else "a100"
        return f"llm-foundry {kind}" + (" fp8" if bits == 8 else "")
    if source.startswith(("Megatron-Bridge", "NeMo")):
        return f"megatron {'h100' if 'H100' in gpu else 'blackwell'} fp{bits}"
    found = next((name for key, name in FAMILIES.items() if key.lower() in source.lower()), "other")
    return f"{found} fp8" if found == "torchtitan" and bits == 8 else found


# -- programs -------------------------------------------------------------------------------------

MEGATRON = Software(
    flash=False, overlap=0.0, gradient_bytes=2, reduce_bytes=2, data_inside_pipeline=True,
    split_sends=True, logit_bytes=6,
)  # fmt: skip
MEGATRON_CORE = replace(
    MEGATRON, flash=True, overlap=1.0, gradient_bytes=4, reduce_bytes=4, fused=True, logit_bytes=8
)
# NVIDIA's on H100 and later: cuDNN's attention, and messages of tensor parallelism that run beside
# products (--tp-comm-overlap).
MEGATRON_TODAY = replace(MEGATRON_CORE, attention_rate=2.0, tensor_overlap=0.7)
FSDP = Software(
    flash=True, overlap=1.0, weight_bytes=0, gradient_bytes=4, reduce_bytes=2, logit_bytes=6,
)  # fmt: skip
PADDLE = replace(MEGATRON, split_sends=False)
# BLOOM's: with launches that block (CUDA_LAUNCH_BLOCKING=1, without which its runs hung).
BLOOM = replace(MEGATRON, blocking=True)


def software_of_run(family: str, row: dict[str, str]) -> Software:
    words = (row["source"] + row["model"] + row["precision"]).lower()
    if family.startswith("llm-foundry"):
        return FSDP
    if family == "litgpt":  # weights, gradients and moments all in bf16
        return replace(FSDP, weight_bytes=2, master_bytes=0, moment_bytes=4, gradient_bytes=2)
    if family.startswith("torchtitan"):
        # Logits in bf16 and fp32, the softmax and its gradient, all at once.
        return replace(FSDP, fused="compile" in words, logit_bytes=14)
    if family in ("nanotron", "other"):
        return replace(FSDP, fused="compile" in words)
    if family == "bloom":
        # In bf16 the gradients of a micro-batch are added to others in fp32, which are kept whole.
        wide = {"gradient_bytes": 6, "reduce_bytes": 4} if row["precision"] == "bf16" else {}
        return replace(BLOOM, **wide)
    if family == "korthikanti":  # gradients add up in fp32
        return replace(MEGATRON, gradient_bytes=4, reduce_bytes=4)
    if family == "megatron goldens":
        own_layers = "gpt3_mcore_tp" in row["source"]  # without Transformer Engine: no flash
        slow = "deterministic" in row["metric"]
        return replace(MEGATRON_CORE, flash=not own_layers, deterministic=slow)
    if family.startswith(("megatron h100", "megatron blackwell")):
        return MEGATRON_TODAY
    if family in ("seeds", "paddlenlp", "fleetx readme"):
        return PADDLE
    return MEGATRON


# -- machines -------------------------------------------------------------------------------------

_GPU = re.compile(
    r"(?:DGX-)?(V100|A100|A800|H100|H800|H200|GB200|GB300|B200|MI300X)(?:-(\d+)GB)?.*"
)
_RACK = 72  # devices that NVLink connects in a GB200 or GB300


@dataclass(frozen=True)
class RunPlace:
    """Where a run ran, and by which measured rates its products go.

    `rate` names the share of the 16-bit peak that large products reach, `low_rate` that of the
    peak below 16 bits for the products of the layers; both are fitted where there are rows, and
    the device's own share counts where not.
    """

    device: str
    machine: Machine
    peak_tflops: float
    rate: str
    low_rate: str
    low_peak: float  # FLOP/s, 0 in 16 bits


def place_of(row: dict[str, str], family: str) -> RunPlace | None:
    """None for a device that is not named."""
    gpu, precision = row["gpu"], row["precision"]
    match = _GPU.match(gpu)
    if match is None:
        return None
    kind, size = match[1], match[2]
    device = _device(kind, size, row, family)
    bits = bits_of(precision)
    per_node = 4 if family == "bigscience v100" else _RACK if kind.startswith("GB") else 8
    return RunPlace(
        device=device.name,
        machine=Cluster(nodes=1, devices_per_node=per_node, device=device).machine("float16"),
        peak_tflops=device.peak_tflops,
        rate=_rate(kind, size, family),
        low_rate="" if bits == 16 else f"{'H100' if kind == 'H100' else 'Blackwell'} fp{bits}",
        low_peak=0.0 if bits == 16 else 1e12 * LOW_PEAKS[kind][bits],
    )


def _rate(kind: str, size: str | None, family: str) -> str:
    if kind != "H100":
        return kind
    if size == "96":
        return "H100 at 500 W"
    # FSDP as of early 2023, with that year's products: 15 % slower than Megatron's of 2024.
    return "H100 in 2023" if family.startswith("llm-foundry") else "H100"


def _device(kind: str, size: str | None, row: dict[str, str], family: str) -> Device:
    if kind == "H100" and size == "96":
        # HBM2e and a limit of 500 of 700 W, which large products feel.
        return find_device("H100").model_copy(
            update={"memory_gib": 95.0, "memory_gbps": 2400.0, "sustained": 0.52}
        )
    if kind.startswith("GB"):
        more = {"name": kind, "memory_gib": 276.0 if kind == "GB300" else 184.0}
        return find_device("B200").model_copy(update=more | {"peak_tflops": 2500.0})
    device = find_device(f"{kind}-{size}G" if f"{kind}-{size}G" in PRESETS else kind)
    if row["gpu"] == "A100":  # vTrain's cluster: four 200 Gb/s adapters for eight devices
        return device.model_copy(update={"inter_gbps": 12.5})
    if family == "bloom":
        # Jean Zay: four 100 Gb/s adapters for eight devices, and two boards of four devices each
        # with NVLink inside, between which there are four lanes of PCI Express of 25 GB/s.
        wide = int(row["tp"]) > 4
        changed = {"inter_gbps": 6.25, "intra_gbps": 100.0 if wide else device.intra_gbps}
        return device.model_copy(update=changed)
    return device
