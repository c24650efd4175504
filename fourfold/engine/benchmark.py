"""The result of a benchmark: what `fourfold bench` reports about a few iterations.

The figure is the median over the iterations that count; the first ones, which also allocate,
compile and fill caches, do not. FLOP/s are given by two conventions, because published numbers use
either.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fourfold.config import Config
from fourfold.cost.flops import flops_per_token, megatron_deepspeed_flops_per_token
from fourfold.metrics.peaks import Peak
from fourfold.model import ModelShape

NOT_MEASURED = (
    "evaluations, checkpoints, a batch that grows, and whatever comes after the first iterations"
)


@dataclass(frozen=True)
class Measurement:
    """Rates are of the median iteration; per device where they say so."""

    iterations: int
    left_out: int
    global_batch_size: int
    seq_len: int
    world_size: int
    median_seconds: float
    min_seconds: float
    max_seconds: float
    samples_per_second: float
    tokens_per_second: float
    tokens_per_device_per_second: float
    tflops_per_device: dict[str, float]  # by convention
    conventions: dict[str, str]  # what each counts
    mfu: float | None  # of model FLOPs
    peak_tflops: float | None  # of one device
    peak_source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"not_measured": NOT_MEASURED}

    def lines(self) -> list[str]:
        """For people, one line per subject."""
        spread = f"{_figure(self.min_seconds)} to {_figure(self.max_seconds)}"
        mfu = self.peak_source if self.mfu is None else f"{self.mfu:.1%} of {self.peak_source}"
        rows = [
            ("seconds an iteration", f"{_figure(self.median_seconds)} ({spread})"),
            ("samples/s", _figure(self.samples_per_second)),
            ("tokens/s", _figure(self.tokens_per_second)),
            ("tokens/s a device (TGS)", _figure(self.tokens_per_device_per_second)),
            *(
                ("TFLOP/s a device", f"{_figure(rate)} ({self.conventions[convention]})")
                for convention, rate in self.tflops_per_device.items()
            ),
            ("MFU, by model FLOPs", mfu),
        ]
        return [
            f"median of {self.iterations} iterations after {self.left_out} left out; "
            f"{self.global_batch_size} samples x {self.seq_len} tokens on {self.world_size} "
            "device(s)",
            *(f"  {name:<24} {text}" for name, text in rows),
            f"not measured: {NOT_MEASURED}",
        ]


def measurement(
    config: Config,
    world_size: int,
    records: Sequence[Mapping[str, Any]],
    warmup: int,
    peak: Peak,
) -> Measurement:
    """The result from the training records of a run, one per iteration, after `warmup` of them."""
    counted = records[warmup:]
    assert counted, "nothing was measured"
    seconds = [record["batch_seconds"] for record in counted]
    median = statistics.median(seconds)
    shape, seq_len = ModelShape.of(config.Model), config.Data.dataset.max_seq_len
    batch = config.Data.batch_size.global_batch_size
    tokens_per_second = batch * seq_len / median
    on_device = tokens_per_second / world_size
    hardware_style = megatron_deepspeed_flops_per_token(
        shape, seq_len, recomputes=config.Model.use_recompute
    )
    model_flops = flops_per_token(shape, seq_len, causal=True)
    return Measurement(
        iterations=len(counted),
        left_out=warmup,
        global_batch_size=batch,
        seq_len=seq_len,
        world_size=world_size,
        median_seconds=median,
        min_seconds=min(seconds),
        max_seconds=max(seconds),
        samples_per_second=batch / median,
        tokens_per_second=tokens_per_second,
        tokens_per_device_per_second=on_device,
        tflops_per_device={
            "megatron_deepspeed": hardware_style * on_device / 1e12,
            "model": model_flops * on_device / 1e12,
        },
        conventions=_conventions(config.Model.use_recompute),
        mfu=None if peak.flops is None else model_flops * on_device / peak.flops,
        peak_tflops=None if peak.flops is None else peak.flops / 1e12,
        peak_source=peak.source,
    )


def _conventions(recomputes: bool) -> dict[str, str]:
    passes = "4 passes, as something is recomputed" if recomputes else "3 passes"
    return {
        "megatron_deepspeed": f"Megatron-DeepSpeed's formula: full attention, {passes}",
        "model": "model FLOPs: causal attention, nothing counted twice",
    }


def _figure(value: float) -> str:
    return f"{value:,.3f}" if value >= 1 else f"{value:.3g}"
