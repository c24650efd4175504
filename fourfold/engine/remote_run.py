"""A run whose directory is at an address: its records go there, its requests come from there.

Metrics, logs and everything else that a run writes beside its checkpoints is written to the local
face of the address, and uploaded behind each checkpoint and at the end (`RemoteRun.push`). A run
that begins where there are records already, on another machine or after a crash, takes up those of
the address, unless the ones here are the same and more.

Files named STOP and SAVE are looked for at the address every few seconds; what is found becomes a
file here, where the run looks for it anyway.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from fourfold import storage
from fourfold.checkpoint.directory import COMMITTED
from fourfold.metrics import Sinks
from fourfold.metrics.jsonl import FILE_NAME
from fourfold.metrics.sinks import SAMPLES_NAME
from fourfold.metrics.trackers import TRACKERS, WeightsAndBiases, id_file
from fourfold.signals import SAVE_FILE, STOP_FILE

LOOK_SECONDS = 10.0
# A wait for an upload that is worth a word.
TOLD_WAIT_SECONDS = 1.0
# Written once and not added to.
KEPT_FILES = (
    *("tokenizer.json", SAMPLES_NAME, WeightsAndBiases.ID_FILE),
    *(id_file(name) for name in TRACKERS),
)
# Read into memory to be uploaded: a log grows meanwhile.
MOST_BYTES = 256 << 20


class RemoteRun:
    """What one process does for the run's directory beside saving.

    Rank 0 does all of it. On the other machines of a run one process uploads what was logged there.
    """

    def __init__(self, output_dir: Path, rank: int) -> None:
        address = storage.address_of(output_dir)
        assert address is not None
        self.output_dir = output_dir
        self.address = address
        self.is_first = rank == 0
        self.pushes = rank == 0 or os.environ.get("LOCAL_RANK") == "0"
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._pushing: threading.Thread | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, output_dir: Path, rank: int) -> RemoteRun | None:
        return None if storage.address_of(output_dir) is None else cls(output_dir, rank)

    def open(self) -> None:
        """Take up the records that are there, and look for requests from now on."""
        if not self.is_first:
            return
        self._pull()
        threading.Thread(target=self._watch, name="requests", daemon=True).start()

    def _pull(self) -> None:
        there = storage.children(self.address)
        for name in (FILE_NAME, *KEPT_FILES):
            path = self.output_dir / name
            if name not in there:
                # Of an earlier run to the same address, which was removed there.
                path.unlink(missing_ok=True)
                continue
            content = storage.read(f"{self.address}/{name}")
            here = path.read_bytes() if path.is_file() else b""
            if not here.startswith(content):
                path.write_bytes(content)

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with suppress(OSError):
                self.look_for_requests()

    def look_for_requests(self) -> None:
        there = storage.children(self.address)
        for name in {STOP_FILE, SAVE_FILE} & there.keys():
            (self.output_dir / name).touch(exist_ok=True)
        if STOP_FILE in there:
            storage.remove(f"{self.address}/{STOP_FILE}")

    def tell_wait(self, sinks: Sinks, waited: float, name: str) -> None:
        """Say that the run stood still for an upload, if it did."""
        if waited > TOLD_WAIT_SECONDS:
            sinks.notice(
                f"waited {waited:.1f} s for the upload of {name}: checkpoints are made faster than "
                "they are uploaded, and only one at a time is under way; raise "
                "Engine.save_load.save_steps"
            )

    # -- records ----------------------------------------------------------------------------

    def push_behind(self) -> None:
        """Upload what has changed, in a thread; one that still does so will do."""
        if self.pushes and (self._pushing is None or not self._pushing.is_alive()):
            self._pushing = threading.Thread(target=self._push_quietly, name="push", daemon=True)
            self._pushing.start()

    def _push_quietly(self) -> None:
        with suppress(OSError):
            self.push()

    def push(self) -> None:
        """Upload what has changed since it was uploaded last; raises `StorageError`."""
        if not self.pushes:
            return
        with self._lock:
            for path in self._records():
                try:
                    known = path.stat()
                    stamp = (known.st_size, known.st_mtime_ns)
                    if self._uploaded.get(path) == stamp or known.st_size > MOST_BYTES:
                        continue
                    content = path.read_bytes()
                except FileNotFoundError:
                    continue
                name = path.relative_to(self.output_dir).as_posix()
                storage.write(f"{self.address}/{name}", content)
                self._uploaded[path] = stamp

    def _records(self) -> list[Path]:
        top = self.output_dir if self.is_first else self.output_dir / "logs"
        found = []
        for folder, folders, files in os.walk(top):
            is_top = Path(folder) == self.output_dir
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".") and not (is_top and COMMITTED.fullmatch(name))
            ]
            requests = {STOP_FILE, SAVE_FILE} if is_top else set()
            found += [
                Path(folder) / name
                for name in files
                if not name.startswith(".") and name not in requests
            ]
        return sorted(found)

    def close(self) -> str | None:
        """Upload the rest; what kept it from that, if anything did."""
        self._closed.set()
        try:
            self.push()
        except OSError as error:
            return (
                f"the run's metrics and logs of its last steps are in {self.output_dir} only: "
                f"{error}"
            )
        return None
