"""Loading: believe nothing before its hash is right, and fall back to the checkpoint before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.directory import candidates
from fourfold.checkpoint.manifest import (
    MANIFEST,
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    MismatchError,
    MovedError,
    TensorRecord,
    decode_json,
    read_bounded,
    read_manifest,
)
from fourfold.checkpoint.shards import dtype_name, file_problems, header_problems, read_shards
from fourfold.errors import CheckpointError

# How often a reader starts over because the writer replaced or removed what it was reading.
MAX_RESTARTS = 100

NAMES_SHOWN = 3

Found = tuple[Path, dict[str, Any]]


def load(
    directory: Path | str, tensors: dict[str, torch.Tensor], prefix: str = ""
) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint and return its state.

    Names, shapes and dtypes must be exactly the checkpoint's, among the names that begin with
    `prefix` ("model." to read the weights alone). Nothing is written into `tensors` before
    everything needed has been verified.
    """
    directory = Path(directory)
    with _held_in_place(directory):
        manifest = read_manifest(directory)
        _check_fits(directory, manifest, tensors, prefix)
        shards = sorted({manifest.tensors[name].file for name in tensors})
        problems = file_problems(directory, manifest, [STATE, *shards])
        problems = problems or header_problems(directory, manifest, shards)
        if problems:
            raise CheckpointError("; ".join(problems))
        state = _read_state(directory)
        read_shards(directory, manifest, tensors)
    return state


def resume(
    where: Path | str,
    tensors: dict[str, torch.Tensor],
    on_notice: Callable[[str], None],
    prefix: str = "",
) -> Found:
    """Load the first good one of `candidates(where)`; return which, and its state.

    Each damaged one is named to `on_notice` and passed over. A sound checkpoint of another model
    is an error at once: an older one would only hide that the wrong run is being resumed.
    """
    reasons: dict[Path, str] = {}

    def attempt() -> Found | None:
        # Listing a directory is not atomic: between one checkpoint's coming and another's going
        # a single look can miss both.
        for directory in candidates(where) or candidates(where):
            try:
                return directory, load(directory, tensors, prefix)
            except (MismatchError, MovedError):
                raise
            except CheckpointError as error:
                if directory not in reasons:
                    on_notice(f"checkpoint {directory} is unusable, trying the one before: {error}")
                reasons[directory] = str(error)
        return None

    found = _until_it_stays(attempt)
    if found:
        return found
    if reasons:
        tried = "".join(f"\n  {directory}: {reason}" for directory, reason in reasons.items())
        raise CheckpointError(f"no usable checkpoint at {where}; tried{tried}")
    raise CheckpointError(
        f"no checkpoint at {where}: give a step_N directory, or an output directory that has one"
    )


def _until_it_stays(attempt: Callable[[], Found | None]) -> Found | None:
    """Start over, with a new look at the directory, while the writer moves what is being read."""
    for _ in range(MAX_RESTARTS):
        try:
            return attempt()
        except MovedError:
            continue
    return attempt()


def read_state(directory: Path | str) -> dict[str, Any]:
    """The state of a checkpoint, verified, without looking at its tensors."""
    directory = Path(directory)
    with _held_in_place(directory):
        problems = file_problems(directory, read_manifest(directory), [STATE])
        if problems:
            raise CheckpointError("; ".join(problems))
        return _read_state(directory)


def tensor_names(directory: Path | str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of every tensor in a checkpoint, from its manifest."""
    tensors = read_manifest(Path(directory)).tensors
    return {name: (record.shape, record.torch_dtype()) for name, record in tensors.items()}


def verify(directory: Path | str) -> list[str]:
    """Everything wrong with a checkpoint, down to the last byte; empty if it is good."""
    directory = Path(directory)
    try:
        manifest = read_manifest(directory)
        problems = file_problems(directory, manifest, manifest.files)
        problems = problems or header_problems(directory, manifest, manifest.shards())
        if not problems:
            _read_state(directory)
        expected = {MANIFEST, *manifest.files}
        extra = sorted(path for path in directory.iterdir() if path.name not in expected)
    except CheckpointError as error:
        return [str(error)]
    return problems + [f"{path} is not part of the checkpoint" for path in extra]


@contextmanager
def _held_in_place(directory: Path) -> Iterator[None]:
    """Raise `MovedError` if `directory` is not the same directory before and after.

    A writer may replace or remove a checkpoint between two files of it being read; what was read
    is then a mixture, whatever the hashes of the single files say.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        raise MovedError(f"{directory} is not a checkpoint: there is no such directory") from None
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error

    def moved() -> bool:
        try:
            return not os.path.samestat(os.fstat(descriptor), os.stat(directory))
        except OSError:
            return True

    try:
        yield
    except MismatchError:
        raise
    except CheckpointError:
        if not moved():
            raise
        raise MovedError(f"{directory} was replaced or removed while it was read") from None
    else:
        if moved():
            raise MovedError(f"{directory} was replaced or removed while it was read")
    finally:
        os.close(descriptor)


def _read_state(directory: Path) -> dict[str, Any]:
    path = directory / STATE
    state = decode_json(read_bounded(path, MAX_STATE_BYTES), path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object")
    return state


def _check_fits(
    directory: Path, manifest: Manifest, tensors: dict[str, torch.Tensor], prefix: str
) -> None:
    held = {name: rec for name, rec in manifest.tensors.items() if name.startswith(prefix)}
    missing = [name for name in tensors if name not in held]
    unexpected = [name for name in held if name not in tensors]
    different = [
        f"{name} (there {record}, here {dtype_name(tensors[name].dtype)} "
        f"{list(tensors[name].shape)})"
        for name, record in held.items()
        if name in tensors and not _fits(record, tensors[name])
    ]
    complaints = [
        f"{len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}"
        + (", ..." if len(names) > NAMES_SHOWN else "")
        for names, what in (
            (missing, "not in it"),
            (unexpected, "only in it"),
            (different, "of another shape or dtype"),
        )
        if names
    ]
    if complaints:
        raise MismatchError(
            f"checkpoint {directory} is of another model; tensors "
            f"{'; '.join(complaints)}. Use the configuration it was saved with "
            f"(see its {STATE}), or another checkpoint"
        )


def _fits(record: TensorRecord, tensor: torch.Tensor) -> bool:
    return record.shape == tuple(tensor.shape) and record.torch_dtype() == tensor.dtype
