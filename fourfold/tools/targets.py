"""Targets: whether a run met one, by what its log says (`fourfold target`).

A loss or a perplexity meets its target below it, a speed at or above it. What the log does not say
is neither met nor missed.

A log is `metrics.jsonl`, or text in the line formats of FleetX and of Megatron. A text log may have
been coloured, prefixed by a launcher, or mixed with what other programs say: lines that are not
understood are skipped. Files are read as a stream, and lines only up to the longest that a record
can have, so their size does not matter. Where a run was resumed and repeats steps, the later lines
count.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fourfold.errors import DataError
from fourfold.metrics.jsonl import FILE_NAME, NON_FINITE
from fourfold.metrics.lines import perplexity


@dataclass(frozen=True)
class RunTarget:
    step: int | None = None  # None: the last one logged
    loss: float | None = None
    ppl: float | None = None
    tgs: float | None = None  # tokens per device per second


@dataclass(frozen=True)
class Finding:
    met: bool | None  # None: the log does not say
    text: str


PRESETS = {"gpt3-175b": RunTarget(step=2400, loss=9.01, ppl=8181.0)}
NOTES = {
    "gpt3-175b": (
        "a floor: in the run these figures come from, the loss was not scaled while its fp16 "
        "gradients were unscaled (grad norm 0.000 on every line), so it learned next to nothing in "
        "3.8 billion tokens; a sound run is far below"
    )
}


@dataclass
class TargetReading:
    """What a log says about a target, gathered line by line; later lines replace earlier ones."""

    target: RunTarget
    last: int | None = None  # step of the last line
    at: LogRecord | None = None  # the last training line up to the step asked for
    evaluated: LogRecord | None = None  # the last evaluation up to there
    speeds: array[float] = field(default_factory=lambda: array("d"))

    def take(self, line: LogRecord) -> None:
        self.last = line.step
        if self.target.step is not None and line.step > self.target.step:
            return
        if line.kind == "train":
            self.at = line
            if line.tokens_per_device is not None:
                self.speeds.append(line.tokens_per_device)
        elif line.perplexity is not None:
            self.evaluated = line

    def loss(self, wanted: float) -> Finding:
        if why := self._no_loss():
            return Finding(None, why)
        step, loss = self._training_loss()
        return Finding(loss < wanted, f"loss {loss:.6f} at step {step}, wanted below {wanted:g}")

    def ppl(self, wanted: float) -> Finding:
        if self.evaluated is not None and self._reached():
            value, where = self.evaluated.perplexity, f"evaluated at step {self.evaluated.step}"
            assert value is not None
        elif why := self._no_loss():
            return Finding(None, why)
        else:
            step, loss = self._training_loss()
            value = perplexity(loss)
            where = f"from the training loss at step {step}, no evaluation being logged"
        return Finding(value < wanted, f"ppl {value:.3f} {where}, wanted below {wanted:g}")

    def tgs(self, wanted: float) -> Finding:
        if not self.speeds:
            return Finding(None, "the log does not give tokens per device per second")
        value = statistics.median(self.speeds)
        text = (
            f"tgs {value:.3f}, the median of {len(self.speeds)} lines, wanted at least {wanted:g}"
        )
        return Finding(value >= wanted, text)

    def _reached(self) -> bool:
        return self.last is not None and self.last >= (self.target.step or 0)

    def _training_loss(self) -> tuple[int, float]:
        assert self.at is not None and self.at.loss is not None
        return self.at.step, self.at.loss

    def _no_loss(self) -> str | None:
        """Why the training loss is unknown, if it is."""
        if not self._reached():
            return f"step {self.target.step} is not reached: the log ends at step {self.last}"
        if self.at is None:
            until = "" if self.target.step is None else f" up to step {self.target.step}"
            return f"the log has no training line{until}"
        if self.at.loss is None:
            return (
                f"the line of step {self.at.step} has no loss; Megatron leaves out one that is "
                "not a number"
            )
        return None


def check_target(lines: Iterable[LogRecord], target: RunTarget) -> list[Finding]:
    """A finding for each target; none if the log has no step at all."""
    reading = TargetReading(target)
    for line in lines:
        reading.take(line)
    if reading.last is None:
        return []
    findings = []
    if target.loss is not None:
        findings.append(reading.loss(target.loss))
    if target.ppl is not None:
        findings.append(reading.ppl(target.ppl))
    if target.tgs is not None:
        findings.append(reading.tgs(target.tgs))
    return findings


# -- reading logs -------------------------------------------------------------------------------

MAX_LINE_BYTES = 1 << 20  # a record of ours that lists the samples of a large batch is long
MAX_STEP = 2**53

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FLEETX_STEP = re.compile(r"\bglobal step (\d{1,15}),(.*)")
_FLEETX_EVALUATION = re.compile(r"\[eval\] epoch: \d{1,15},(.*)")
_MEGATRON_STEP = re.compile(r"\biteration {1,20}(\d{1,15})/ {0,20}\d{1,15} \|(.*)")
_MEGATRON_EVALUATION = re.compile(r"\bvalidation loss at iteration (\d{1,15})\b([^|]{0,80}\|.*)")


@dataclass(frozen=True)
class LogRecord:
    """One line of a log about a step, or about an evaluation after it."""

    kind: Literal["train", "eval"]
    step: int
    loss: float | None  # None where Megatron left out one that is not a number
    perplexity: float | None = None  # as printed, or from the loss; of evaluations
    tokens_per_device: float | None = None  # a second; of steps, where the log has it


def log_file(run: str | os.PathLike[str]) -> Path:
    """The file to read for a run directory of ours, or the file itself."""
    path = Path(run)
    if not path.is_dir():
        return path
    file = path / FILE_NAME
    if not file.exists():
        raise DataError(
            f"{path} holds no {FILE_NAME}, so it is no run directory; give the output_dir of a "
            "run, or a log file"
        )
    return file


def read_log(path: str | os.PathLike[str]) -> Iterator[LogRecord]:
    """Every step and evaluation in the log, in the order of its lines."""
    last_step = 0
    for line in _lines(Path(path)):
        found = parse_line(line, last_step)
        if found is not None:
            yield found
            last_step = found.step


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as stream:
            while piece := stream.readline(MAX_LINE_BYTES):
                yield piece.decode("utf-8", errors="replace")
                while piece and not piece.endswith(b"\n"):
                    piece = stream.readline(MAX_LINE_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error


def parse_line(line: str, last_step: int = 0) -> LogRecord | None:
    """What one line says, if anything; an evaluation of FleetX's belongs to `last_step`."""
    if line.startswith("{"):
        return _from_json(line)
    line = _COLOUR.sub("", line).rstrip()
    if found := _MEGATRON_STEP.search(line):
        return _megatron_step(int(found[1]), _fields(found[2], "|"))
    if found := _FLEETX_STEP.search(line):
        fields = _fields(found[2], ",")
        ips = _number(fields.get("ips", "").removesuffix(" tokens/s"))
        return LogRecord("train", int(found[1]), _number(fields.get("loss")), tokens_per_device=ips)
    if found := _MEGATRON_EVALUATION.search(line):
        fields = _fields(found[2], "|")
        loss, printed = _number(fields.get("lm loss value")), _number(fields.get("lm loss PPL"))
        return LogRecord("eval", int(found[1]), loss, _perplexity(loss, printed))
    if found := _FLEETX_EVALUATION.search(line):
        loss = _number(_fields(found[1], ",").get("loss"))
        return LogRecord("eval", last_step, loss, _perplexity(loss))
    return None


def _megatron_step(step: int, fields: Mapping[str, str]) -> LogRecord:
    tgs = _number(fields.get("tokens per gpu per second (tgs)"))
    return LogRecord("train", step, _number(fields.get("lm loss")), tokens_per_device=tgs)


def _from_json(line: str) -> LogRecord | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None  # the torn last line of a run that was killed
    if not isinstance(record, dict):
        return None
    kind, step = record.get("kind"), record.get("step")
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        return None
    loss = _number(record.get("loss"))
    if kind == "train":
        return LogRecord("train", step, loss, tokens_per_device=_number(record.get("ips")))
    return LogRecord("eval", step, loss, _perplexity(loss)) if kind == "eval" else None


def _fields(text: str, separator: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(separator))
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _number(value: Any) -> float | None:
    """A number in JSON or in text; None for anything else."""
    if isinstance(value, str):
        value = NON_FINITE.get(value, value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _perplexity(loss: float | None, printed: float | None = None) -> float | None:
    return perplexity(loss) if printed is None and loss is not None else printed
