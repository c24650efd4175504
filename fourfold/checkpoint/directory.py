"""The output directory: which checkpoints it holds, and how one is committed or removed.

    step_N                        a committed checkpoint; it got this name complete and synced
    step_N.old                    the one before it, for the moment in which step_N is replaced
    .step_N.tmp-WRITER-RANDOM     being written, or left by a writer that died (see `_writer`)
    .step_N.tmp-crew-HASH         the same by many ranks; HASH is of the session, so all know it
    .step_N.trash-WRITER-RANDOM   being removed
    latest                        the name of the last one committed

A name appears or disappears by one atomic rename, so a reader never meets half a checkpoint, and a
process may be killed between any two lines of this file. One job, one save at a time, writes into
an output directory; readers need not know of it, and `PinnedDirectory` is how they hold on to one
that a writer may replace or remove at any moment.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from fourfold import storage
from fourfold.atomic_files import replace_bytes, sync_directory
from fourfold.checkpoint.manifest import MANIFEST, MismatchError, MovedError, read_head
from fourfold.errors import CheckpointError

LATEST = "latest"
COMMITTED = re.compile(r"step_(0|[1-9][0-9]{0,17})(\.old)?")
LEFTOVER = re.compile(r"\.(?:step_[0-9]+|latest)\.(tmp|trash)-(crew|[0-9a-f.]+)-[0-9a-f-]+")

# A writer of another machine that has changed nothing for so long is dead.
ABANDONED_SECONDS = 3600.0


# --- reading ----------------------------------------------------------------------------------


def look(output_dir: Path) -> None:
    """Learn which checkpoints an output directory at an address has; any other is as it is."""
    address = storage.address_of(output_dir)
    if address is None:
        return
    there = {
        name
        for name, known in storage.children(address).items()
        if known.is_directory and COMMITTED.fullmatch(name)
    }
    for name in there:
        look_at(output_dir / name)
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        if COMMITTED.fullmatch(path.name) and path.name not in there:
            storage.drop(path)


def look_at(directory: Path) -> None:
    """The same for one checkpoint: its small files are copied here."""
    if storage.address_of(directory) is not None:
        # The manifest is put last and removed first.
        storage.refresh(directory, lambda name: name.endswith(".json"), required=MANIFEST)


@dataclass(frozen=True)
class Committed:
    directory: Path
    step: int
    serial: int  # a damaged manifest has the serial of the step before it
    readable: bool


def history(output_dir: Path) -> list[Committed]:
    """Every committed checkpoint of `output_dir`, the last one saved first."""
    names = []
    for path in output_dir.iterdir():
        match = COMMITTED.fullmatch(path.name)
        if match and path.is_dir():
            names.append((int(match[1]), match[2] is None, path))
    found = []
    serial = 0
    for step, _, path in sorted(names):
        own = _serial(path)
        serial = serial if own is None else own
        found.append(Committed(path, step, serial, readable=own is not None))
    return sorted(found, key=lambda entry: entry.serial)[::-1]


def _serial(directory: Path) -> int | None:
    """The serial in its manifest; None if that is damaged or gone."""
    try:
        return read_head(directory).serial
    except CheckpointError:
        return None


def step_of(directory: Path) -> int:
    """Of a committed checkpoint, by its name."""
    found = COMMITTED.fullmatch(directory.name)
    assert found is not None
    return int(found[1])


def named(ckpt_dir: str, output_dir: Path) -> Path:
    """The path that `Engine.save_load.ckpt_dir` means; a bare `latest` is the run's own."""
    return output_dir if ckpt_dir == LATEST else storage.local_path(ckpt_dir)


def candidates(where: Path | str) -> list[Path]:
    """The checkpoints to try for `where`, best first; empty if there is none.

    `where` is an output directory (or its `latest`): the last one saved, then those before it; or
    a step directory: that one, then its siblings of earlier steps. `latest` only says where to
    look: a crash can leave it one commit behind the directory itself.
    """
    where = storage.local_path(where).resolve()
    inside = where.name == LATEST or COMMITTED.fullmatch(where.name)
    look(where.parent if inside else where)
    if where.name == LATEST and not where.is_dir():
        where = where.parent
    if _is_output_dir(where):
        entries = history(where)
        newest = entries[0].step if entries else 0
        # Steps beyond the last one saved are of a run that was abandoned: the last resort.
        return [e.directory for e in sorted(entries, key=lambda entry: entry.step > newest)]
    name = COMMITTED.fullmatch(where.name)
    if name is None or not where.parent.is_dir():
        return [where] if where.is_dir() else []
    siblings = history(where.parent)
    own = [e.directory for e in siblings if e.step == int(name[1])]
    own.sort(key=lambda path: path.name != where.name)
    earlier = [e.directory for e in siblings if e.step < int(name[1])]
    return own + earlier if own else []


