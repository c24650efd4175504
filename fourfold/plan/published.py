"""Published runs of other people: what was run, and what was measured.

Each row of published_runs.csv is one measurement with its source; programs.py knows the program
and the machine. Rows of fitted families are split into a fit part and a check part by a hash of
what was run, so that all measurements of one run are on the same side. Figures quoted from memory
are never fitted and never counted as a check.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fourfold.cost.flops import forward_flops
from fourfold.cost.terms import Floats
from fourfold.cost.workload import Network, Software, Spread, columns
from fourfold.errors import UserError
from fourfold.plan.machine import Coefficients, Machine, machine_columns
from fourfold.plan.programs import RunPlace, bits_of, family_of, place_of, software_of_run
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
NEEDED = ("layers", "hidden", "seq", "num_gpus", "tp", "pp", "dp", "micro_batch")
# Tables that do not say so were made without recomputing, or with next to none.
WITHOUT_RECOMPUTE = ("Megatron-Bridge", "NeMo", "Megatron-LM README")
# Whose fit rows give the coefficients, and two sustained shares.
FITTED_FAMILIES = ("vtrain single", "vtrain multi", "llm-foundry a100", "llm-foundry h100")
FITTED_RATES = ("A100", "H100 in 2023")
# Whose fit rows give one share more, by what it is called.
SHARE_FAMILIES = {
    "megatron h100": "H100",
    "megatron h100 fp8": "H100 fp8",
    "megatron blackwell fp8": "Blackwell fp8",
    "megatron blackwell fp4": "Blackwell fp4",
}


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
    place: RunPlace
    global_batch: int
    seconds: float
    bytes_: float
    fits: bool  # False: the source says it ran out of memory
    counted: bool  # whether the row says enough for its memory to be predicted
    part: str  # "fit", "check" or "quoted" (recalled, not looked up)

    @property
    def setting(self) -> tuple[object, ...]:
        """Runs with the same setting differ in their layout only, so they can be ranked."""
        return (self.family, self.place.device, self.network, self.spread.world, self.global_batch)


@lru_cache(maxsize=4)
def published_runs(path: Path = FILE) -> tuple[PublishedRun, ...]:
    """The rows a prediction can be made for; rows without a source's word on them are left out."""
    rows = _rows(path)
    try:
        return tuple(_run(row) for row in rows if _is_predicted(row) and not _lacks(row))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _not_a_table(path, error) from error


def unjudged_ooms(path: Path = FILE) -> list[str]:
    """Rows of runs that ran out of memory but do not say enough to be predicted, and why."""
    try:
        lacking = [(row, _lacks(row)) for row in _rows(path) if row["metric"] == "oom"]
        return [f"{row['source']}: lacks {', '.join(lacks)}" for row, lacks in lacking if lacks]
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_a_table(path, error) from error


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error


def _not_a_table(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} is not a table of runs: {error!r}; its columns are those of the package's "
        "published_runs.csv"
    )


def _is_predicted(row: dict[str, str]) -> bool:
    """Whether it measured what we predict, in numbers that we have rates for."""
    metric = row["metric"]
    if row["source"].startswith("llm-foundry") and metric == "mfu_pct":
        return False  # the same measurement as its tokens per second
    if bits_of(row["precision"]) < 16 and row["source"].startswith("Megatron-LM golden"):
        return False
    return metric in TIME_METRICS or metric in MEMORY_METRICS or metric == "oom"


def _lacks(row: dict[str, str]) -> list[str]:
    """What a prediction needs and the row does not say."""
    lacking = [name for name in NEEDED if not re.fullmatch(r"\d+", row[name])]
    if not row["recompute"] and not row["source"].startswith(WITHOUT_RECOMPUTE):
        lacking.append("recompute")
    if not row["global_batch"] and row["metric"] not in MEMORY_METRICS:
        lacking.append("global_batch")
    family = family_of(row["source"], row["gpu"], row["precision"])
    if place_of(row, family) is None:
        lacking.append("gpu")
    return lacking


def _is_counted(row: dict[str, str]) -> bool:
    """Whether its memory can be predicted: of some ways of recomputing we have no count."""
    return row["recompute"] not in ("", "selective_op")


def _run(row: dict[str, str]) -> PublishedRun:
    metric, value = row["metric"], float(row["value"])
    family = family_of(row["source"], row["gpu"], row["precision"])
    place = place_of(row, family)
    assert place is not None
    network, spread = _network(row), _spread(row, family)
    batch = int(row["global_batch"] or int(row["micro_batch"]) * int(row["dp"]))
    return PublishedRun(
        family=family,
        source=row["source"],
        model=row["model"],
        metric=metric,
        value=value,
        network=network,
        spread=spread,
        software=software_of_run(family, row),
        place=place,
        global_batch=batch,
        seconds=_seconds(metric, value, batch, network, spread, place.peak_tflops),
        # Without the vocabulary the largest tables of a small model are unknown.
        bytes_=MEMORY_METRICS.get(metric, np.nan) * value
        if row["vocab"] and _is_counted(row)
        else np.nan,
        fits=metric != "oom",
        counted=_is_counted(row),
        part=_part(row, family),
    )


