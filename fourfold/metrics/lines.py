"""Log lines, to the character: FleetX's, and Megatron-DeepSpeed's (`Engine.log_style: megatron`).

    [2022-07-27 12:42:46,601] [    INFO] - global step 1, epoch: 0, batch: 0, loss: 11.05201721...

     iteration     2400/    8247 | consumed samples:      1864624 | consumed tokens:   3818749952...

Whatever is not a step or an evaluation goes out under FleetX's prefix, one line each, with
characters that could move a cursor or start a new line escaped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from fourfold.metrics.jsonl import RUN

if TYPE_CHECKING:
    from fourfold.metrics.sinks import TextSample

COLOURS = {"INFO": "32", "WARNING": "33", "ERROR": "31"}
STAMPS = ("kind", "time", "event")


class LineStyle(Protocol):
    """Whose log lines are printed."""

    def lines(self, record: Mapping[str, Any], colour: bool) -> list[str]:
        """The lines of one record, without their newlines."""
        ...

    def take_loss(self, loss: float) -> None:
        """The loss of a step; called for every step, also those between two lines."""
        ...


class FleetXLines:
    """One line per record, from the record alone."""

    def lines(self, record: Mapping[str, Any], colour: bool) -> list[str]:
        kind, level = record["kind"], record.get("level", "INFO")
        if kind in (RUN, "samples"):
            return []
        if kind == "train":
            message = train_message(record)
        elif kind in ("eval", "test"):
            message = evaluation_message(record)
        elif kind == "task":
            message = task_message(record)
        elif kind == "event":
            message = event_message(record)
        else:
            message = escape(record["text"])
        return [log_line(message, record["time"], level, colour)]

    def take_loss(self, loss: float) -> None:
        """FleetX prints the loss of the step it names, whatever came before."""


def train_message(record: Mapping[str, Any]) -> str:
    """The text of a training line; `record` has the fields of a `Step`."""
    return (
        "global step {step}, epoch: {epoch}, batch: {batch}, loss: {loss:.9f}, "
        "avg_reader_cost: {reader_seconds:.5f} sec, avg_batch_cost: {batch_seconds:.5f} sec, "
        "speed: {steps_per_second:.2f} step/s, ips_total: {ips_total:.0f} tokens/s, "
        "ips: {ips:.0f} tokens/s, learning rate: {learning_rate:.5e}"
    ).format_map(record)


def evaluation_message(record: Mapping[str, Any]) -> str:
    """The text of an evaluation line; the record's kind is "eval" or "test"."""
    line = (
        "[{kind}] epoch: {epoch}, batch: {batch}, loss: {loss:.9f}, "
        "avg_{kind}_cost: {batch_seconds:.5f} sec, speed: {steps_per_second:.2f} step/s"
    )
    return (line + (", ema loss: {ema_loss:.9f}" if "ema_loss" in record else "")).format_map(
        record
    )


def task_message(record: Mapping[str, Any]) -> str:
    """The text of the line of a task."""
    numbers = [
        f"{name}: {value:.6f}" if isinstance(value, float) else f"{name}: {value}"
        for name, value in record["numbers"].items()
    ]
    place = f"[task] step: {record['step']}, {record['task']}"
    return escape(", ".join([place, *numbers, f"{record['seconds']:.2f} sec"]))


def sample_lines(
    step: int, samples: Sequence[TextSample], when: str, colour: bool = False
) -> list[str]:
    """A line for each text that the run wrote."""
    texts = [f"[sample] step: {step}, {one.prompt!r} -> {one.text!r}" for one in samples]
    return [log_line(escape(text), when, colour=colour) for text in texts]


def event_message(record: Mapping[str, Any]) -> str:
    fields = [f"{name}: {value}" for name, value in record.items() if name not in STAMPS]
    return escape(f"[{record['event']}] " + ", ".join(fields))


def log_line(message: str, when: str, level: str = "INFO", colour: bool = False) -> str:
    """One whole line, without its newline; `when` is an ISO 8601 time, shown unchanged."""
    moment = datetime.fromisoformat(when)
    stamp = f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}"
    prefix = f"[{stamp}] [{level:>8}]"
    if not colour:
        return f"{prefix} - {message}"
    return f"\x1b[{COLOURS[level]}m{prefix}\x1b[0m - {message}\x1b[0m"


def escape(text: str) -> str:
    """`text` with every unprintable character written as its escape, newlines included."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


# -- Megatron-DeepSpeed -------------------------------------------------------------------------

SKIPPED = "skipped_update"


@dataclass
class MegatronLines:
    """As in the original, the loss is the mean over the steps since the last line that were not
    skipped, skipped and NaN iterations are counted from line to line, and rates are of the batch of
    the step named. Two things are better: a loss that is not a number is printed, where Megatron
    omits the field; and the time of an iteration has no evaluation and no save in it.

    `flops_per_sample` is by the convention of the original, for the field TFLOPs.
    """

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
    if "ema_loss" in record:
        fields += f" | ema lm loss value: {record['ema_loss']:.6E}"
    text = f" validation loss at {where} | {fields} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def _where_there_is_one(form: str, value: float | None) -> list[str]:
    return [] if value is None else [form.format(value)]


# -- perplexity ---------------------------------------------------------------------------------

# Beyond it a perplexity is no longer a number worth printing.
MAX_EXPONENT = 20.0


def perplexity(mean_loss: float) -> float:
    """exp of a mean loss in nats, as it is printed and plotted, here and by FleetX and Megatron.

    A loss that is not a number stays so.
    """
    return math.exp(min(mean_loss, MAX_EXPONENT))
