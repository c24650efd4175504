"""Rectangles of tensors: what one rank holds of a whole, and how rectangles meet.

A checkpoint knows tensors by name and their parts by where they begin in the whole; which layout
cut them, and which layout asks for them, it never learns.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# A rectangle has 2^n corners in n dimensions; a model's tensors are cut along one or two.
MAX_CUT_DIMENSIONS = 6


@dataclass(frozen=True)
class Piece:
    """A rectangle of a named tensor, as one rank holds it. It may be empty."""

    tensor: Tensor  # the local values
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where it begins in the whole

    def box(self) -> Box:
        return Box(self.offsets, tuple(self.tensor.shape))


# A plain tensor is the piece that is the whole.
Tensors = Mapping[str, Tensor | Piece]


def as_pieces(tensors: Tensors) -> dict[str, Piece]:
    return {
        name: given if isinstance(given, Piece) else whole(given) for name, given in tensors.items()
    }


def whole(tensor: Tensor) -> Piece:
    return Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())


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
