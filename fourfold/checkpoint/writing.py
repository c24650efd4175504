"""Saving: write aside, sync, commit by atomic rename, point `latest` at it, drop the oldest."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fourfold import storage
from fourfold.atomic_files import sync_directory
from fourfold.checkpoint.bounded import encode_json
from fourfold.checkpoint.bucket import rendezvous_of
from fourfold.checkpoint.directory import (
    Retention,
    history,
    look,
    point_latest,
    retire,
    tidy,
)
from fourfold.checkpoint.disk import FULL, explained, free_bytes, readable_gb, write_times
from fourfold.checkpoint.index import Part, joined
from fourfold.checkpoint.manifest import MAX_STATE_BYTES, STATE, write_manifest
from fourfold.checkpoint.rendezvous import ALONE, Beat, RankGroup, SaveRendezvous, silent
from fourfold.checkpoint.streams import BEAT_SECONDS, Outgoing
from fourfold.checkpoint.tensor_files import check_writable, sources_of, write_shards
from fourfold.errors import CheckpointError
from fourfold.shards import Shard, Tensors, as_shards

log = logging.getLogger(__name__)

# Headers, manifest and directory blocks, generously.
OVERHEAD_BYTES = 1 << 20
OVERHEAD_BYTES_PER_TENSOR = 1 << 10
REPORT_AGAIN_SECONDS = 0.1
NO_ROOM_SECONDS = 2.0


def save(
    output_dir: Path | str,
    step: int,
    tensors: Tensors,
    state: dict[str, Any],
    keep_last: int | Retention = 3,
    ranks: RankGroup = ALONE,
) -> Path:
    """Commit `output_dir/step_N` and return it; the `keep_last` newest are kept (0: all).

    Every rank calls it with the shards it is to write; together they make up each tensor exactly
    once, and the state is the same everywhere. Rank 0 returns when the checkpoint is committed, the
    others when all parts are complete.

    A save that fails raises `CheckpointError` on rank 0 and on the rank that failed, one that
    cannot even begin on all of them, and leaves the directory as it was. Tied tensors are given
    once. The tensors must not change until this returns.
    """
    shards = as_shards(tensors)
    check_writable(shards)
    state_bytes = encode_json(state, MAX_STATE_BYTES, STATE)
    place, keep = storage.local_path(output_dir), _retention(keep_last)
    return _Save(place, step, shards, state_bytes, keep, ranks).begun().run()


def begin_save(
    output_dir: Path | str,
    step: int,
    tensors: Tensors,
    state: dict[str, Any],
    keep_last: int | Retention = 3,
    ranks: RankGroup = ALONE,
    in_place: bool = False,
) -> PendingSave:
    """As `save`, but return as soon as everything is copied to host memory.

    With `in_place` what is in host memory stays where it is, and must not change before `settle`
    of the save was called. The next save of any kind must wait for this one.
    """
    shards = as_shards(tensors)
    check_writable(shards)
    state_bytes = encode_json(state, MAX_STATE_BYTES, STATE)
    # A working thread says nothing about the rank being alive, until somebody waits for it.
    moved = threading.Event()
    quiet = replace(ranks, beat=moved.set)
    place, keep = storage.local_path(output_dir), _retention(keep_last)
    work = _Save(place, step, shards, state_bytes, keep, quiet).begun()
    for name, source in work.sources.items():
        if not in_place or not shards[name].local.is_cpu:
            source.settle()
    return PendingSave(work.run, moved, work.sources, work.written)


def _retention(keep: int | Retention) -> Retention:
    return Retention(keep) if isinstance(keep, int) else keep


class PendingSave:
    """A save running in the background. A process that ends without `wait` abandons it."""

    def __init__(
        self,
        work: Callable[[], Path],
        moved: threading.Event,
        sources: Mapping[str, Outgoing],
        written: threading.Event | None = None,
    ) -> None:
        self._written = threading.Event() if written is None else written
        self._moved = moved
        self._sources = sources
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

    def settle(self) -> None:
        """Copy what is not yet written; from here on the tensors may change."""
        if not self.done:
            for source in self._sources.values():
                source.settle()

    def wait_until_written(self, beat: Beat = silent) -> None:
        """Return once this rank's files are complete, though not yet uploaded, or it failed."""
        while not (self.done or self._written.wait(BEAT_SECONDS)):
            beat()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def succeeded(self) -> bool:
        """Whether this rank's work is done and nothing went wrong; of rank 0, it is committed."""
        return self.done and self._error is None

    def wait(self, beat: Beat = silent) -> Path:
        """The checkpoint's path once this rank's work is done; raises what went wrong.

        Meanwhile `beat` is called as long as the work makes progress.
        """
        while not self.done:
            self._thread.join(BEAT_SECONDS)
            if self._moved.is_set():
                self._moved.clear()
                beat()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


