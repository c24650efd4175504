"""Reading logs back: `metrics.jsonl`, and text in the line formats of FleetX and of Megatron.

A text log may have been coloured, prefixed by a launcher, or mixed with what other programs say:
lines that are not understood are passed over. Files are read as a stream, and of a line only so
much as a record can be long, so their size does not matter. Where a run was resumed and its lines
come again, they come later in the file, and the later ones are what the run became.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fourfold.errors import DataError
from fourfold.metrics.jsonl import FILE_NAME, NON_FINITE
from fourfold.metrics.perplexity import perplexity

MAX_LINE_BYTES = 1 << 20  # a record of ours that lists the samples of a large batch is long
MAX_STEP = 2**53

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FLEETX_STEP = re.compile(r"\bglobal step (\d{1,15}),(.*)")
_FLEETX_EVALUATION = re.compile(r"\[eval\] epoch: \d{1,15},(.*)")
_MEGATRON_STEP = re.compile(r"\biteration {1,20}(\d{1,15})/ {0,20}\d{1,15} \|(.*)")
_MEGATRON_EVALUATION = re.compile(r"\bvalidation loss at iteration (\d{1,15})\b([^|]{0,80}\|.*)")


@dataclass(frozen=True)
class Logged:
    """One line of a log that tells of a step, or of an evaluation after it."""

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


def read_log(path: str | os.PathLike[str]) -> Iterator[Logged]:
    """Every step and evaluation the log tells of, in the order of its lines."""
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


def parse_line(line: str, last_step: int = 0) -> Logged | None:
    """What one line tells, if anything; an evaluation of FleetX's belongs to `last_step`."""
    if line.startswith("{"):
        return _from_json(line)
    line = _COLOUR.sub("", line).rstrip()
    if found := _MEGATRON_STEP.search(line):
        return _megatron_step(int(found[1]), _fields(found[2], "|"))
    if found := _FLEETX_STEP.search(line):
        fields = _fields(found[2], ",")
        ips = _number(fields.get("ips", "").removesuffix(" tokens/s"))
        return Logged("train", int(found[1]), _number(fields.get("loss")), tokens_per_device=ips)
    if found := _MEGATRON_EVALUATION.search(line):
        fields = _fields(found[2], "|")
        loss, printed = _number(fields.get("lm loss value")), _number(fields.get("lm loss PPL"))
        return Logged("eval", int(found[1]), loss, _perplexity(loss, printed))
    if found := _FLEETX_EVALUATION.search(line):
        loss = _number(_fields(found[1], ",").get("loss"))
        return Logged("eval", last_step, loss, _perplexity(loss))
    return None


def _megatron_step(step: int, fields: Mapping[str, str]) -> Logged:
    tgs = _number(fields.get("tokens per gpu per second (tgs)"))
    return Logged("train", step, _number(fields.get("lm loss")), tokens_per_device=tgs)


def _from_json(line: str) -> Logged | None:
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
        return Logged("train", step, loss, tokens_per_device=_number(record.get("ips")))
    return Logged("eval", step, loss, _perplexity(loss)) if kind == "eval" else None


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
