"""The log lines of Megatron-DeepSpeed, to the character: `Engine.log_style: megatron`.

     iteration     2400/    8247 | consumed samples:      1864624 | consumed tokens:   3818749952...

As there, the loss is the mean over the steps since the last line that were not skipped, skipped
and NaN iterations are counted from line to line, and rates are of the batch of the step named.
Two things are better: a loss that is not a number is printed, where Megatron leaves the field out
and the reader to wonder; and the time of an iteration has no evaluation and no save in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.metrics.lines import FleetXLines
from fourfold.metrics.perplexity import perplexity

SKIPPED = "skipped_update"


@dataclass
class MegatronLines:
    """`flops_per_sample` is by the convention of the original, for the field TFLOPs."""

    max_steps: int
    seq_len: int
    world_size: int
    flops_per_sample: float
    _others: FleetXLines = field(default_factory=FleetXLines)
    _losses: list[float] = field(default_factory=list)  # since the last line
    _skipped: int = 0
    _nan: int = 0
    _skips_this_step: bool = False

    def lines(self, record: Mapping[str, Any], colour: bool) -> list[str]:
        kind = record["kind"]
        if kind == "train":
            return [self._train_line(record)]
        if kind in ("eval", "test"):
            return evaluation_block(record)
        if kind == "event" and record["event"] == SKIPPED:
            self._skips_this_step = True
            self._skipped += 1
            self._nan += not math.isfinite(record["loss"])
        return self._others.lines(record, colour)

    def take_loss(self, loss: float) -> None:
        if not self._skips_this_step:
            self._losses.append(loss)
        self._skips_this_step = False

    def _train_line(self, record: Mapping[str, Any]) -> str:
        loss = statistics.fmean(self._losses) if self._losses else record["loss"]
        seconds, batch = record["batch_seconds"], record["global_batch_size"]
        samples_per_second = batch / seconds if seconds > 0 else 0.0
        tokens_per_second = samples_per_second * self.seq_len
        flops_per_second = samples_per_second * self.flops_per_sample
        fields = [
            f"iteration {record['step']:8d}/{self.max_steps:8d}",
            f"consumed samples: {record['samples']:12d}",
            f"consumed tokens: {record['tokens']:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
            f"learning rate: {record['learning_rate']:.3E}",
            f"global batch size: {batch:5d}",
            f"lm loss: {loss:.6E}",
            *_where_there_is_one("loss scale: {:.1f}", record["loss_scale"]),
            *_where_there_is_one("grad norm: {:.3f}", record["grad_norm"]),
            f"actual seqlen: {self.seq_len:5d}",
            f"number of skipped iterations: {self._skipped:3d}",
            f"number of nan iterations: {self._nan:3d}",
            f"samples per second: {samples_per_second:.3f}",
            f"tokens per gpu per second (tgs): {tokens_per_second / self.world_size:.3f}",
            f"TFLOPs: {flops_per_second / self.world_size / 1e12:.2f}",
        ]
        self._losses.clear()
        self._skipped = self._nan = 0
        return "".join(f" {text} |" for text in fields)


def evaluation_block(record: Mapping[str, Any]) -> list[str]:
    """The loss and its perplexity between two rules."""
    where = f"iteration {record['step']}"
    if record["kind"] == "test":
        where = "the end of training for test data"
    loss = record["loss"]
    fields = f"lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E}"
    text = f" validation loss at {where} | {fields} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def _where_there_is_one(form: str, value: float | None) -> list[str]:
    return [] if value is None else [form.format(value)]