def _part(row: dict[str, str], family: str) -> str:
    if row["confidence"] != "from_source":
        return "quoted"
    if family not in FITTED_FAMILIES and family not in SHARE_FAMILIES:
        return "check"
    if family == "megatron h100":  # two rows: the small run is fitted, the large one checks it
        return "fit" if int(row["num_gpus"]) < 1000 else "check"
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
    # torchtitan's choice by operation makes every second product again, about a layer's attention.
    modes = {
        "full": "full",
        "selective": "core_attn",
        "full_attn": "full_attn",
        "selective_op": "full_attn",
    }
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
        sequence_parallel=recompute.endswith("+SP")
        or "sp" in re.findall(r"\w+", model)
        or (tp > 1 and family.startswith(("megatron h100", "megatron blackwell"))),
        schedule="Interleaved1F1B" if chunks > 1 else "1F1B",
        virtual=chunks if pp > 1 else 1,
        context=int(context[1]) if context else 1,
    )


def _seconds(
    metric: str, value: float, batch: int, network: Network, spread: Spread, peak_tflops: float
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
    flops = tokens * _model_flops(network, passes)
    rate = 1e12 * value if metric == "hw_tflops_per_gpu" else value / 100 * 1e12 * peak_tflops
    return float(flops / (rate * spread.world))


def _model_flops(network: Network, passes: int = 3) -> float:
    """Of one token, full attention; the layers' in so many forward passes."""
    parts = forward_flops(
        network.hidden, network.ffn, network.vocab, network.seq,
        query_share=network.query_width / network.hidden,
        kv_share=network.kv_share, mlp_matrices=3 if network.gated else 2,
    )  # fmt: skip
    return float(network.layers * passes * parts.layer + 3 * parts.head)


class PublishedMfu(NamedTuple):
    """The best of one kind: a device, on one node or on several."""

    share: float
    model: str
    devices: int
    source: str


_SAME_PEAK = {"A800": "A100", "H800": "H100", "H200": "H100"}


@lru_cache(maxsize=32)
def best_published(device: str, several_nodes: bool) -> PublishedMfu | None:
    """The highest MFU in 16 bits that anyone published of that kind; None: no run of it is known.
    Recalled figures count here: they can only raise it."""
    kind = device.partition("-")[0]
    kind = _SAME_PEAK.get(kind, kind)
    found = [
        PublishedMfu(_mfu(run), run.model, int(run.spread.world), run.source)
        for run in published_runs()
        if run.place.device.partition("-")[0] == kind
        and run.place.low_peak == 0
        and (run.spread.world > run.place.machine.node) == several_nodes
        and np.isfinite(run.seconds)
    ]
    return max(found, default=None)


def _mfu(run: PublishedRun) -> float:
    tokens = run.global_batch * run.network.seq
    rate = run.seconds * run.spread.world * 1e12 * run.place.peak_tflops
    return float(tokens * _model_flops(run.network) / rate)


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
    rate: Any  # the share of the peak that each run's products go by
    low_rate: Any
    low_peak: Floats

    @classmethod
    def of(cls, runs: Sequence[PublishedRun]) -> Evidence:
        timed = tuple(run for run in runs if np.isfinite(run.seconds))
        return cls(
            runs=timed,
            network=columns([run.network for run in timed]),
            spread=columns([run.spread for run in timed]),
            software=columns([run.software for run in timed]),
            machine=machine_columns([run.place.machine for run in timed]),
            seconds=np.array([run.seconds for run in timed]),
            family=np.array([run.family for run in timed]),
            part=np.array([run.part for run in timed]),
            kind=np.array([run.place.device.split("-")[0] for run in timed]),
            rate=np.array([run.place.rate for run in timed]),
            low_rate=np.array([run.place.low_rate for run in timed]),
            low_peak=np.array([run.place.low_peak for run in timed]),
        )

    def where(self, mask: Any) -> Evidence:
        return Evidence.of([run for run, chosen in zip(self.runs, mask, strict=True) if chosen])

    def errors(self, coefficients: Coefficients, sustained: dict[str, float]) -> Floats:
        """Predicted over measured, less one."""
        return self.predicted(coefficients, sustained) / self.seconds - 1

    def predicted(self, coefficients: Coefficients, sustained: dict[str, float]) -> Floats:
        share = np.array(self.machine.sustained, dtype=float)
        low = np.array(self.machine.sustained, dtype=float)
        for name, value in sustained.items():
            share = np.where(self.rate == name, value, share)
            low = np.where(self.low_rate == name, value, low)
        faster = self.low_peak * low / (self.machine.peak * share)
        gain = np.where(self.low_peak > 0, faster, 1.0)
        machine = replace(self.machine, sustained=share, linear_gain=gain)
        return np.asarray(
            step_time_of(self.network, self.spread, self.software, machine, coefficients).total
        )
