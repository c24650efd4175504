"""Saving: write aside, sync, commit by rename, point `latest` at it, drop the oldest."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fourfold.checkpoint.directory import (
    commit,
    history,
    point_latest,
    private_name,
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
from fourfold.checkpoint.shards import check_writable, synced_record, write_shards
from fourfold.errors import CheckpointError

log = logging.getLogger(__name__)

# Headers, manifest and directory blocks, generously.
OVERHEAD_BYTES = 1 << 20
OVERHEAD_BYTES_PER_TENSOR = 1 << 10


def save(
    output_dir: Path | str,
    step: int,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
    keep_last: int = 3,
) -> Path:
    """Commit `output_dir/step_N` and return it; of all, the `keep_last` newest stay (0: all).

    A save that fails raises `CheckpointError` and leaves the directory as it was. Tied tensors
    are given once. The tensors must not change until this returns.
    """
    assert step >= 0 and keep_last >= 0
    check_writable(tensors)
    state_bytes = encode_json(state, MAX_STATE_BYTES, STATE)
    needed = bytes_needed(tensors) + len(state_bytes)

    output_dir = Path(output_dir)
    target = output_dir / f"step_{step}"
    temporary = private_name(output_dir, target.name, "tmp")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tidy(output_dir)
        if needed > shutil.disk_usage(output_dir).free:
            raise CheckpointError(_failure(target, needed, "the disk is too full"))
        temporary.mkdir()
        _write(temporary, output_dir, step, tensors, state_bytes)
        commit(temporary, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_failure(target, needed, str(error))) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

    try:
        point_latest(target)
        tidy(output_dir)
        retire(output_dir, keep_last)
    except OSError as error:
        # The checkpoint is safe; only what comes after it failed.
        log.warning("%s is saved, but tidying up after it failed: %s", target, error)
    return target


def bytes_needed(tensors: dict[str, torch.Tensor]) -> int:
    """Disk space one checkpoint of these tensors takes, state.json aside, rounded up."""
    content = sum(tensor.nbytes for tensor in tensors.values())
    return content + OVERHEAD_BYTES + OVERHEAD_BYTES_PER_TENSOR * len(tensors)


def _write(
    temporary: Path,
    output_dir: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    state_bytes: bytes,
) -> None:
    files, records = write_shards(temporary, tensors)
    (temporary / STATE).write_bytes(state_bytes)
    files[STATE] = synced_record(temporary / STATE)
    serial = 1 + max((entry.serial for entry in history(output_dir)), default=0)
    manifest = Manifest(step=step, serial=serial, files=files, tensors=records).sealed()
    with (temporary / MANIFEST).open("wb") as stream:
        stream.write(manifest.to_bytes())
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(temporary)


def _failure(target: Path, needed: int, reason: str) -> str:
    existing = next(path for path in (target, *target.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"cannot save checkpoint {target}: {reason}. It needs {needed / 1e9:.3f} GB "
        f"({needed} bytes) and {existing} has {free / 1e9:.3f} GB free; make room or choose "
        "another output directory. Earlier checkpoints are untouched"
    )
