"""`Stored`: a tensor in somebody's file, with its shape known and its numbers not yet read.

The functions here turn, join and reorder stored tensors into other stored tensors. Nothing is
read until `read()`, which reads one tensor; so a model is checked before its first number is
touched, and converted in the memory of its largest tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.errors import CheckpointError


@dataclass(frozen=True)
class Stored:
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def transposed(source: Stored) -> Stored:
    """(in, out) to (out, in), or back."""
    return Stored(source.shape[::-1], source.dtype, lambda: source.read().mT.contiguous())


def reshaped(source: Stored, shape: tuple[int, ...]) -> Stored:
    if math.prod(shape) != math.prod(source.shape):
        raise CheckpointError(f"{list(source.shape)} cannot be seen as {list(shape)}")
    return Stored(shape, source.dtype, lambda: source.read().reshape(shape))


def joined(parts: Sequence[Stored], dim: int) -> Stored:
    """The parts one after the other along `dim`; what one alone is stays as it is."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        around = [(*s.shape[:dim], *s.shape[dim + 1 :]) for s in (first, part)]
        if dim >= len(part.shape) or around[0] != around[1] or part.dtype != first.dtype:
            raise CheckpointError(f"pieces of one tensor do not fit: {first} and {part}")
    length = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return Stored(shape, first.dtype, lambda: torch.cat([part.read() for part in parts], dim))


def first_rows(source: Stored, count: int) -> Stored:
    shape = (count, *source.shape[1:])
    return Stored(shape, source.dtype, lambda: source.read()[:count].contiguous())


def cast(source: Stored, dtype: torch.dtype, name: str) -> Stored:
    def read() -> Tensor:
        before = source.read()
        after = before.to(dtype)
        if not after.isfinite().all() and before.isfinite().all():
            raise CheckpointError(
                f"{name} holds {before.abs().max():.3g}, which is beyond the range of "
                f"{str(dtype).removeprefix('torch.')}; choose bfloat16 or float32"
            )
        return after

    return Stored(source.shape, dtype, read)


def regrouped(source: Stored, parts: tuple[int, int, int], order: tuple[int, int, int]) -> Stored:
    """The rows, seen as a block of `parts`, with the axes of that block put in `order`."""
    if not source.shape or math.prod(parts) != source.shape[0]:
        raise CheckpointError(
            f"{source} has no rows for {' x '.join(map(str, parts))} parts of attention heads"
        )

    def read() -> Tensor:
        rest = source.shape[1:]
        axes = (*order, *range(3, 3 + len(rest)))
        return source.read().reshape(*parts, *rest).permute(axes).reshape(source.shape)

    return Stored(source.shape, source.dtype, read)


def _head_size(source: Stored, heads: int) -> int:
    return source.shape[0] // (3 * heads) if source.shape else 0


def heads_from_blocks(source: Stored, heads: int) -> Stored:
    """Rows [all q | all k | all v] to ours, [q_j, k_j, v_j] for each head j."""
    return regrouped(source, (3, heads, _head_size(source, heads)), (1, 0, 2))


def blocks_from_heads(source: Stored, heads: int) -> Stored:
    """Ours to [all q | all k | all v]."""
    return regrouped(source, (heads, 3, _head_size(source, heads)), (1, 0, 2))


def heads_from_triples(source: Stored, heads: int) -> Stored:
    """Rows of single (q, k, v) triples within each head to ours."""
    return regrouped(source, (heads, _head_size(source, heads), 3), (0, 2, 1))


def queries_scaled(source: Stored, heads: int, factor: float) -> Stored:
    """Ours, with every query times `factor`."""

    def read() -> Tensor:
        rows = source.read().clone()
        rows.view(heads, 3, -1)[:, 0] *= factor
        return rows

    return Stored(source.shape, source.dtype, read)