def named_by_user(where: Path) -> list[Path]:
    """All checkpoints of an output directory, the last one saved first, or the one that is named.

    Raises `CheckpointError` if there is none.
    """
    found = candidates(where)
    if not found:
        raise CheckpointError(
            f"no checkpoint at {storage.name_of(where)}: give a step_N directory, or the output "
            "directory of a run"
        )
    return found if where.name != LATEST and _is_output_dir(where) else found[:1]


def _is_output_dir(path: Path) -> bool:
    if not path.is_dir() or (path / MANIFEST).exists():
        return False
    return not COMMITTED.fullmatch(path.name) or any(
        COMMITTED.fullmatch(inner.name) for inner in path.iterdir()
    )


# --- writing ----------------------------------------------------------------------------------


def private_name(output_dir: Path, name: str, purpose: str) -> Path:
    return output_dir / f".{name}.{purpose}-{_writer()}-{secrets.token_hex(4)}"


def _writer() -> str:
    """This process and no other: HOST.PID.START. Process ids repeat, above all in containers."""
    return f"{_host()}.{os.getpid():x}.{_start_of(os.getpid())}"


@cache
def _host() -> str:
    """This machine since its last start, or this container."""
    name = os.uname().nodename
    with suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(OSError):
        name += str(os.stat("/proc/self/ns/pid").st_ino)
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _start_of(pid: int) -> str:
    """When a process was started, in kernel ticks; "0" where that is unknown."""
    try:
        # The name in parentheses may hold anything; what follows it are numbers.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{int(fields[19]):x}"
    except (OSError, IndexError, ValueError):
        return "0"


def meeting_name(output_dir: Path, step: int, session: str) -> Path:
    """The directory in which the ranks of a session assemble a step."""
    digest = hashlib.sha256(session.encode()).hexdigest()[:16]
    return output_dir / f".step_{step}.tmp-crew-{digest}"


def commit(temporary: Path, target: Path) -> None:
    """Rename a complete, synced directory into place; the old one becomes `.old`, for `tidy`."""
    previous = target.with_name(f"{target.name}.old")
    replaces = target.exists()
    if replaces:
        target.rename(previous)
    try:
        temporary.rename(target)
    except OSError:
        if replaces:
            previous.rename(target)
        raise
    sync_directory(target.parent)


def discard(directory: Path) -> None:
    """Remove a checkpoint: first its name, or at an address its manifest; then its files."""
    address = storage.address_of(directory)
    if address is not None:
        storage.remove_all(address, first=MANIFEST)
        storage.drop(directory)
        return
    trash = private_name(directory.parent, directory.name.removesuffix(".old"), "trash")
    directory.rename(trash)
    sync_directory(directory.parent)
    remove(trash)


