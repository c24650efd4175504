"""Objects: listing, reading, writing and removing what is at addresses, and their local copies.

A local face (see `addresses`) holds copies of some of the objects of its address, and for every
object it knows of a note in `.objects/NAME`: size, time and the mark by which the store tells two
contents apart (its ETag). So a copy is taken again when the object has changed, and what is known
of an object that is too large to be copied (a token file) is asked of the note.

Several processes of a machine share all of this: a copy appears by rename, and of those that want
the same one, the others wait for the first.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fourfold.atomic_files import replace_text
from fourfold.storage.addresses import (
    NotThereError,
    StorageError,
    address_of,
    patiently,
)

NOTES = ".objects"
# One process at a time looks at, or removes, the local faces of one directory.
FACES = "faces"
# What is at most read into memory at once.
SMALL_BYTES = 64 << 20

Beat = Callable[[], None]


@dataclass(frozen=True)
class Object:
    """What a store, or a disk, says about a file."""

    size: int
    changed_ns: int
    mark: str
    is_directory: bool = False


def _object(entry: dict[str, Any]) -> Object:
    """From an entry as fsspec's file systems give them; each has names of its own."""
    when = next(
        (entry[key] for key in ("LastModified", "updated", "mtime", "created") if entry.get(key)),
        0,
    )
    if isinstance(when, str):
        with suppress(ValueError):
            when = datetime.fromisoformat(when)
    seconds = when.timestamp() if isinstance(when, datetime) else when
    changed_ns = int(seconds * 1e9) if isinstance(seconds, int | float) else 0
    size = int(entry.get("size") or 0)
    mark = entry.get("ETag") or entry.get("etag") or f"{size}-{changed_ns}"
    return Object(size, changed_ns, str(mark).strip('"'), entry.get("type") == "directory")


# --- at addresses -----------------------------------------------------------------------------


def children(address: str) -> dict[str, Object]:
    """What is directly below an address; nothing where there is nothing."""

    def work(system: Any, path: str) -> dict[str, Object]:
        system.invalidate_cache(path)
        found = {}
        for entry in system.ls(path, detail=True):
            name = str(entry["name"]).rstrip("/")
            # A store lists an object of just this name as its own child.
            if name.lstrip("/") != path.strip("/"):
                found[name.rpartition("/")[2]] = _object(entry)
        return found

    try:
        return patiently(address, work)
    except NotThereError as error:
        if "bucket" in str(error):
            raise
        return {}


def read(address: str, begin: int | None = None, end: int | None = None) -> bytes:
    """The bytes of an object, or those from `begin` to before `end`."""
    return bytes(
        patiently(address, lambda system, path: system.cat_file(path, start=begin, end=end))
    )


def write(address: str, content: bytes) -> None:
    patiently(address, lambda system, path: system.pipe_file(path, content))


def create(address: str, content: bytes) -> bool:
    """Write what must not exist yet; False if it does. By a conditional put (If-None-Match) where
    the store has one."""

    def work(system: Any, path: str) -> bool:
        try:
            system.pipe_file(path, content, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):
            # A file system that knows no such mode.
            if system.exists(path):
                return False
            system.pipe_file(path, content)
        except OSError as error:
            # S3's refusal, which s3fs has no name for.
            if "PreconditionFailed" in repr(error) or "pre-condition" in str(error).lower():
                return False
            raise
        return True

    return patiently(address, work)


def upload(source: Path, address: str, beat: Beat | None = None) -> None:
    """A file to an address, where it appears complete; checked by its size."""
    size = source.stat().st_size

    def work(system: Any, path: str) -> None:
        from fsspec.callbacks import Callback

        def told(*_: object, **__: object) -> None:
            if beat is not None:
                beat()

        system.put_file(str(source), path, callback=Callback(hooks={"beat": told}))
        arrived = int(system.info(path)["size"])
        if arrived != size:
            raise OSError(f"{arrived} of {size} bytes arrived")

    patiently(address, work, beat)


def remove(address: str) -> None:
    """Remove an object, if it is there."""
    with suppress(NotThereError):
        patiently(address, lambda system, path: system.rm_file(path))


def remove_all(address: str, first: str | None = None) -> None:
    """Remove everything below an address; the object named `first` before the others."""
    below = children(address)
    for name in sorted(below, key=lambda name: name != first):
        if below[name].is_directory:
            remove_all(f"{address}/{name}")
        else:
            remove(f"{address}/{name}")


# --- local copies -----------------------------------------------------------------------------


def status(path: Path) -> Object | None:
    """What is known of a file: of one that is here, or of the object it is the local face of."""
    try:
        here = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None if address_of(path) is None else _note(path)
    if not path.is_file():
        return None
    return Object(here.st_size, here.st_mtime_ns, "")


def _note(path: Path) -> Object | None:
    try:
        return Object(**json.loads((path.parent / NOTES / path.name).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def note(path: Path, known: Object) -> None:
    """Remember what the store said about the object of a local face."""
    place = path.parent / NOTES / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_text(place, json.dumps(asdict(known)))


def noted(directory: Path) -> list[str]:
    """The names of all objects directly below an address, as of the last `refresh`."""
    try:
        return sorted(os.listdir(directory / NOTES))
    except OSError:
        return []


def refresh(
    directory: Path, is_copied: Callable[[str], bool], required: str | None = None
) -> dict[str, Object]:
    """Learn what is below an address now, and copy what `is_copied` names and has changed; without
    an object named `required` nothing of it stays here."""
    address = address_of(directory)
    assert address is not None, directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _alone(directory.parent / FACES):
        directory.mkdir(exist_ok=True)
        found = _refresh(directory, address, is_copied)
        if required is not None and required not in found:
            shutil.rmtree(directory, ignore_errors=True)
        return found


def _refresh(directory: Path, address: str, is_copied: Callable[[str], bool]) -> dict[str, Object]:
    found = children(address)
    files = {name: known for name, known in found.items() if not known.is_directory}
    for name in set(noted(directory)) - set(files):
        for gone in (directory / name, directory / NOTES / name):
            with suppress(OSError):
                gone.unlink()
    for name, known in files.items():
        path = directory / name
        before = _note(path)
        if before is None or (before.size, before.mark) != (known.size, known.mark):
            with suppress(OSError):
                path.unlink()
            note(path, known)
        if is_copied(name):
            fetch(path)
    return found


def fetch(path: Path) -> Path:
    """Have the object of a local face here; an ordinary path is as it is."""
    address = address_of(path)
    if address is None or path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        if path.exists():
            return path
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.fetched")
        try:
            known = patiently(address, lambda system, place: _object(system.info(place)))
            patiently(address, lambda system, place: system.get_file(place, str(aside)))
            arrived = aside.stat().st_size
            if arrived != known.size:
                raise StorageError(f"{address}: {arrived} of {known.size} bytes arrived")
            os.utime(aside, ns=(known.changed_ns, known.changed_ns))
            if _note(path) is None:
                note(path, known)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return path


def forget(directory: Path, ending: str) -> None:
    """Remove the copies whose names end so, which can be taken again."""
    if address_of(directory) is not None:
        for path in directory.glob(f"*{ending}"):
            with suppress(OSError):
                path.unlink()


def drop(directory: Path) -> None:
    """Remove a local face and what is below it; the address is left alone."""
    assert address_of(directory) is not None, directory
    if directory.parent.is_dir():
        with _alone(directory.parent / FACES):
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time for a name, where the file system has locks."""
    lock = path.parent / f".{path.name}.lock"
    with lock.open("a") as stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
