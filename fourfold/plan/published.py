"""Published runs of other people: what was run, and what was measured.

Each row of published_runs.csv is one measurement with its source. A source says what its program
did (attention kernels, gradient types, rank order); that is a property of the program, known from
its code, and not fitted. Rows are split into a fit part and a check part by a hash of what was
run, so that all measurements of one run are on the same side. Figures quoted from memory are never
fitted and never counted as a check.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.cost.flops import forward_flops
from fourfold.cost.terms import Floats
from fourfold.cost.workload import Network, Software, Spread, columns
from fourfold.errors import UserError
from fourfold.plan.cluster import PRESETS, Cluster, Device, find_device
from fourfold.plan.machine import Coefficients, Machine, machine_columns
from fourfold.plan.steptime import step_time_of

FILE = Path(__file__).with_name("published_runs.csv")
TIME_METRICS = {
    "iter_time_ms", "iter_time_s", "iter_time_s_median", "iter_time_s_median_deterministic_mode",
    "tokens_per_s_per_gpu", "samples_per_s_total", "hw_tflops_per_gpu", "mfu_pct",
}  # fmt: skip
MEMORY_METRICS = {
    "mem_gb": 1e9, "mem_peak_gb": 1e9, "mem_gb_nvidia_smi": 1e9,
    "mem_peak_gib": 2.0**30,
    "mem_max_allocated_bytes": 1.0, "mem_allocated_bytes_after_step": 1.0,
    "mem_max_allocated_mb": 2.0**20, "mem_max_mb": 2.0**20,
    "mem_activation_gib": 2.0**30, "mem_params_grads_opt_gib": 2.0**30,
}  # fmt: skip
# Measurements of a part: the terms of memory.py it consists of.
MEMORY_PARTS = {
    "mem_activation_gib": ("activations",),
    "mem_params_grads_opt_gib": ("weights", "gradients", "optimizer"),
    "mem_allocated_bytes_after_step": ("weights", "gradients", "optimizer"),
}
WHAT_WAS_RUN = (
    "model", "layers", "hidden", "heads", "seq", "gpu", "num_gpus", "tp", "pp", "dp",
    "micro_batch", "global_batch",
)  # fmt: skip
FITTED_FAMILIES = ("vtrain single", "vtrain multi", "llm-foundry a100", "llm-foundry h100")


@dataclass(frozen=True)
class PublishedRun:
    """One measurement. `seconds` or `bytes_` is NaN when it measured something else."""

    family: str
    source: str
    model: str
    metric: str
    value: float
    network: Network
    spread: Spread
    software: Software
    machine: Machine
    device: str
    global_batch: int
    seconds: float
    bytes_: float
    fits: bool  # False: the source says it ran out of memory
    part: str  # "fit", "check" or "quoted" (recalled, not looked up)

    @property
    def setting(self) -> tuple[object, ...]:
        """Runs with the same setting differ in their layout only, so they can be ranked."""
        return (self.family, self.device, self.network, self.spread.world, self.global_batch)


MEGATRON = Software(
    flash=False, overlap=0.0, gradient_bytes=2, reduce_bytes=2, data_inside_pipeline=True,
    split_sends=True, logit_bytes=6,
)  # fmt: skip
MEGATRON_CORE = replace(
    MEGATRON, flash=True, overlap=1.0, gradient_bytes=4, reduce_bytes=4, fused=True, logit_bytes=8
)
FSDP = Software(
    flash=True, overlap=1.0, weight_bytes=0, gradient_bytes=4, reduce_bytes=2, logit_bytes=6,
)  # fmt: skip
PADDLE = replace(MEGATRON, split_sends=False)


@lru_cache(maxsize=4)
def published_runs(path: Path = FILE) -> tuple[PublishedRun, ...]:
    """The rows a prediction can be made for; rows without a source's word on them are left out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        runs = [_run(row) for row in rows]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a table of runs: {error!r}; its columns are those of the package's "
            "published_runs.csv"
        ) from error
    return tuple(run for run in runs if run is not None)


