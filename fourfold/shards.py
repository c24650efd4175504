"""Shards: the rectangle of a tensor that one rank holds, and how rectangles overlap.

Model parallelism cuts one dimension of a parameter, sharding cuts rows of what is left: the result
is always one rectangle of the whole (torch.distributed.checkpoint calls it a chunk). Initial
weights, the gradient norm, checkpoints, the check for drifting replicas and generation over ranks
need no more than that, whichever layout made the cut or requests the parts.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

# A rectangle has 2^n corners in n dimensions; a model's tensors are cut along one or two.
MAX_CUT_DIMENSIONS = 6


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as a plain tensor that shares its memory."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is torch's DTensor, checked without importing it, which takes a while."""
    return hasattr(tensor, "_local_tensor")


@dataclass(frozen=True)
class Shard:
    """A rectangle of a tensor, as this rank holds it. It may be empty, and it may be all."""

    tensor: Tensor  # a parameter, a DTensor or plain values
    shape: tuple[int, ...]  # of the whole
    offsets: tuple[int, ...]  # where it begins in the whole
    name: str = ""  # of the whole; a tied copy has the name of what it copies
    replica: int = 0  # which of the ranks that hold just this rectangle
    replicas: int = 1

    @classmethod
    def whole(cls, tensor: Tensor) -> Shard:
        """The one that is all of its tensor."""
        assert not is_sharded(tensor), "this rank does not have all of it"
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def local(self) -> Tensor:
        """The values here, in their own memory."""
        return local(self.tensor.data)

    @property
    def gradient(self) -> Tensor | None:
        return None if self.tensor.grad is None else local(self.tensor.grad)

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.local.shape))

    @property
    def owns_norm(self) -> bool:
        """Whether this rank adds it to the gradient norm: of all replicas, one does."""
        return self.replica == 0

    @property
    def owns_save(self) -> bool:
        """Whether this rank saves it. Replicas take turns, so that all have something to do."""
        return self.replica == zlib.crc32(self.name.encode()) % self.replicas

    def of(self, tensor: Tensor) -> Shard:
        """The same rectangle of another tensor, such as an optimizer's state of a parameter."""
        return replace(self, tensor=tensor)

    def copy_from(self, whole: Tensor) -> None:
        """Take over this rectangle's values."""
        self.local.copy_(whole[self.box.within(Box((0,) * whole.dim(), tuple(whole.shape)))])


# A plain tensor is the shard that is the whole.
Tensors = Mapping[str, Tensor | Shard]


def as_shards(tensors: Tensors) -> dict[str, Shard]:
    return {
        name: given if isinstance(given, Shard) else Shard.whole(given)
        for name, given in tensors.items()
    }


class Box(NamedTuple):
    """A rectangle of indices."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def volume(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """What both cover; None if that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        shape = tuple(
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(*self, *other, starts, strict=True)
        )
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index that selects this box from a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )

    def fits_in(self, shape: Sequence[int]) -> bool:
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            start >= 0 and start + size <= limit
            for start, size, limit in zip(self.offsets, self.shape, shape, strict=True)
        )


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None if they do.

    A function on a grid that is zero far away is known by its mixed differences, and those of a
    box are its corners with alternating signs. So boxes tile the whole if and only if their
    corners cancel to the corners of the whole, which takes one look at each box.
    """
    entire = Box((0,) * len(shape), shape)
    if list(boxes) == [entire]:
        return None
    if not all(box.fits_in(shape) for box in boxes):
        return "a piece reaches beyond it"
    if entire.volume() == 0:
        return None
    cut = [axis for axis, size in enumerate(shape) if any(box.shape[axis] != size for box in boxes)]
    if len(cut) > MAX_CUT_DIMENSIONS:
        return f"it is cut along {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}"
    corners = _corners([entire], cut)
    corners.subtract(_corners(boxes, cut))
    if not any(corners.values()):
        return None
    missing = entire.volume() - sum(box.volume() for box in boxes)
    if missing > 0:
        return f"{missing} of its {entire.volume()} elements are in no piece"
    return "its pieces overlap"


def _corners(boxes: Sequence[Box], axes: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Signed corners, seen along `axes` only: along the others every box is the whole."""
    signs = [math.prod(signs) for signs in itertools.product((1, -1), repeat=len(axes))]
    counts: Counter[tuple[int, ...]] = Counter()
    for offsets, shape in boxes:
        ends = ((offsets[axis], offsets[axis] + shape[axis]) for axis in axes)
        for corner, sign in zip(itertools.product(*ends), signs, strict=True):
            counts[corner] += sign
    return counts