def point_latest(target: Path) -> None:
    address = storage.address_of(target.parent)
    if address is not None:
        storage.write(f"{address}/{LATEST}", f"{target.name}\n".encode())
        return
    aside = private_name(target.parent, LATEST, "tmp")
    replace_bytes(target.parent / LATEST, f"{target.name}\n".encode(), aside)
    sync_directory(target.parent)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of an output directory stay."""

    last: int = 3  # how many of the newest; 0: all
    every_steps: int = 0  # those of a multiple of it; 0: none for that
    every_hours: float = 0.0  # the first, and each so long after the last one kept; 0: none

    def __post_init__(self) -> None:
        assert self.last >= 0 and self.every_steps >= 0 and self.every_hours >= 0

    def removed(self, entries: list[Committed]) -> list[Committed]:
        """Of all checkpoints, the last one saved first, those to remove."""
        if not self.last:
            return []
        kept_for_good = self._by_step(entries) | self._by_time(entries)
        kept, removed = 0, []
        for entry in entries:
            if kept >= self.last and entry.directory not in kept_for_good:
                removed.append(entry)
            # One that cannot be read does not count, or it would push out one that can.
            kept += entry.readable
        return removed

    def _by_step(self, entries: list[Committed]) -> set[Path]:
        every = self.every_steps
        return {e.directory for e in entries if every and e.readable and e.step % every == 0}

    def _by_time(self, entries: list[Committed]) -> set[Path]:
        """From the oldest on, so that one that was kept stays kept whatever follows."""
        if not self.every_hours:
            return set()
        kept, last = set(), -math.inf
        for entry in reversed(entries):
            saved = saved_at(entry.directory) if entry.readable else None
            if saved is not None and saved - last >= 3600 * self.every_hours:
                kept.add(entry.directory)
                last = saved
        return kept


def saved_at(directory: Path) -> float | None:
    """When a checkpoint was saved: the time of its manifest."""
    try:
        return (directory / MANIFEST).stat().st_mtime
    except OSError:
        return None


def retire(output_dir: Path, keep: Retention) -> None:
    """Remove the checkpoints that are not to be kept."""
    look(output_dir)
    for entry in keep.removed(history(output_dir)):
        discard(entry.directory)


def tidy(output_dir: Path) -> None:
    """Finish what is half-written, half-removed or half-replaced, by us or a killed writer.

    Of a job of many ranks only rank 0 tidies, before it opens the meeting of its next save. One
    job at a time writes here, so every meeting found then is of a dead session, or a failed save.
    """
    address = storage.address_of(output_dir)
    if address is not None:
        _tidy_address(address)
    for path in list(output_dir.iterdir()):
        leftover = LEFTOVER.fullmatch(path.name)
        if leftover and (leftover[1] == "trash" or not _is_being_written(path, leftover[2])):
            remove(path)
        elif address is None and COMMITTED.fullmatch(path.name) and path.suffix == ".old":
            if path.with_suffix("").exists():
                discard(path)
            else:
                path.rename(path.with_suffix(""))
                sync_directory(output_dir)


def _tidy_address(address: str) -> None:
    """Meetings that are over, and uploads that got no manifest."""
    for name, known in storage.children(address).items():
        inside = f"{address}/{name}"
        if known.is_directory and (
            LEFTOVER.fullmatch(name)
            or (COMMITTED.fullmatch(name) and MANIFEST not in storage.children(inside))
        ):
            storage.remove_all(inside)


def remove(path: Path) -> None:
    """Remove it as far as the file system allows; `tidy` tries again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_being_written(path: Path, writer: str) -> bool:
    """Whether its writer may still be running. One of our own is left from a failed save."""
    if writer in ("crew", _writer()):
        return False
    found = re.fullmatch(r"([0-9a-f]+)\.([0-9a-f]{1,8})\.([0-9a-f]+)", writer)
    if found is None or found[1] != _host():
        return _changed_lately(path)
    return _start_of(int(found[2], 16)) == found[3] and found[3] != "0"


def _changed_lately(path: Path) -> bool:
    """Whether anything in it changed within the last hour, by the file system's own clock."""
    probe = private_name(path.parent, LATEST, "tmp")
    try:
        probe.touch()
        now = probe.stat().st_mtime
    except OSError:
        now = time.time()
    finally:
        remove(probe)
    try:
        inside = path.iterdir() if path.is_dir() else ()
        newest = max(entry.stat().st_mtime for entry in (path, *inside))
    except OSError:
        return True  # it is moving
    return now - newest < ABANDONED_SECONDS


# -- readers --------------------------------------------------------------------------------------


Result = TypeVar("Result")


class PinnedDirectory:
    """A directory that must stay the same one from the first byte read to the last.

    A writer may replace or remove a checkpoint between two files of it being read; what was read
    is then a mixture, whatever the hashes of the single files say.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        look_at(directory)
        self._mark = self._manifest_mark()
        try:
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            raise MovedError(
                f"{storage.name_of(directory)} is not a checkpoint: there is no such directory"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error

    def __enter__(self) -> PinnedDirectory:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._descriptor)

    def steady(self, work: Callable[[], Result]) -> Result:
        """`work()`, or `MovedError` if the directory has moved by its end."""
        try:
            result = work()
        except MismatchError:
            raise
        except CheckpointError:
            if not self._moved():
                raise
        else:
            if not self._moved():
                return result
        raise MovedError(
            f"{storage.name_of(self.directory)} was replaced or removed while it was read"
        )

    def _manifest_mark(self) -> str | None:
        """Of a checkpoint at an address: what tells its manifest from any other."""
        address = storage.address_of(self.directory)
        known = None if address is None else storage.children(address).get(MANIFEST)
        return None if known is None else known.mark

    def _moved(self) -> bool:
        if self._mark != self._manifest_mark():
            return True
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self.directory))
        except OSError:
            return True
