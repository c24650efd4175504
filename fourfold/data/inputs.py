"""Which files hold the raw text: names, directories, globs and standard input to `InputFile`s.

Read are `.txt`, `.jsonl` and `.json`, each also `.gz` or `.zst`, and `.parquet`.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fourfold.errors import DataError, UserError

WORK_SUFFIX = ".parts"
KINDS = {".txt": "txt", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
ENDINGS = ".txt, .jsonl, .json (these also .gz or .zst) and .parquet"


@dataclass(frozen=True)
class InputFile:
    path: Path
    kind: str
    compression: str  # ".gz", ".zst" or ""
    num_bytes: int
    modified: int  # nanoseconds


def find_inputs(paths: Sequence[str | Path], kind: str | None = None) -> list[InputFile]:
    """Files of the named files, directories (recursive, sorted) and globs (sorted), in order.

    A `kind` of `KINDS` is what they hold, whatever their names say.
    """
    found = [file for path in paths for file in _expand(str(path))]
    if not found:
        raise UserError("no input was given; name files, directories or globs")
    return [describe_input(path, kind) for path in found]


def describe_input(path: Path, kind: str | None = None) -> InputFile:
    try:
        status = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    named_kind, compression = _kind_of(path)
    kind = kind or named_kind
    if kind is None:
        raise DataError(f"{path}: not a known kind of text; the endings read are {ENDINGS}")
    return InputFile(path, kind, compression, status.st_size, status.st_mtime_ns)


def spool_stdin(stream: IO[bytes], directory: Path, kind: str) -> InputFile:
    """Standard input as a file in `directory`, named by its content: the same again is the same."""
    if kind not in ("jsonl", "txt"):
        raise UserError(f"--stdin-format {kind}: choose jsonl or txt")
    directory.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    unfinished = directory / f".stdin.{os.getpid()}.tmp"
    try:
        with unfinished.open("wb") as file:
            while block := stream.read(1 << 20):
                digest.update(block)
                file.write(block)
        path = directory / f"stdin-{digest.hexdigest()[:32]}.{kind}"
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    os.utime(path, (0, 0))  # its name says when it is another
    return describe_input(path)


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        inside = sorted(Path(parent, file) for parent, _, files in os.walk(path) for file in files)
        texts = [file for file in inside if _kind_of(file)[0] and not _is_output(file)]
        if not texts:
            raise DataError(f"{path}: the directory holds no text; the endings read are {ENDINGS}")
        return texts
    if path.exists() or not glob.has_magic(name):
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
    files = [match for match in matches if match.is_file()]
    if not files:
        raise DataError(f"{name}: no file matches")
    return files


def _is_output(file: Path) -> bool:
    """Hidden files, and manifests and work files of data prepared into the same directory."""
    marks = (".bin", "_ids.npy")
    return (
        file.name.startswith(".")
        or file.parent.suffix == WORK_SUFFIX
        or any(file.with_name(file.stem + mark).exists() for mark in marks)
    )


def _kind_of(path: Path) -> tuple[str | None, str]:
    name = path.name.lower()
    for compression in ("", *COMPRESSIONS):
        for ending, kind in KINDS.items():
            if name.endswith(ending + compression) and not (compression and kind == "parquet"):
                return kind, compression
    return None, ""
