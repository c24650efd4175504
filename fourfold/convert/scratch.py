"""Disk space for a conversion: tensors in mapped files instead of memory, free space, syncing."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from fourfold.atomic_files import sync_directory
from fourfold.errors import CheckpointError

# Descriptions, tokenizer, headers: what is written beside the weights.
OVERHEAD_BYTES = 8 << 20


def disk_tensor(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor mapped from a file of its own, which has no name any more.

    Its blocks are allocated first: on a full disk that is an error here, where writing to a mapped
    hole would be a bus error that ends the process.
    """
    count = math.prod(shape)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".scratch-") as file:
        if count:
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        flat = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
        return flat.view(shape)


def check_room(directory: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    needed = needed_bytes + OVERHEAD_BYTES
    if needed > free:
        raise CheckpointError(
            f"{directory.parent} has {free / 1e9:.3f} GB free, and the conversion needs up to "
            f"{needed / 1e9:.3f} GB while it runs; make room or name another directory"
        )


def sync_tree(directory: Path) -> None:
    """Flush all files and directories to disk, so that a rename afterwards commits all of it."""
    for place, _, files in os.walk(directory):
        for name in files:
            with (Path(place) / name).open("rb") as stream:
                os.fsync(stream.fileno())
        sync_directory(Path(place))
