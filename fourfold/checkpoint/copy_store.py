"""Copies of the state in memory: what one machine holds of them.

    /dev/shm/fourfold-UID-HASH/              of one output directory; nobody else may look into it
      TIMELINE/step_N/                       the copy of a step
        model-rank00003-...safetensors       as in a checkpoint: of our ranks, and of a neighbour's
        state.json
        rank00003-of-00008-DIGEST.json       what there is of rank 3, with digests; appears last
      whole/                                 a copy put together as a checkpoint, to be loaded

A timeline is what PostgreSQL calls so: it begins whenever a run begins to train from a state, and
whoever goes back to an earlier one begins another. Steps of different timelines are different
states, whatever their numbers. Everything here outlives the processes of a run and nothing of it
the machine, so nothing is trusted before its digest was compared.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fourfold import storage
from fourfold.atomic_files import replace_bytes
from fourfold.checkpoint.bounded import (
    HASH,
    FileRecord,
    check_size,
    digest_of,
    new_hasher,
    parse_record,
    read_bounded,
)
from fourfold.checkpoint.index import RankRecord, encode_part
from fourfold.checkpoint.manifest import MAX_INDEX_BYTES, STATE
from fourfold.checkpoint.streams import Outgoing, in_threads, read_hashed
from fourfold.checkpoint.tensor_files import write_shards
from fourfold.errors import CheckpointError
from fourfold.shards import Shard

# A file system that is memory. Here and nowhere else, so that a test can put another in its place.
MEMORY = Path("/dev/shm")

WHOLE = "whole"
TIMELINE = re.compile(r"[0-9a-f]{16}")
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_RECORD = re.compile(r"rank([0-9]{5,9})-of-([0-9]{5,9})-([0-9a-f]{64})\.json")
_FILE = re.compile(r"[A-Za-z0-9_]+-rank([0-9]{5,9})-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")

Beat = Callable[[], None]


class CopyOf(NamedTuple):
    """Which state a copy is of."""

    timeline: str
    step: int


class HeldParts(NamedTuple):
    """What a machine has of one copy: of how many ranks it was made, and of which of them there is
    a record, with the digests of these."""

    ranks: int
    records: dict[int, str]


def in_words(error: Exception) -> str:
    """What went wrong with memory that is a file system, where the advice about disks is of no
    use."""
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename or MEMORY} on {socket.gethostname()}"
    return str(error)


def new_timeline() -> str:
    return secrets.token_hex(8)


def record_name(rank: int, ranks: int, digest: str) -> str:
    return f"rank{rank:05d}-of-{ranks:05d}-{digest}.json"


def writer_of(file: str) -> int | None:
    """The rank that wrote a file of tensors; None if it is no such file."""
    found = _FILE.fullmatch(file)
    return None if found is None else int(found[1])


def memory_identity() -> list[object]:
    """The same for two processes if they have the same `MEMORY`; containers may have their own."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found = os.stat(MEMORY)
    return [boot, found.st_dev, found.st_ino]


