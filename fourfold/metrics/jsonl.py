"""`metrics.jsonl`: every record of a run, one JSON object per line, append-only.

JSON has no NaN or infinity, so they are written as the strings "NaN", "Infinity", "-Infinity";
`read_jsonl` returns them as floats. Each line is written at once, so a crash can tear only the last
one, which readers skip. A run resumed at step k continues after the records of step k: what the
interrupted run wrote beyond is dropped, and the file as it was stays beside it as
`metrics.jsonl.bak`.

`metrics.seal` beside it says how many bytes the file had when it was last sealed, at a checkpoint
or at the end, and their SHA-256: what changed since then is found (`check_seal`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.atomic_files import replace_text
from fourfold.errors import DataError

FILE_NAME = "metrics.jsonl"
SEAL_NAME = "metrics.seal"
MAX_SEAL_BYTES = 4096
RUN = "run"  # the kind of the record that says what a run knows of itself
# Records kept while the disk is full; the oldest go first.
MAX_UNWRITTEN = 10_000
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a metrics file, oldest first. A torn last line is skipped."""
    parsed = _parse(Path(path))
    if parsed.damaged and parsed.damaged != [parsed.torn_line]:
        raise DataError(
            f"{path}, line {parsed.damaged[0]}: not a JSON object, so the records of this run "
            "cannot be read; remove the line, or restore the file"
        )
    return parsed.records


@dataclass(frozen=True)
class RunFacts:
    """What a run knows about itself when it starts: the fields of its record of kind "run"."""

    layout: str
    world_size: int
    peak_flops: float | None  # of one device, which MFU is a fraction of
    peak_source: str  # where that figure is from, or why there is none
    # What decides the last bits of a sum; None in records of older versions.
    threads: int | None = None  # of a process
    torch: str | None = None
    processor: str | None = None


def processor_of() -> str:
    """The kind of processor that computes here."""
    import platform

    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def read_facts(record: Mapping[str, Any]) -> RunFacts | None:
    """Those of a record that has them."""
    names = [field.name for field in fields(RunFacts) if field.default is MISSING]
    if record.get("kind") != RUN or not all(name in record for name in names):
        return None
    return RunFacts(**{f.name: record[f.name] for f in fields(RunFacts) if f.name in record})


class JsonLines:
    """Appends records to `path`; history beyond `resume_step` is cut off first.

    `dropped` says how many lines were cut off. A record that cannot be written raises `OSError`,
    is kept, and is written before the next one; the file never has part of a line inside.
    """

    name = FILE_NAME

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self._path = path
        self._open(resume_step)

    def _open(self, resume_step: int) -> None:
        path = self._path
        self.dropped = _cut_history(path, resume_step) if path.exists() else 0
        self._seal_file = path.with_name(SEAL_NAME)
        self._digest = hashlib.sha256(path.read_bytes() if path.exists() else b"")
        self._bytes = path.stat().st_size if path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN)

    def write(self, record: Mapping[str, Any]) -> None:
        self._unwritten.append(_line(record).encode())
        self._write_all()

    def rewind(self, step: int) -> None:
        """Continue after the records of an earlier step, as a resumed run would."""
        self._write_all()
        self._file.close()
        self._open(step)

    def seal(self) -> None:
        """Record what the file holds by now."""
        self._write_all()
        seal = {"bytes": self._bytes, "sha256": self._digest.hexdigest()}
        replace_text(self._seal_file, json.dumps(seal) + "\n")

    def close(self) -> None:
        try:
            self.seal()
        finally:
            self._file.close()

    def _write_all(self) -> None:
        while self._unwritten:
            end = self._file.seek(0, os.SEEK_END)
            rest = memoryview(self._unwritten[0])
            try:
                while rest:
                    # A disk that is nearly full takes a part, and refuses the next.
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(end)
                raise
            line = self._unwritten.popleft()
            self._digest.update(line)
            self._bytes += len(line)


def check_seal(file: Path) -> tuple[str | None, int]:
    """Why a metrics file is not what was sealed, if it is not, and how many bytes were written
    since; -1 without a seal."""
    place = file.with_name(SEAL_NAME)
    if not place.exists():
        return None, -1
    try:
        content = file.read_bytes()
        text = place.read_bytes()[:MAX_SEAL_BYTES]
        seal = json.loads(text)
        size, digest = seal["bytes"], seal["sha256"]
        well_formed = text == (json.dumps({"bytes": size, "sha256": digest}) + "\n").encode()
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})", 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{place} is damaged: it holds no seal", 0
    if not well_formed or not isinstance(size, int) or not isinstance(digest, str):
        return f"{place} is damaged: it holds no seal", 0
    if size > len(content):
        return f"{file} has {len(content)} bytes, and had {size} when it was sealed", 0
    if hashlib.sha256(content[:size]).hexdigest() != digest:
        return f"{file} is not what was sealed: its first {size} bytes have another SHA-256", 0
    return None, len(content) - size


class _Parsed(NamedTuple):
    records: list[dict[str, Any]]
    damaged: list[int]  # numbers of the lines that hold no record, the first being 1
    torn_line: int | None  # number of the last line when its newline is missing


def _parse(path: Path) -> _Parsed:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    torn_line = len(lines) if lines[-1] else None
    records, damaged = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(_decode(record))
        else:
            damaged.append(number)
    return _Parsed(records, damaged, torn_line)


def _cut_history(path: Path, last_step: int) -> int:
    """Drop records beyond `last_step`, and damaged lines; returns how many lines."""
    parsed = _parse(path)
    kept = [record for record in parsed.records if _step(record) <= last_step]
    dropped = len(parsed.records) - len(kept) + len(parsed.damaged)
    if dropped:
        shutil.copyfile(path, path.with_name(path.name + ".bak"))
    if dropped or parsed.torn_line:
        replace_text(path, "".join(_line(record) for record in kept))
    return dropped


def _step(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_encode(record), allow_nan=False) + "\n"


def _encode(value: Any) -> Any:
    """`value` with the floats JSON does not have as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    """What `_encode` was given. The text of a notice is words, whatever it says."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: item if key == "text" else _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
