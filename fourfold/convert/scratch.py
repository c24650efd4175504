"""Tensors on the disk in the place of memory, for formats that are written or read all at once."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def disk_tensor(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor mapped from a file of its own, which has no name any more."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".scratch-") as file:
        flat = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype)
        return flat.view(shape)
