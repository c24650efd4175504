"""Saving: write aside, sync, commit by rename, point `latest` at it, drop the oldest."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fourfold.checkpoint.crew import ALONE, Crew
from fourfold.checkpoint.directory import (
    commit,
    history,
    point_latest,
    retire,
    sync_directory,
    tidy,
)
from fourfold.checkpoint.manifest import (
    MANIFEST,
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    encode_json,
)
from fourfold.checkpoint.meeting import Meeting, RankRecord
from fourfold.checkpoint.pieces import Piece, Tensors, as_pieces
from fourfold.checkpoint.shards import Tables, check_writable, synced_record, write_shards
from fourfold.errors import CheckpointError

log = logging.getLogger(__name__)

# Headers, manifest and directory blocks, generously.
OVERHEAD_BYTES = 1 << 20
OVERHEAD_BYTES_PER_TENSOR = 1 << 10

# What disks and directories do to a save; everything else is a mistake of ours.
EXPECTED = (OSError, SafetensorError)


def save(
    output_dir: Path | str,
    step: int,
    tensors: Tensors,
    state: dict[str, Any],
    keep_last: int = 3,
    crew: Crew = ALONE,
) -> Path:
    """Commit `output_dir/step_N` and return it; of all, the `keep_last` newest stay (0: all).

    Every rank of the crew calls it with the pieces it is to write; together they make up each
    tensor exactly once, and the state is the same everywhere. Rank 0 returns when the checkpoint
    is committed, the others when their parts are complete.

    A save that fails raises `CheckpointError` on rank 0 and on the rank that failed, and leaves
    the directory as it was. Tied tensors are given once. The tensors must not change until this
    returns.
    """
    pieces = as_pieces(tensors)
    check_writable(pieces)
    state_bytes = encode_json(state, MAX_STATE_BYTES, STATE)
    return _Save(Path(output_dir), step, pieces, state_bytes, keep_last, crew).run()


def begin_save(
    output_dir: Path | str,
    step: int,
    tensors: Tensors,
    state: dict[str, Any],
    keep_last: int = 3,
    crew: Crew = ALONE,
) -> PendingSave:
    """As `save`, but return as soon as everything is copied to host memory.

    The next save of any kind must wait for this one.
    """
    pieces = as_pieces(tensors)
    check_writable(pieces)
    state_bytes = encode_json(state, MAX_STATE_BYTES, STATE)
    copies = {
        name: Piece(piece.tensor.detach().to("cpu", copy=True), piece.shape, piece.offsets)
        for name, piece in pieces.items()
    }
    return PendingSave(_Save(Path(output_dir), step, copies, state_bytes, keep_last, crew).run)


class PendingSave:
    """A save that goes on in the background. A process that ends without `wait` abandons it."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[], Path]) -> None:
        try:
            self._path = work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The checkpoint's path once this rank's work is done; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


@dataclass(frozen=True)
class _Save:
    """What one rank does for one checkpoint. No collective is called, so a thread may run it."""

    output_dir: Path
    step: int
    pieces: Mapping[str, Piece]
    state_bytes: bytes
    keep_last: int
    crew: Crew

    def __post_init__(self) -> None:
        assert self.step >= 0 and self.keep_last >= 0

    @property
    def target(self) -> Path:
        return self.output_dir / f"step_{self.step}"

    def run(self) -> Path:
        meeting = Meeting(self.output_dir, self.step, self.crew)
        try:
            if self.crew.rank == 0:
                self._lead(meeting)
            else:
                self._take_part(meeting)
        except (*EXPECTED, CheckpointError) as error:
            raise CheckpointError(
                f"cannot save checkpoint {self.target}: {self._reason(error)}. "
                "Earlier checkpoints are untouched"
            ) from error
        return self.target

    def _lead(self, meeting: Meeting) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        tidy(self.output_dir)
        try:
            meeting.open()
            if self.crew.size == 1:
                tables = self._write_pieces(meeting.directory)
            else:
                tables = meeting.close(self._part(meeting.directory))
            self._write_rest(meeting.directory, tables)
            commit(meeting.directory, self.target)
        finally:
            meeting.abandon()
        try:
            point_latest(self.target)
            tidy(self.output_dir)
            retire(self.output_dir, self.keep_last)
        except OSError as error:
            # The checkpoint is safe; only what comes after it failed.
            log.warning("%s is saved, but tidying up after it failed: %s", self.target, error)

    def _take_part(self, meeting: Meeting) -> None:
        meeting.join()
        try:
            record = self._part(meeting.directory)
            if record.problem is None:
                meeting.report(record)
                return
            raise CheckpointError(record.problem)
        except BaseException as error:
            problem = str(error) if isinstance(error, CheckpointError) else repr(error)
            # Where not even this can be written, rank 0 misses us in time.
            with suppress(OSError):
                meeting.report(RankRecord(problem=problem))
            raise

    def _part(self, directory: Path) -> RankRecord:
        """Write this rank's pieces; what there is to tell about it."""
        try:
            files, tensors = self._write_pieces(directory)
            return RankRecord(files=files, tensors=tensors)
        except (*EXPECTED, CheckpointError) as error:
            # On a full disk there must be room to say so.
            for path in directory.glob(f"*-{self._label()}*.safetensors"):
                path.unlink(missing_ok=True)
            return RankRecord(problem=self._reason(error))

    def _write_pieces(self, directory: Path) -> Tables:
        if self._bytes_needed() > shutil.disk_usage(self.output_dir).free:
            raise CheckpointError(f"the disk is too full. {self._room()}")
        return write_shards(directory, self.pieces, self._label())

    def _label(self) -> str:
        return f"rank{self.crew.rank:05d}-" if self.crew.size > 1 else ""

    def _write_rest(self, directory: Path, tables: Tables) -> None:
        serial = 1 + max((entry.serial for entry in history(self.output_dir)), default=0)
        write_manifest(directory, self.step, serial, tables, self.state_bytes)

    def _bytes_needed(self) -> int:
        """Disk space this rank's part takes, rounded up."""
        content = sum(piece.tensor.nbytes for piece in self.pieces.values())
        overhead = OVERHEAD_BYTES + OVERHEAD_BYTES_PER_TENSOR * len(self.pieces)
        return content + overhead + len(self.state_bytes)

    def _reason(self, error: Exception) -> str:
        return str(error) if isinstance(error, CheckpointError) else f"{error}. {self._room()}"

    def _room(self) -> str:
        existing = next(path for path in (self.target, *self.target.parents) if path.exists())
        free, needed = shutil.disk_usage(existing).free, self._bytes_needed()
        whose = "It" if self.crew.size == 1 else f"The part of rank {self.crew.rank}"
        return (
            f"{whose} needs {needed / 1e9:.3f} GB ({needed} bytes) and {existing} has "
            f"{free / 1e9:.3f} GB free; make room or choose another output directory"
        )


def write_manifest(
    directory: Path, step: int, serial: int, tables: Tables, state_bytes: bytes
) -> None:
    """Complete a directory of shards to a checkpoint, synced, that needs only its name."""
    files, tensors = tables
    (directory / STATE).write_bytes(state_bytes)
    files = files | {STATE: synced_record(directory / STATE)}
    manifest = Manifest(step=step, serial=serial, files=files, tensors=tensors).sealed()
    with (directory / MANIFEST).open("wb") as stream:
        stream.write(manifest.to_bytes())
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(directory)
