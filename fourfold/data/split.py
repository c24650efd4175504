"""Documents for training, validation and test: contiguous ranges in file order.

    document_ranges("949,50,1", 1000) -> [(0, 949), (949, 999), (999, 1000)]

Shares count documents, not tokens. A range may be empty. Data prepared for another system is cut
where that system would cut it, which takes its rule of rounding:

    megatron_core        each border is the sum of the shares before it, rounded
    megatron_deepspeed   each share is rounded on its own, and what the rounding errors add up to
                         is taken off every border but the first; FleetX does the same
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from fourfold.config.recipe import Rounding, parse_split
from fourfold.errors import DataError

PARTS = ("train", "valid", "test")


def document_ranges(
    split: str | Sequence[float], num_documents: int, rounding: Rounding = "megatron_core"
) -> list[tuple[int, int]]:
    """The document range of each part."""
    try:
        shares = parse_split(split)
    except ValueError as error:
        raise DataError(f"split={split!r}: {error}") from None
    if rounding == "megatron_core":
        borders = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
        return list(pairwise(borders))
    borders = list(accumulate((round(share * num_documents) for share in shares), initial=0))
    excess = borders[-1] - num_documents
    # Where a border would move below 0, which the originals then fail on, it stays at 0.
    return list(pairwise([0, *(max(border - excess, 0) for border in borders[1:])]))


def whole(part: str) -> list[float]:
    """The split that gives one part every document."""
    return [1.0 if name == part else 0.0 for name in PARTS]