@dataclass(frozen=True)
class _Save:
    """What one rank does for one checkpoint: `begun` calls collectives, `run` does not."""

    output_dir: Path
    step: int
    shards: Mapping[str, Shard]
    state_bytes: bytes
    keep: Retention
    ranks: RankGroup
    meeting: SaveRendezvous | None = None
    # Set once everything of this rank is in its files, be they staged or where they belong.
    written: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        assert self.step >= 0

    @cached_property
    def sources(self) -> dict[str, Outgoing]:
        return sources_of(self.shards)

    @property
    def target(self) -> Path:
        return self.output_dir / f"step_{self.step}"

    def begun(self) -> _Save:
        """The save with a place to write to; what keeps rank 0 from that is raised on all ranks."""
        meeting = rendezvous_of(self.output_dir, self.step, self.ranks)
        needed = sum(map(int, self.ranks.gather(str(self._bytes_needed()))))
        problem = None
        try:
            if self.ranks.rank == 0:
                self._open(meeting, needed)
        except (OSError, CheckpointError) as error:
            problem = self._reason(error)
        except BaseException as error:
            self.ranks.broadcast_first(repr(error))
            raise
        if told := self.ranks.broadcast_first(problem):
            raise self._failure(told)
        return replace(self, meeting=meeting)

    def _open(self, meeting: SaveRendezvous, needed: int) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        tidy(self.output_dir)
        free = free_bytes(self.output_dir)
        if needed > free:
            raise CheckpointError(
                f"the disk is too full: it needs {readable_gb(needed)} and {self.output_dir} has "
                f"{readable_gb(free)} free; make room or choose another output directory"
            )
        meeting.open()

    def run(self) -> Path:
        assert self.meeting is not None
        try:
            if self.ranks.rank == 0:
                self._lead(self.meeting)
            else:
                self._take_part(self.meeting)
        except (OSError, CheckpointError) as error:
            raise self._failure(self._reason(error)) from error
        return self.target

    def _lead(self, meeting: SaveRendezvous) -> None:
        try:
            if self.ranks.size == 1:
                indices = joined({0: self._write_shards(meeting)})
            else:
                indices = meeting.close(*self._part(meeting))
            look(self.output_dir)
            serial = 1 + max((entry.serial for entry in history(self.output_dir)), default=0)
            write_manifest(meeting.directory, self.step, serial, indices, self.state_bytes)
            sync_directory(meeting.directory)
            self.ranks.may_commit()
            meeting.commit(self.target)
        finally:
            meeting.abandon()
        try:
            point_latest(self.target)
            tidy(self.output_dir)
            retire(self.output_dir, self.keep)
        except OSError as error:
            # The checkpoint is safe; only what comes after it failed.
            saved = storage.name_of(self.target)
            log.warning("%s is saved, but tidying up after it failed: %s", saved, error)

    def _take_part(self, meeting: SaveRendezvous) -> None:
        meeting.join()
        try:
            part, problem = self._part(meeting)
            if part is None:
                raise CheckpointError(problem)
            meeting.report(part)
        except BaseException as error:
            problem = str(error) if isinstance(error, CheckpointError) else repr(error)
            self._discard(meeting.directory)
            self._report_failure(meeting, problem)
            raise
        meeting.leave()

    def _report_failure(self, meeting: SaveRendezvous, problem: str) -> None:
        """Where there is no room for it, rank 0 may be about to fail too, and to make some. After
        a moment that is said in short; where not even that can be, rank 0 misses us in time."""
        moment = min(NO_ROOM_SECONDS, self.ranks.timeout_seconds / 2)
        deadline = time.monotonic() + moment
        while time.monotonic() < deadline:
            try:
                meeting.report(None, problem)
            except OSError as error:
                if error.errno not in FULL:
                    return
            else:
                return
            time.sleep(REPORT_AGAIN_SECONDS)
        with suppress(OSError):
            meeting.report_no_room()

    def _discard(self, directory: Path) -> None:
        """Remove what this rank has written: on a full disk there must be room to say so."""
        for path in directory.glob(f"*-{self._label()}*.safetensors"):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _part(self, meeting: SaveRendezvous) -> tuple[Part | None, str]:
        """Write this rank's pieces; returns what to record about them, or why there is nothing."""
        try:
            return self._write_shards(meeting), ""
        except (OSError, CheckpointError) as error:
            self._discard(meeting.directory)
            where = f" (on {socket.gethostname()})" if self.ranks.size > 1 else ""
            return None, f"{self._reason(error)}{where}"

    def _write_shards(self, meeting: SaveRendezvous) -> Part:
        told = (self._label(), self.ranks.beat, self.sources)
        start = time.perf_counter()
        part = write_shards(meeting.directory, self.shards, *told)
        write_times.add(time.perf_counter() - start)
        self.written.set()
        meeting.deliver(part)
        return part

    def _label(self) -> str:
        assert self.meeting is not None
        rank = f"rank{self.ranks.rank:05d}-" if self.ranks.size > 1 else ""
        return self.meeting.label + rank

    def _bytes_needed(self) -> int:
        """Disk space this rank's part takes, rounded up."""
        content = sum(shard.local.nbytes for shard in self.shards.values())
        overhead = OVERHEAD_BYTES + OVERHEAD_BYTES_PER_TENSOR * len(self.shards)
        return content + overhead + len(self.state_bytes)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        return explained(error, self.output_dir)

    def _failure(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"cannot save checkpoint {storage.name_of(self.target)}: {reason}. Earlier "
            "checkpoints are untouched"
        )
