"""The records of `prepare`: its settings, the plan of unfinished work, counts and the manifest.

The plan (`plan.json` in the work directory) holds everything the bytes of the result depend on.
Unfinished work is only resumed under the same plan.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fourfold import __version__
from fourfold.data.datasets import KEEP_SECONDS, read_manifest
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer
from fourfold.tools.prepare.documents import (
    DAMAGED_FILE,
    MAX_DOCUMENT_BYTES,
    TOO_LONG_DOCUMENT,
    UNDECODABLE,
    BadLine,
    TextRule,
)
from fourfold.tools.prepare.input_files import InputFile
from fourfold.tools.prepare.work_shards import (
    PLACES_KEPT,
    ChunkReport,
    ShardReport,
    TokenRule,
    token_dtype,
    write_json,
)
from fourfold.tools.prepare.writers import MANIFEST_VERSION, records_of

try:
    import fcntl
except ImportError:  # Windows: two runs at once are then not noticed
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

# Lustre without -o flock, some servers of NFS.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
PLAN_VERSION = 2
_HASH_BLOCK = 1 << 22
# What makes a file of which nothing else could be read a lost one.
UNREADABLE = (UNDECODABLE, TOO_LONG_DOCUMENT)


@dataclass(frozen=True)
class PrepareSettings:
    """What to prepare, and how. `tokenizer` is a place `Tokenizer.load` knows."""

    tokenizer: str | tuple[str, str]
    format: str = "megatron"
    append_eod: bool = True
    prepend_bos: bool | None = None  # as the tokenizer's family does
    json_key: str = "text"
    document_separator: str = "blank-line"
    min_length: int = 0
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    workers: int = 1
    max_bad_lines: int = 100
    allow_damaged_files: bool = False
    overwrite: bool = False
    chunk_bytes: int | None = None  # chosen by the size of the input

    def text_rule(self) -> TextRule:
        return TextRule(self.json_key, self.document_separator, self.max_document_bytes)

    def token_rule(self, tokenizer: Tokenizer) -> TokenRule:
        fleetx = self.format == "fleetx"
        return TokenRule(
            token_dtype(tokenizer.vocab_size, self.format).str,
            self.append_eod,
            self.min_length,
            strip=fleetx,
            keep_empty=not fleetx,
            begin_ids=tokenizer.beginning(self.prepend_bos),
        )


@dataclass(frozen=True)
class PreparePlan:
    """Everything the result depends on."""

    inputs: tuple[tuple[str, int, int], ...]  # path, bytes, time of modification
    flags: dict[str, Any]
    tokenizer: str
    chunk_bytes: int

    @classmethod
    def from_settings(
        cls,
        files: Sequence[InputFile],
        settings: PrepareSettings,
        tokenizer: Tokenizer,
        chunk_bytes: int,
    ) -> PreparePlan:
        inputs = tuple((str(file.path), file.num_bytes, file.modified) for file in files)
        flags = {
            "format": settings.format,
            "append_eod": settings.append_eod,
            "json_key": settings.json_key,
            "document_separator": settings.document_separator,
            "min_length": settings.min_length,
            "max_document_bytes": settings.max_document_bytes,
        }
        if begin_ids := tokenizer.beginning(settings.prepend_bos):
            flags["begin_ids"] = list(begin_ids)
        return cls(inputs, flags, tokenizer.identity, chunk_bytes)

    @property
    def content(self) -> dict[str, Any]:
        return {
            "version": PLAN_VERSION,
            "fourfold": __version__,
            "flags": self.flags,
            "tokenizer": self.tokenizer,
            "chunk_bytes": self.chunk_bytes,
            "inputs": [list(entry) for entry in self.inputs],
        }

    @property
    def identity(self) -> str:
        return hashlib.sha256(json.dumps(self.content).encode()).hexdigest()

    def begin_or_resume(self, work: Path, overwrite: bool) -> Path:
        """The directory for the shards of this plan, with those an earlier run finished.

        Work under another plan is refused, or removed if allowed.
        """
        file = work / "plan.json"
        found = json.loads(file.read_bytes()) if file.exists() else self.content
        if found != self.content and not overwrite:
            raise UserError(
                f"{work}: holds unfinished work with {self._difference(found)}; repeat that "
                "command to resume it, or give --overwrite to start over"
            )
        # A worker that outlived its killed parent for a moment can thus do no harm to a new plan.
        shards = work / self.identity[:16]
        for entry in work.iterdir():
            if entry.is_dir() and entry != shards:
                shutil.rmtree(entry)
        shards.mkdir(exist_ok=True)
        for unfinished in shards.glob(".*.tmp"):
            unfinished.unlink(missing_ok=True)
        write_json(file, self.content)
        return shards

    def _difference(self, found: dict[str, Any]) -> str:
        changed = []
        for flag, value in self.flags.items():
            before = found.get("flags", {}).get(flag)
            if before != value:
                changed.append(f"{flag} {before!r} instead of {value!r}")
        if found.get("tokenizer") != self.tokenizer:
            changed.append("another tokenizer")
        before_inputs = {entry[0]: entry[1:] for entry in found.get("inputs", [])}
        now = {path: [num_bytes, modified] for path, num_bytes, modified in self.inputs}
        for path in [*now, *before_inputs]:
            if before_inputs.get(path) != now.get(path):
                what = (
                    "changed since"
                    if path in now and path in before_inputs
                    else ("not among the inputs" if path in now else "among the inputs")
                )
                changed.append(f"{path} {what}")
                break
        return " and ".join(changed) or "another version of Fourfold or another order of inputs"

    @contextmanager
    def locked(self, work: Path) -> Iterator[None]:
        """Keep other runs out of the work directory.

        The lock is beside it: a directory with an open file in it cannot be removed from NFS,
        where the file lives on under another name.
        """
        lock = work.with_name(f".{work.name}.lock")
        with lock.open("w") as file:
            if not _hold(file, lock):
                raise UserError(
                    f"{work}: another `fourfold data prepare` is already running there; wait for "
                    "it, or choose another prefix"
                )
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)


def _hold(file: IO[str], lock: Path) -> bool:
    """Lock a file that was opened; False if another process holds it or has just released it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_ino == lock.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning(
            "%s: this file system has no locks (%s), so a second `fourfold data prepare` of the "
            "same prefix would not be noticed; do not start one",
            lock.parent,
            error.strerror,
        )
        return True


