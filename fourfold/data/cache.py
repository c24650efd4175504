"""The index cache: results kept on disk under a hash of everything they depend on.

An entry is a directory of `.npy` files with their checksums, or one JSON file, written under a
temporary name, synced and renamed. So an entry that exists is complete, any number of processes may
build the same one at once, and a change of any input is another entry. An entry that does not hold
what was written (a damaged disk, an editor) is replaced. Without a writable directory nothing is
kept.

All ranks of a run open the same data. Rank 0 opens and checks it first; the others follow in
`trusting()`, where what has just been checked is not read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.atomic_files import replace_text, sync_directory, sync_file
from fourfold.data.npy import checksum, map_npy
from fourfold.errors import DataError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
DIRECTORY = ".fourfold_cache"
ABANDONED_SECONDS = 24 * 3600
CHECKSUMS = "checksums.json"

Arrays = dict[str, np.ndarray]
Expected = dict[str, tuple[tuple[int, ...], np.dtype]]
ANY_LENGTH = (-1,)

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusting(trusted: bool = True) -> Iterator[None]:
    """Within this context, what another process of the same start has checked is trusted."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    return _trusted.get()


def key_of(inputs: dict[str, Any]) -> str:
    """The name of the entry for these inputs."""
    text = json.dumps({"version": FORMAT_VERSION, **inputs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def places(data_dir: Path, cache_dir: str | Path | None) -> list[Path]:
    """Where to look and, in the same order, where to try to write."""
    if cache_dir is not None:
        return [Path(cache_dir)]
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [data_dir / DIRECTORY, user / "fourfold" / "data"]


def location(places: Sequence[Path], key: str) -> Path | None:
    """Where an entry is kept, if it is anywhere."""
    return next((place / key for place in places if (place / key).is_dir()), None)


def cached_arrays(
    places: Sequence[Path], key: str, expected: Expected, build: Callable[[], Arrays]
) -> Arrays:
    """The arrays of an entry, memory-mapped; built and stored first if there is none."""
    for place in places:
        arrays = _load(place / key, expected)
        if arrays is not None:
            return arrays
    built = build()
    for place in places:
        try:
            return _store(place, key, expected, built) or built
        except OSError as error:
            log.warning("%s: index not kept here (%s)", place, error.strerror or error)
    return built


def _load(entry: Path, expected: Expected) -> Arrays | None:
    """The arrays of an entry that exists and is intact; a damaged one is logged."""
    if not entry.is_dir():
        return None
    try:
        return _read(entry, expected)
    except DataError as error:
        log.warning("index cache is damaged, building it again: %s", error)
        return None


def _read(entry: Path, expected: Expected) -> Arrays:
    checksums = {} if is_trusted() else _read_json(entry / CHECKSUMS)
    if checksums is None:
        raise DataError(f"{entry / CHECKSUMS}: missing or damaged")
    arrays = {}
    for name, (shape, dtype) in expected.items():
        file = entry / f"{name}.npy"
        array = map_npy(file)
        fits = shape == ANY_LENGTH or array.size == np.prod(shape, dtype=np.int64)
        if not fits or array.dtype != dtype:
            raise DataError(f"{file}: {array.size} values of {array.dtype} are not {shape} {dtype}")
        if not is_trusted() and checksums.get(name) != _checksum(array):
            raise DataError(f"{file}: the values are not those that were written")
        arrays[name] = array.reshape(shape)
    return arrays


def _is_whole(entry: Path, expected: Expected) -> bool:
    try:
        _read(entry, expected)
    except DataError:
        return False
    return True


def _checksum(array: np.ndarray) -> int:
    """A checksum of the values, not of the file: the same whoever wrote it."""
    return checksum(np.ascontiguousarray(array.reshape(-1)).view(np.uint8))


def _store(place: Path, key: str, expected: Expected, built: Arrays) -> Arrays | None:
    """Write and commit an entry; returns it mapped, or None if another process replaced it."""
    place.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place)
    temporary = place / f".{key}.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir()
        for name, array in built.items():
            np.save(temporary / f"{name}.npy", array.reshape(-1), allow_pickle=False)
            sync_file(temporary / f"{name}.npy")
        checksums = {name: _checksum(array) for name, array in built.items()}
        (temporary / CHECKSUMS).write_text(json.dumps(checksums))
        sync_file(temporary / CHECKSUMS)
        sync_directory(temporary)
        _commit(temporary, place / key, expected)
        sync_directory(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _load(place / key, expected)


def _commit(temporary: Path, entry: Path, expected: Expected) -> None:
    """Rename into place unless an intact entry is already there; a damaged one is moved away."""
    if _renamed(temporary, entry) or _is_whole(entry, expected):
        return
    moved = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}.tmp")
    with suppress(FileNotFoundError):  # another process is moving it away too
        entry.rename(moved)
    if _is_whole(moved, expected):
        # Another process was faster. This is its whole entry, which others may have mapped, so it
        # goes back, unless there is one more by now.
        _renamed(moved, entry)
    else:
        _renamed(temporary, entry)
    shutil.rmtree(moved, ignore_errors=True)


def _renamed(directory: Path, entry: Path) -> bool:
    """Give a directory the name of an entry; False if there is one already."""
    try:
        directory.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise
        return False
    return True


def read_record(places: Sequence[Path], key: str) -> dict[str, Any] | None:
    """A small JSON object stored under `key`, or None."""
    records = (_read_json(place / f"{key}.json") for place in places)
    return next((record for record in records if record is not None), None)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_record(places: Sequence[Path], key: str, record: dict[str, Any]) -> None:
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            replace_text(place / f"{key}.json", json.dumps(record))
            return
        except OSError as error:
            log.warning("%s: result not kept here (%s)", place, error.strerror or error)


def _remove_abandoned(place: Path) -> None:
    """Remove what killed builders left behind."""
    for path in place.glob(".*.tmp"):
        try:
            abandoned = time.time() - path.stat().st_mtime > ABANDONED_SECONDS
        except OSError:
            continue
        if abandoned and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif abandoned:
            path.unlink(missing_ok=True)