def family_of(source: str, gpu: str) -> str:
    known = {
        "vTrain MICRO24 ground_truth_single": "vtrain single",
        "vTrain MICRO24 ground_truth_multi": "vtrain multi",
        "Korthikanti": "korthikanti",
        "Megatron-LM SC21": "sc21",
        "Megatron-LM golden": "megatron goldens",
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
    if source.startswith("llm-foundry"):
        return "llm-foundry " + ("h100" if gpu.startswith("H100") else "a100")
    return next(
        (family for name, family in known.items() if name.lower() in source.lower()), "other"
    )


def _run(row: dict[str, str]) -> PublishedRun | None:
    """None for rows that lack what a prediction needs, or measure what we do not predict."""
    metric, precision = row["metric"], row["precision"].lower()
    if row["source"].startswith("llm-foundry") and metric == "mfu_pct":
        return None  # the same measurement as its tokens per second
    wanted = metric in TIME_METRICS or metric in MEMORY_METRICS or metric == "oom"
    if not wanted or "fp8" in precision or "fp4" in precision:
        return None
    needed = ("layers", "hidden", "seq", "num_gpus", "tp", "pp", "dp", "micro_batch")
    if not all(re.fullmatch(r"\d+", row[name]) for name in needed) or not row["recompute"]:
        return None
    if not row["global_batch"] and metric not in MEMORY_METRICS:
        return None
    family = family_of(row["source"], row["gpu"])
    software = _software(family, row)
    device = _device(row["gpu"], family)
    if device is None:
        return None
    network, spread = _network(row), _spread(row, family)
    batch = int(row["global_batch"] or int(row["micro_batch"]) * int(row["dp"]))
    seconds = _seconds(metric, float(row["value"]), batch, network, spread, device)
    cluster = Cluster(
        nodes=1, devices_per_node=4 if family == "bigscience v100" else 8, device=device
    )
    return PublishedRun(
        family=family,
        source=row["source"],
        model=row["model"],
        metric=metric,
        value=float(row["value"]),
        network=network,
        spread=spread,
        software=software,
        machine=cluster.machine("float16"),
        device=device.name,
        global_batch=batch,
        seconds=seconds,
        # Without the vocabulary the largest tables of a small model are unknown.
        bytes_=MEMORY_METRICS.get(metric, np.nan) * float(row["value"]) if row["vocab"] else np.nan,
        fits=metric != "oom",
        part=_part(row, family),
    )


def _part(row: dict[str, str], family: str) -> str:
    if row["confidence"] != "from_source":
        return "quoted"
    if family not in FITTED_FAMILIES:
        return "check"
    what = ",".join(row[name] for name in WHAT_WAS_RUN)
    digest = hashlib.md5(what.encode(), usedforsecurity=False)
    return "fit" if digest.digest()[0] % 2 else "check"


# Feed-forward width over hidden, matrices in it, keys and values over heads (0: all), untied head.
_SHAPES = (
    (4.0, False, 0, False), (4.0, False, 0, True), (8 / 3, True, 0, True), (2.75, True, 4, True),
    (3.5, True, 8, True), (3.25, True, 8, True), (4.0, False, 8, True),
)  # fmt: skip


def _network(row: dict[str, str]) -> Network:
    """The shape; what the row leaves open (gated or not, tied or not) follows from the size it
    states, if it states one: the candidate with the nearest number of parameters."""
    words = row["model"].lower()
    vocab = int(row["vocab"] or 51200)
    groups = re.search(r"gqa=(\d+)", words)
    known = "swiglu" in words or "untied" in words or groups is not None
    size = 1e9 * float(row["params_b"] or 0)
    llama = any(word in words for word in ("llama", "qwen", "baichuan"))
    ratio, gated, _, untied = _SHAPES[2] if llama or "swiglu" in words else _SHAPES[0]
    kv_heads = int(groups[1]) if groups else 0
    plain = _shaped(row, vocab, (ratio, gated, kv_heads, untied or "untied" in words))
    near = abs(plain.parameters / size - 1) < 0.06 if size else True
    if known or near:
        return plain
    return min(
        (_shaped(row, vocab, shape) for shape in _SHAPES),
        key=lambda network: abs(float(network.parameters) - size),
    )


def _shaped(row: dict[str, str], vocab: int, shape: tuple[float, bool, int, bool]) -> Network:
    ratio, gated, kv_heads, untied = shape
    hidden, tp = int(row["hidden"]), int(row["tp"])
    old = not gated and not row["source"].startswith("llm-foundry")
    heads, ffn = int(row["heads"] or hidden // 128), int(ratio * hidden)
    # Models that Fourfold has no table of: what one layer of each has.
    kv = (kv_heads or heads) / heads
    matrices = 2 * hidden * hidden * (1 + kv) + (3 if gated else 2) * hidden * ffn
    biases = 0 if gated else 1
    norm = (1 + biases) * hidden
    return Network(
        layers=int(row["layers"]),
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        vocab=-(-vocab // (128 * tp)) * 128 * tp,
        seq=int(row["seq"]),
        positions=0 if gated else int(row["seq"]),
        kv_heads=kv_heads,
        gated=gated,
        tied=not untied,
        hidden_dropout=old,
        attention_dropout=old,
        divided_parameters=matrices + biases * (hidden * (1 + 2 * kv) + ffn),
        whole_parameters=2 * norm + biases * 2 * hidden,
        layer_norms=2 * norm,
        last_norm=norm,
    )


def _spread(row: dict[str, str], family: str) -> Spread:
    model, recompute = row["model"], row["recompute"]
    tp, pp, dp = int(row["tp"]), int(row["pp"]), int(row["dp"])
    stage = int(row["zero_stage"]) if row["zero_stage"] in ("1", "2", "3") else 0
    batch = int(row["global_batch"] or int(row["micro_batch"]) * dp)
    modes = {"full": "full", "selective": "core_attn", "full_attn": "full_attn"}
    virtual = re.search(r"v=(\d+)", row["source"]) or re.search(r"vpp?=(\d+)", model)
    per_chunk = re.search(r"vpp_layers=(\d+)", model)
    chunks = int(virtual[1]) if virtual else 1
    if family == "korthikanti" and pp in (8, 35):
        chunks = 3  # as its section 6 says of the 175B and 530B models
    if per_chunk:
        chunks = max(1, int(row["layers"]) // pp // int(per_chunk[1]))
    context = re.search(r"cp=(\d+)", model)
    return Spread(
        mp=tp,
        pp=pp,
        dp=1 if stage else dp,
        sharding=dp if stage else 1,
        stage=stage or 1,
        micro_batch=int(row["micro_batch"]),
        micro_batches=max(1, batch // (dp * int(row["micro_batch"]))),
        recompute=modes.get(recompute.removesuffix("+SP"), "none"),
        sequence_parallel=recompute.endswith("+SP") or "sp" in re.findall(r"\w+", model),
        schedule="Interleaved1F1B" if chunks > 1 else "1F1B",
        virtual=chunks if pp > 1 else 1,
        context=int(context[1]) if context else 1,
    )


def _software(family: str, row: dict[str, str]) -> Software:
    if family.startswith("llm-foundry"):
        return FSDP
    if family == "litgpt":  # weights, gradients and moments all in bf16
        return replace(FSDP, weight_bytes=2, master_bytes=0, moment_bytes=4, gradient_bytes=2)
    if family in ("torchtitan", "nanotron", "other"):
        compiled = "compile" in (row["source"] + row["model"] + row["precision"]).lower()
        return replace(FSDP, fused=compiled)
    if family in ("bloom", "korthikanti"):  # gradients add up in fp32
        # What nvidia-smi shows above the allocator was 8 to 11 GB on BLOOM's machine.
        shown = 9e9 if row["metric"] == "mem_gb_nvidia_smi" else 0.0
        return replace(MEGATRON, gradient_bytes=4, reduce_bytes=4, reserve_bytes=shown)
    if family == "megatron goldens":
        own_layers = "gpt3_mcore_tp" in row["source"]  # without Transformer Engine: no flash
        slow = "deterministic" in row["metric"]
        return replace(MEGATRON_CORE, flash=not own_layers, deterministic=slow)
    if family in ("seeds", "paddlenlp", "fleetx readme"):
        return PADDLE
    return MEGATRON


_GPU = re.compile(r"(V100|A100|A800|H100|H800|H200|B200|MI300X)(?:-(\d+)GB)?.*")


def _device(gpu: str, family: str) -> Device | None:
    match = _GPU.match(gpu)
    if match is None:
        return None
    kind, size = match[1], match[2]
    if kind == "H100" and size == "96":
        # HBM2e and a limit of 500 of 700 W, which large products feel.
        return find_device("H100").model_copy(
            update={"memory_gib": 96.0, "memory_gbps": 2400.0, "sustained": 0.52}
        )
    device = find_device(f"{kind}-{size}G" if f"{kind}-{size}G" in PRESETS else kind)
    if gpu == "A100":  # vTrain's cluster: four 200 Gb/s adapters for eight devices
        return device.model_copy(update={"inter_gbps": 12.5})
    if family == "bloom":  # Jean Zay: four 100 Gb/s adapters for eight devices
        return device.model_copy(update={"inter_gbps": 6.25})
    return device


def _seconds(
    metric: str, value: float, batch: int, network: Network, spread: Spread, device: Device
) -> float:
    tokens = batch * network.seq
    if metric == "iter_time_ms":
        return value / 1e3
    if metric.startswith("iter_time_s"):
        return value
    if metric == "tokens_per_s_per_gpu":
        return float(tokens / (value * spread.world))
    if metric == "samples_per_s_total":
        return batch / value
    passes = {"hw_tflops_per_gpu": 4, "mfu_pct": 3}.get(metric)
    if passes is None:
        return float("nan")
    parts = forward_flops(
        network.hidden, network.ffn, network.vocab, network.seq,
        kv_share=network.kv_share, mlp_matrices=3 if network.gated else 2,
    )  # fmt: skip
    flops = tokens * (network.layers * passes * parts.layer + 3 * parts.head)
    rate = (
        1e12 * value if metric == "hw_tflops_per_gpu" else value / 100 * 1e12 * device.peak_tflops
    )
    return float(flops / (rate * spread.world))


# -- published step times beside predictions ------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """Runs whose step time is known, as columns."""

    runs: tuple[PublishedRun, ...]
    network: Network
    spread: Spread
    software: Software
    machine: Machine
    seconds: Floats
    family: Any
    part: Any
    kind: Any

    @classmethod
    def of(cls, runs: Sequence[PublishedRun]) -> Evidence:
        timed = tuple(run for run in runs if np.isfinite(run.seconds))
        return cls(
            runs=timed,
            network=columns([run.network for run in timed]),
            spread=columns([run.spread for run in timed]),
            software=columns([run.software for run in timed]),
            machine=machine_columns([run.machine for run in timed]),
            seconds=np.array([run.seconds for run in timed]),
            family=np.array([run.family for run in timed]),
            part=np.array([run.part for run in timed]),
            kind=np.array([run.device.split("-")[0] for run in timed]),
        )

    def where(self, mask: Any) -> Evidence:
        return Evidence.of([run for run, chosen in zip(self.runs, mask, strict=True) if chosen])

    def errors(self, coefficients: Coefficients, sustained: dict[str, float]) -> Floats:
        """Predicted over measured, less one."""
        return self.predicted(coefficients, sustained) / self.seconds - 1

    def predicted(self, coefficients: Coefficients, sustained: dict[str, float]) -> Floats:
        share = np.array(self.machine.sustained, dtype=float)
        for kind, value in sustained.items():
            share = np.where(self.kind == kind, value, share)
        machine = replace(self.machine, sustained=share)
        return np.asarray(
            step_time_of(self.network, self.spread, self.software, machine, coefficients).total
        )
