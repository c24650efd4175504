"""Checkpoints at an address: written here first, uploaded behind the training, committed there.

    step_N/FILE                   uploaded by the rank that wrote it, each under a name of its start
    step_N/manifest.json          put last, by rank 0: what has none is no checkpoint
    .step_N.tmp-crew-HASH/...     the meeting of a save: `rankNNNNN.json` once a rank has uploaded
    latest                        as on a disk

A store has no rename. So the order of the puts is the protocol: the files of all ranks, then state
and indices, then the manifest, then `latest`; whatever is killed in between leaves the checkpoints
before it as they are, and the next save removes what it left. The ranks of a save need no directory
in common: each machine stages what its own ranks write, below the local face of the address.

Reading works on local copies (`look`): the small files of every checkpoint when they are listed,
the large ones when they are verified.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from fourfold import storage
from fourfold.checkpoint.bounded import FileRecord
from fourfold.checkpoint.directory import LEFTOVER, remove
from fourfold.checkpoint.index import Part
from fourfold.checkpoint.manifest import MANIFEST, read_manifest
from fourfold.checkpoint.rendezvous import Beat, RankGroup, SaveRendezvous
from fourfold.checkpoint.streams import in_threads
from fourfold.errors import CheckpointError

# How often a rank that uploads says so to those that wait for it.
ALIVE_SECONDS = 10.0


def rendezvous_of(output_dir: Path, step: int, ranks: RankGroup) -> SaveRendezvous:
    """Where the ranks of a save meet: in the output directory, or at its address."""
    if storage.address_of(output_dir) is None:
        return SaveRendezvous(output_dir, step, ranks)
    return BucketRendezvous(output_dir, step, ranks)


class BucketRendezvous(SaveRendezvous):
    """One save of one step to an address; `directory` is where this machine stages it."""

    # Every look is a request.
    first_pause_seconds = 0.05
    longest_pause_seconds = 2.0

    def __init__(self, output_dir: Path, step: int, ranks: RankGroup) -> None:
        super().__init__(output_dir, step, ranks)
        address = storage.address_of(output_dir)
        assert address is not None
        self.meeting = f"{address}/{self.directory.name}"
        self.target = f"{address}/step_{step}"
        start = ranks.session or secrets.token_hex(8)
        self.label = f"{hashlib.sha256(start.encode()).hexdigest()[:8]}-"

    def open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.ranks.size > 1:
            storage.write(f"{self.meeting}/open", self.ranks.session.encode())

    def join(self) -> None:
        # What a killed run of this machine has left; rank 0's is tidied by itself.
        for path in self.directory.parent.glob(".step_*"):
            if LEFTOVER.fullmatch(path.name) and path.name != self.directory.name:
                remove(path)
        self.directory.mkdir(parents=True, exist_ok=True)
        super().join()

    def deliver(self, part: Part) -> None:
        """Upload what this rank has written, several files at a time; nothing of it stays here."""

        moved, done = threading.Event(), threading.Event()

        def send(file: str, progress: Beat) -> None:
            def beat() -> None:
                moved.set()
                progress()

            storage.upload(self.directory / file, f"{self.target}/{file}", beat)
            (self.directory / file).unlink()

        if self.ranks.size > 1:
            told = threading.Thread(target=self._say_alive, args=(moved, done), daemon=True)
            told.start()
        try:
            in_threads(send, part.files, self.ranks.beat)
        finally:
            done.set()

    def _say_alive(self, moved: threading.Event, done: threading.Event) -> None:
        """In a thread of its own: the beat of an upload comes from where nothing may be sent."""
        note = f"{self.meeting}/rank{self.ranks.rank:05d}.alive"
        while not done.wait(ALIVE_SECONDS):
            if moved.is_set():
                moved.clear()
                with suppress(storage.StorageError):
                    storage.write(note, f"{time.monotonic()}".encode())

    def report_bytes(self, name: str, data: bytes) -> None:
        storage.write(f"{self.meeting}/{name}", data)

    def leave(self) -> None:
        own = self._record_name(self.ranks.rank)
        if not self._becomes_true(lambda: own not in (self._listed() or ()), self._last_change):
            raise CheckpointError(
                f"rank 0 did not end this save within {self.ranks.timeout_seconds:g} s"
            )

    def commit(self, target: Path) -> None:
        """Put what rank 0 has written beside the files of all, the manifest last of all."""
        keep = {MANIFEST, *read_manifest(self.directory).files}
        there = storage.children(self.target)
        if MANIFEST in there:
            # One of the same step is replaced. Its files have other names, but not its indices.
            storage.remove(f"{self.target}/{MANIFEST}")
        small = sorted(path for path in self.directory.iterdir() if path.name in keep)
        for path in sorted(small, key=lambda path: path.name == MANIFEST):
            storage.upload(path, f"{self.target}/{path.name}", self.ranks.beat)
        for name in storage.children(self.target).keys() - keep:
            storage.remove(f"{self.target}/{name}")

    def abandon(self) -> None:
        with suppress(storage.StorageError):
            storage.remove_all(self.meeting)
        remove(self.directory)

    def _listed(self) -> set[str] | None:
        # A store that does not answer for a while is waited for like a rank that does not.
        try:
            return set(storage.children(self.meeting)) or None
        except storage.StorageError:
            return None

    def _look_around(self) -> object:
        return self._last_change()

    def _last_change(self) -> object:
        try:
            seen = (storage.children(self.meeting), storage.children(self.target))
        except storage.StorageError:
            return None
        return [sorted((name, known.mark) for name, known in each.items()) for each in seen]

    def _take_away(self) -> None:
        """Take the records here, and end the meeting: a rank that comes now finds none."""
        if self.ranks.size > 1:
            for name in self._listed() or ():
                if name.endswith(".json"):
                    content = storage.read(f"{self.meeting}/{name}")
                    (self.directory / name).write_bytes(content)
            storage.remove_all(self.meeting)

    def _check_sizes(self, files: dict[str, FileRecord]) -> None:
        there = storage.children(self.target)
        for file, record in files.items():
            if file not in there or there[file].size != record.bytes:
                raise CheckpointError(f"{file} is not there as its rank has written it")