class DocumentCounts:
    """Counts over shards in order; stops when more was bad than allowed.

    A file that is damaged, or of which nothing at all could be read, is more than a bad line:
    it stops the run whatever the limit, unless `allow_damaged_files`.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        max_bad_lines: int,
        allow_damaged_files: bool = False,
    ) -> None:
        self.documents = self.empty = self.short = self.tokens = 0
        self.kinds: Counter[str] = Counter()
        self.places: list[tuple[str, int, str]] = []  # file, line, reason
        self._files = files
        self._max_bad_lines = max_bad_lines
        self._allow_damaged_files = allow_damaged_files
        self._lines = [0] * len(files)
        self._texts = [0] * len(files)
        self._first_unreadable: dict[int, BadLine] = {}
        self._ended: set[int] = set()

    @property
    def num_bad(self) -> int:
        return sum(self.kinds.values())

    def add(self, report: ShardReport) -> bool:
        """False for a shard beyond the end of its file."""
        if any(chunk.file in self._ended for chunk in report.chunks):
            return False
        self.documents += report.documents
        self.empty += report.empty
        self.short += report.short
        self.tokens += report.tokens
        for chunk in report.chunks:
            self._add_chunk(chunk)
        if self.num_bad > self._max_bad_lines:
            raise DataError(self._too_many())
        return True

    def _add_chunk(self, chunk: ChunkReport) -> None:
        for bad in chunk.places:
            bad = bad._replace(line=self._lines[chunk.file] + bad.line)
            if len(self.places) < PLACES_KEPT:
                self.places.append((str(self._files[chunk.file].path), bad.line, bad.reason))
            if bad.kind == DAMAGED_FILE:
                self._refuse_damaged(chunk.file, bad, "the rest of it")
            elif bad.kind in UNREADABLE:
                self._first_unreadable.setdefault(chunk.file, bad)
        self.kinds.update(chunk.bad)
        self._lines[chunk.file] += chunk.num_lines
        self._texts[chunk.file] += chunk.texts
        if chunk.ended:
            self._ended.add(chunk.file)
            self._check_something_was_read(chunk.file)

    def check_files(self) -> None:
        """Of every file something could be read, or there was nothing in it."""
        for number in range(len(self._files)):
            self._check_something_was_read(number)

    def _check_something_was_read(self, file: int) -> None:
        if not self._texts[file] and file in self._first_unreadable:
            self._refuse_damaged(file, self._first_unreadable[file], "all of it")

    def _refuse_damaged(self, file: int, bad: BadLine, lost: str) -> None:
        if not self._allow_damaged_files:
            raise DataError(damaged_file(self._files[file].path, bad, lost))

    def _too_many(self) -> str:
        path, line, reason = self.places[0]
        if self._max_bad_lines == 0:
            return f"{path}:{line}: {reason}; fix or remove the line, or allow --max-bad-lines"
        return (
            f"{self.summary()}\nmore than --max-bad-lines {self._max_bad_lines} allows; fix the "
            "input, or raise the limit: the same command then resumes from here"
        )

    def summary(self) -> str:
        return "\n".join(dropped_summary(self.entries()))

    def entries(self) -> dict[str, Any]:
        """The manifest's account of what did not become a document."""
        first = [{"path": path, "line": line, "reason": why} for path, line, why in self.places]
        return {
            "empty_documents": self.empty,
            "short_documents": self.short,
            "dropped": {"count": self.num_bad, "kinds": dict(self.kinds), "first": first},
        }


