"""Results kept on disk under a hash of everything they depend on.

An entry is a directory of `.npy` files or one JSON file, written under a temporary name, synced
and renamed. So an entry that exists is whole, any number of processes may build the same one at
once, and a change of any input is another entry. An entry that does not hold what is expected of
it (a damaged disk, an editor) is replaced. Without a writable place nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.data.npy import map_npy
from fourfold.errors import DataError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
DIRECTORY = ".fourfold_cache"
ABANDONED_SECONDS = 24 * 3600

Arrays = dict[str, np.ndarray]
Expected = dict[str, tuple[tuple[int, ...], np.dtype]]


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
    if not entry.is_dir():
        return None
    arrays = {}
    for name, (shape, dtype) in expected.items():
        try:
            array = map_npy(entry / f"{name}.npy")
        except DataError as error:
            log.warning("damaged index cache, building again: %s", error)
            return None
        if array.size != np.prod(shape, dtype=np.int64) or array.dtype != dtype:
            log.warning("%s: damaged index cache, building again", entry / f"{name}.npy")
            return None
        arrays[name] = array.reshape(shape)
    return arrays


def _store(place: Path, key: str, expected: Expected, built: Arrays) -> Arrays | None:
    """Write and commit an entry; returns it mapped, or None if another process replaced it."""
    place.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place)
    temporary = place / f".{key}.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir()
        for name, array in built.items():
            with open(temporary / f"{name}.npy", "wb") as file:
                np.save(file, array.reshape(-1), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        _sync_directory(temporary)
        _commit(temporary, place / key, expected)
        _sync_directory(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _load(place / key, expected)


def _commit(temporary: Path, entry: Path, expected: Expected) -> None:
    """Rename into place unless a whole entry is already there; a damaged one is moved away."""
    try:
        temporary.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise
        if _load(entry, expected) is None:
            damaged = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}.tmp")
            entry.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
            temporary.rename(entry)


def read_record(places: Sequence[Path], key: str) -> dict[str, Any] | None:
    """A small JSON object stored under `key`, or None."""
    for place in places:
        try:
            record = json.loads((place / f"{key}.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return record
    return None


def write_record(places: Sequence[Path], key: str, record: dict[str, Any]) -> None:
    for place in places:
        temporary = place / f".{key}.{uuid.uuid4().hex}.tmp"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with open(temporary, "w") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(place / f"{key}.json")
            return
        except OSError as error:
            log.warning("%s: result not kept here (%s)", place, error.strerror or error)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(place: Path) -> None:
    """Drop what builders that were killed left behind."""
    for path in place.glob(".*.tmp"):
        try:
            abandoned = time.time() - path.stat().st_mtime > ABANDONED_SECONDS
        except OSError:
            continue
        if abandoned and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif abandoned:
            path.unlink(missing_ok=True)
