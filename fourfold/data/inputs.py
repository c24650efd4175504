"""Which files hold the raw text: names, directories, globs and standard input to `InputFile`s.

Read are `.txt`, `.jsonl` and `.json`, each also `.gz` or `.zst`, and `.parquet`. Of a directory
everything of these kinds is input except what is hidden and what Fourfold itself left there:
manifests of token files and unfinished work. What is left out is said.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fourfold.data.dataset import read_manifest
from fourfold.errors import DataError, UserError

log = logging.getLogger(__name__)

WORK_SUFFIX = ".parts"
KINDS = {".txt": "txt", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
SPOOLED = re.compile(r"stdin-[0-9a-f]{32}\.(jsonl|txt)")
NAMES_SHOWN = 3
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
        texts = _texts_below(path)
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


def _texts_below(directory: Path) -> list[Path]:
    """The text in a directory, in sorted order; what is left out is logged by its reason."""
    texts: list[Path] = []
    left_out: dict[str, list[Path]] = {}
    for parent, folders, names in os.walk(directory):
        links = [folder for folder in map(Path(parent).joinpath, folders) if folder.is_symlink()]
        if links:
            left_out.setdefault("links to directories", []).extend(links)
        why_all = _reason_for_leaving_out_all(Path(parent).relative_to(directory), directory)
        for file in map(Path(parent).joinpath, names):
            if _kind_of(file)[0] is None:
                continue
            why = why_all or _reason_for_leaving_out(file)
            (left_out.setdefault(why, []) if why else texts).append(file)
    for reason, files in sorted(left_out.items()):
        shown = ", ".join(map(str, sorted(files)[:NAMES_SHOWN]))
        more = ", ..." if len(files) > NAMES_SHOWN else ""
        log.warning("%s: left out %d %s: %s%s", directory, len(files), reason, shown, more)
    return sorted(texts)


def _reason_for_leaving_out_all(inside: Path, directory: Path) -> str:
    """Why nothing in the directory `inside` of an input directory is input, or ""."""
    if any(part.startswith(".") for part in inside.parts):
        return "files in hidden directories"
    for folder in [inside, *inside.parents]:
        if folder.suffix == WORK_SUFFIX and (directory / folder / "plan.json").is_file():
            return "files of unfinished work"
    return ""


def _reason_for_leaving_out(file: Path) -> str:
    if file.name.startswith("."):
        return "hidden files"
    if SPOOLED.fullmatch(file.name) and file.parent.suffix == WORK_SUFFIX:
        return "files of unfinished work"
    return "manifests of token files" if _is_manifest(file) else ""


def _is_manifest(file: Path) -> bool:
    """Raw text may end in .json too, and be large: most is told by its beginning."""
    if file.suffix != ".json":
        return False
    try:
        with file.open("rb") as stream:
            if b'"fourfold"' not in stream.read(4096):
                return False
    except OSError:
        return False  # reading it will say what is wrong
    manifest = read_manifest(file.with_suffix(""))
    return manifest is not None and "sha256" in manifest


def _kind_of(path: Path) -> tuple[str | None, str]:
    name = path.name.lower()
    for compression in ("", *COMPRESSIONS):
        for ending, kind in KINDS.items():
            if name.endswith(ending + compression) and not (compression and kind == "parquet"):
                return kind, compression
    return None, ""
