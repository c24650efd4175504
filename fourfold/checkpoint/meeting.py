"""How many ranks write one checkpoint: they meet in a directory, and need nothing else.

    rank 0 makes the directory, whose name all can work out; the others wait for it
    every rank writes its files, then `rankNNNNN.json`: what it wrote, or why it could not
    rank 0 waits for all of these, then moves the directory to a name only it knows

A record appears by rename after the files it lists were synced. From the move on nobody else can
touch what will be committed: a rank that comes too late finds no directory.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from fourfold.checkpoint.crew import Crew
from fourfold.checkpoint.directory import meeting_name, private_name, remove
from fourfold.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    FileName,
    FileRecord,
    StrictRecord,
    TensorRecord,
    check_nesting,
    encode_json,
    parse_record,
    read_bounded,
)
from fourfold.checkpoint.pieces import tiling_problem
from fourfold.checkpoint.shards import Tables
from fourfold.errors import CheckpointError

FIRST_PAUSE_SECONDS = 0.005
LONGEST_PAUSE_SECONDS = 0.2


class RankRecord(StrictRecord):
    """One rank's part of a checkpoint, or its reason for having none."""

    files: dict[FileName, FileRecord] = Field(default_factory=dict)
    tensors: dict[str, TensorRecord] = Field(default_factory=dict)
    problem: str | None = None


class Meeting:
    """One save of one step, as one of its ranks sees it.

    A process by itself meets nobody, in a directory with a name that says which process it is.
    """

    def __init__(self, output_dir: Path, step: int, crew: Crew) -> None:
        self.crew = crew
        if crew.size == 1:
            self.directory = private_name(output_dir, f"step_{step}", "tmp")
        else:
            self.directory = meeting_name(output_dir, step, crew.session)

    def open(self) -> None:
        assert self.crew.rank == 0
        self.directory.mkdir()

    def join(self) -> None:
        """Wait until rank 0 has opened."""
        own = self._record_path(self.crew.rank)

        # Our record in it is of an earlier save of this step that rank 0 is still busy with.
        def is_open() -> bool:
            return not own.exists() and self.directory.is_dir()

        if not _becomes_true(is_open, self.crew.timeout_seconds):
            raise CheckpointError(
                f"rank 0 did not begin this save within {self.crew.timeout_seconds:g} s"
            )

    def report(self, record: RankRecord) -> None:
        """Say that this rank is done."""
        path = self._record_path(self.crew.rank)
        data = encode_json(record.model_dump(mode="json"), MAX_MANIFEST_BYTES, path.name)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)

    def close(self, own: RankRecord) -> Tables:
        """Wait for the other ranks; what all have written, if together it makes a whole.

        The directory then has a private name and no records in it. That some rank failed is
        raised when all are done, so that the others need not notice.
        """
        missing = self._wait_for_records()
        self._take_away()
        if missing:
            raise CheckpointError(
                f"no part came from rank {', '.join(map(str, sorted(missing)))} within "
                f"{self.crew.timeout_seconds:g} s"
            )
        others = {rank: self._read(rank) for rank in range(1, self.crew.size)}
        records = {0: own} | others
        failed = [f"rank {rank}: {r.problem}" for rank, r in records.items() if r.problem]
        if failed:
            raise CheckpointError("; ".join(failed))
        tables = joined(records)
        self._check_sizes(tables[0])
        for rank in others:
            self._record_path(rank).unlink()
        return tables

    def abandon(self) -> None:
        """Remove what is there: first the name, so that a late rank finds nothing to write into."""
        with suppress(OSError):
            self._take_away()
        remove(self.directory)

    def _wait_for_records(self) -> set[int]:
        """The ranks that have not reported in time."""
        waiting = set(range(1, self.crew.size))

        def all_there() -> bool:
            waiting.difference_update([r for r in waiting if self._record_path(r).exists()])
            return not waiting

        _becomes_true(all_there, self.crew.timeout_seconds)
        return waiting

    def _take_away(self) -> None:
        private = self.directory.with_name(f"{self.directory.name}-{secrets.token_hex(4)}")
        self.directory.rename(private)
        self.directory = private

    def _read(self, rank: int) -> RankRecord:
        path = self._record_path(rank)
        data = read_bounded(path, MAX_MANIFEST_BYTES)
        check_nesting(data, path)
        return parse_record(RankRecord, data, path)

    def _check_sizes(self, files: dict[str, FileRecord]) -> None:
        """A network file system may show a file of another machine later than its record."""
        waiting = set(files)

        def all_there() -> bool:
            waiting.difference_update([f for f in waiting if self._size(f) == files[f].bytes])
            return not waiting

        if not _becomes_true(all_there, self.crew.timeout_seconds):
            raise CheckpointError(f"{min(waiting)} is not there as its rank has written it")

    def _size(self, file: str) -> int | None:
        path = self.directory / file
        return path.stat().st_size if path.is_file() else None

    def _record_path(self, rank: int) -> Path:
        return self.directory / f"rank{rank:05d}.json"


def joined(records: dict[int, RankRecord]) -> Tables:
    """All parts as one; raises unless each tensor's pieces agree and cover it exactly once."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for rank, record in records.items():
        files |= record.files
        for name, part in record.tensors.items():
            first = tensors.setdefault(name, part)
            if first is part:
                continue
            if (first.shape, first.dtype) != (part.shape, part.dtype):
                raise CheckpointError(f"{name} is {part} on rank {rank} and {first} on another")
            tensors[name] = first.model_copy(update={"pieces": first.pieces + part.pieces})
    for name, tensor in tensors.items():
        problem = tiling_problem(tensor.shape, [piece.box() for piece in tensor.pieces])
        if problem:
            raise CheckpointError(f"the ranks' pieces of {name} do not make it up: {problem}")
    return files, tensors


def _becomes_true(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    pause = FIRST_PAUSE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return True