def damaged_file(path: Path, bad: BadLine, lost: str = "the rest of it") -> str:
    return (
        f"{path}:{bad.line}: {bad.reason}, so {lost} would be missing from the result; repair "
        "the file or copy it again, or give --allow-damaged-files to continue without what is lost"
    )


def dropped_summary(manifest: dict[str, Any]) -> list[str]:
    """What did not become a document: how many, of which kinds, and where the first few are."""
    lines = []
    for key, what in (("empty_documents", "without a token"), ("short_documents", "too short")):
        if manifest.get(key):
            lines.append(f"{manifest[key]:,} documents {what} were left out")
    dropped = manifest.get("dropped") or {"count": 0}
    if dropped["count"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(dropped["kinds"].items()))
        lines.append(f"{dropped['count']:,} bad lines were skipped ({kinds}):")
        lines += [f"  {at['path']}:{at['line']}: {at['reason']}" for at in dropped["first"][:5]]
        if dropped["count"] > 5:
            lines.append("  ...")
    return lines


class InputHashes:
    """The SHA-256 of each input, computed in the background while the workers read the same.

    Those that are finished are kept in the directory of the shards, whose plan names the size and
    time of every input: a resumed run does not hash them again.
    """

    def __init__(self, files: Sequence[InputFile], directory: Path, threads: int = 1) -> None:
        self._files = files
        self._kept = directory / "hashes.json"
        self._digests: dict[str, str] = _read_strings(self._kept)
        self._noted = -KEEP_SECONDS
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._threads = ThreadPoolExecutor(threads, "fourfold-hash")
        self._futures: list[Future[None]] = []

    def __enter__(self) -> InputHashes:
        paths = {str(file.path): file.path for file in self._files}
        missing = [path for name, path in paths.items() if name not in self._digests]
        self._futures = [self._threads.submit(self._hash, path) for path in missing]
        return self

    def __exit__(self, *raised: object) -> None:
        self._given_up.set()
        self._threads.shutdown(cancel_futures=True)

    def wait(self) -> list[dict[str, Any]]:
        """The manifest's list of inputs; an error if one was changed meanwhile."""
        try:
            for future in self._futures:
                future.result()
        except OSError as error:
            raise DataError(f"an input can no longer be read: {error}") from error
        for file in self._files:
            status = file.path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.num_bytes, file.modified):
                raise DataError(
                    f"{file.path}: changed while it was being prepared; run the command again "
                    "with --overwrite"
                )
        return [
            {
                "path": str(file.path),
                "bytes": file.num_bytes,
                "sha256": self._digests[str(file.path)],
            }
            for file in self._files
        ]

    def _hash(self, path: Path) -> None:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while block := stream.read(_HASH_BLOCK):
                if self._given_up.is_set():
                    return
                digest.update(block)
        with self._lock:
            self._digests[str(path)] = digest.hexdigest()
            if time.monotonic() - self._noted >= KEEP_SECONDS:
                with suppress(OSError):  # a convenience
                    write_json(self._kept, self._digests)
                self._noted = time.monotonic()


def _read_strings(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in content.items() if isinstance(v, str)}


def describe(tokenizer: dict[str, Any], rule: TokenRule) -> dict[str, Any]:
    """The head of every manifest."""
    head = {
        "version": MANIFEST_VERSION,
        "fourfold": __version__,
        "tokenizer": tokenizer,
        "append_eod": rule.append_eod,
    }
    return head | ({"begin_ids": list(rule.begin_ids)} if rule.begin_ids else {})


def tokenizer_entry(tokenizer: Tokenizer, place: str | tuple[str, str] | None) -> dict[str, Any]:
    """`place` is where it was loaded from, for those who look for it again."""
    entry: dict[str, Any] = {}
    if isinstance(place, tuple):
        entry = {"name": ", ".join(place), "files": list(place)}
    elif place is not None:
        entry = {"name": place}
    if tokenizer.older_identity is not None:
        entry["older_identity"] = tokenizer.older_identity
    return entry | {
        "identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }


def finished_manifest(prefix: Path, plan: PreparePlan) -> dict[str, Any] | None:
    """The manifest at `prefix` if this very plan was carried out there.

    `DataError` if it was and the files are no longer what it left.
    """
    manifest = read_manifest(prefix)
    if manifest is None or manifest.get("plan") != plan.identity:
        return None
    for record in records_of(manifest, prefix):
        held = record.file.stat().st_size if record.file.is_file() else None
        if held is None or held != record.num_bytes:
            found = "is missing" if held is None else f"has {held} bytes"
            raise DataError(
                f"{record.file}: {found}, {record.num_bytes} were written; what was prepared here "
                "is damaged: copy it again, or prepare it again by --overwrite"
            )
    return manifest