class CopyStore:
    """The copies of one run that are in the memory of this machine; its ranks share it."""

    def __init__(self, output_dir: Path) -> None:
        name = storage.name_of(output_dir.resolve())
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.root = MEMORY / f"fourfold-{os.getuid()}-{digest}"

    def open(self) -> None:
        """Make the directory; raises where it is not ours alone, since anybody may write there."""
        try:
            with suppress(FileExistsError):
                self.root.mkdir(mode=0o700)
            found = self.root.lstat()
        except OSError as error:
            raise CheckpointError(
                f"no copy can be kept in {MEMORY} ({error.strerror}); set "
                "Engine.save_load.memory_copy_steps=0, or give the machine a memory file system "
                "there"
            ) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise CheckpointError(
                f"{self.root} is not a directory of this user alone, and what is in it cannot be "
                "trusted; remove it"
            )

    @property
    def is_there(self) -> bool:
        return os.path.lexists(self.root)

    @property
    def whole(self) -> Path:
        """Where a copy is put together."""
        return self.root / WHOLE

    def place(self, copy: CopyOf) -> Path:
        return self.root / copy.timeline / f"step_{copy.step}"

    def used_bytes(self) -> int:
        return sum(path.lstat().st_blocks * 512 for path in self.root.rglob("*"))

    # -- writing ------------------------------------------------------------------------------

    def write(
        self,
        copy: CopyOf,
        ranks: tuple[int, int],
        shards: Mapping[str, Shard],
        sources: Mapping[str, Outgoing],
        state: bytes,
        beat: Beat,
    ) -> bytes:
        """This rank's part of a copy, which is rank `ranks[0]` of `ranks[1]`; returns its record,
        which is there when everything it lists is."""
        place, (rank, size) = self.place(copy), ranks
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = write_shards(place, shards, f"rank{rank:05d}-", beat, sources)
        replace_bytes(place / STATE, state)  # the same from every rank
        told = FileRecord(bytes=len(state), digest=digest_of(state, HASH))
        record = encode_part(replace(part, files={**part.files, STATE: told}))
        name = record_name(rank, size, digest_of(record, HASH))
        check_size(record, MAX_INDEX_BYTES, name)
        replace_bytes(place / name, record)
        return record

    # -- what is there ------------------------------------------------------------------------

    def held(self) -> dict[CopyOf, HeldParts]:
        """Every copy of which there is something: the records are sound, what they list is not
        looked at."""
        found: dict[CopyOf, HeldParts] = {}
        with suppress(OSError):
            for place in self.root.glob("*/step_*"):
                step = _STEP.fullmatch(place.name)
                if step and TIMELINE.fullmatch(place.parent.name):
                    with suppress(OSError, CheckpointError):
                        if (parts := _parts_in(place)) is not None:
                            found[CopyOf(place.parent.name, int(step[1]))] = parts
        return found

    def newest_step(self) -> int | None:
        return max((copy.step for copy in self.held()), default=None)

    def problem(self, copy: CopyOf, record_file: str, rank: int, beat: Beat) -> str | None:
        """What is wrong with the part of a rank, down to the last byte; None if it is sound."""
        place = self.place(copy)
        try:
            record = place / record_file
            files = listed_files(read_bounded(record, MAX_INDEX_BYTES), record, rank)
        except CheckpointError as error:
            return str(error)

        def look(file: str, progress: Beat) -> str | None:
            return _file_problem(place / file, files[file], progress)

        return next(filter(None, in_threads(look, files, beat)), None)

    # -- removing -----------------------------------------------------------------------------

    def keep(self, copies: Collection[CopyOf]) -> None:
        """Remove everything else."""
        kept = {self.place(copy) for copy in copies}
        with suppress(OSError):
            for path in [*self.root.iterdir()]:
                inside = [*path.iterdir()] if path.is_dir() and not path.is_symlink() else []
                if kept.isdisjoint(inside):
                    self._remove(path)
                    continue
                for place in inside:
                    if place not in kept:
                        self._remove(place)

    def clear_whole(self) -> None:
        if os.path.lexists(self.whole):
            self._remove(self.whole)

    def remove(self) -> None:
        """Remove all of it, and the directory."""
        self.keep(())
        with suppress(OSError):
            self.root.rmdir()

    def _remove(self, path: Path) -> None:
        """First its name, so that nobody takes what is left of it for a copy."""
        gone = self.root / f".gone-{secrets.token_hex(4)}"
        with suppress(OSError):
            path.rename(gone)
            shutil.rmtree(gone) if gone.is_dir() and not gone.is_symlink() else gone.unlink()


def _parts_in(place: Path) -> HeldParts | None:
    ranks, records = set[int](), dict[int, str]()
    for path in place.iterdir():
        if found := _RECORD.fullmatch(path.name):
            with suppress(CheckpointError):
                if digest_of(read_bounded(path, MAX_INDEX_BYTES), HASH) == found[3]:
                    ranks.add(int(found[2]))
                    records[int(found[1])] = found[3]
    if len(ranks) != 1:
        return None  # nothing, or of two runs at once, which cannot be
    return HeldParts(ranks.pop(), records)


def listed_files(record: bytes, path: Path, rank: int) -> dict[str, FileRecord]:
    """The files of a rank's part, from its record; only such that this rank could have written."""
    head = parse_record(RankRecord, record.partition(b"\n")[0], path)
    for file in head.files:
        if file != STATE and writer_of(file) != rank:
            raise CheckpointError(f"{path} is damaged: {file} is not a file of rank {rank}")
    if head.problem is not None or STATE not in head.files:
        raise CheckpointError(f"{path} is damaged: it is not the record of a copy")
    return dict(head.files)


def _file_problem(path: Path, expected: FileRecord, progress: Beat) -> str | None:
    hasher = new_hasher(HASH)
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != expected.bytes:
                return f"{path} has {size} bytes and should have {expected.bytes}"
            read_hashed(stream.fileno(), hasher, (), progress)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if hasher.hexdigest() != expected.digest:
        return f"{path} is corrupted: its {HASH} digest is not that of its record"
    return None
