"""Documents for training, validation and test: contiguous ranges in file order.

    document_ranges("949,50,1", 1000) -> [(0, 949), (949, 999), (999, 1000)]

The rule, rounding included, is the one Megatron and FleetX share, so that data prepared for them
is cut at the same places. Shares count documents, not tokens. A range may be empty.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import pairwise

from fourfold.errors import DataError

log = logging.getLogger(__name__)

PARTS = ("train", "valid", "test")


def parse_split(split: str | Sequence[float]) -> list[float]:
    """Three shares adding up to 1; missing ones are 0, any after the third are left out."""
    texts: Sequence[str | float] = split
    if isinstance(split, str):
        texts = split.split("," if "," in split else "/")
    try:
        shares = [float(text) for text in texts]
    except (TypeError, ValueError):
        raise DataError(f"split={split!r} is not up to three numbers like '949,50,1'") from None
    if len(shares) > len(PARTS):
        log.warning("split=%r: only the first three shares count (%s)", split, ", ".join(PARTS))
        shares = shares[: len(PARTS)]
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares) > 0:
        raise DataError(f"split={split!r} needs shares of at least 0, one of them above 0")
    shares += [0.0] * (len(PARTS) - len(shares))
    return [share / sum(shares) for share in shares]


def document_ranges(split: str | Sequence[float], num_documents: int) -> list[tuple[int, int]]:
    """The document range of each part.

    Each share is rounded on its own, and what the rounding errors add up to is taken off every
    border but the first. Where that would move a border below 0 it stays at 0.
    """
    borders = [0]
    for share in parse_split(split):
        borders.append(borders[-1] + round(share * num_documents))
    excess = borders[-1] - num_documents
    borders = [0] + [max(border - excess, 0) for border in borders[1:]]
    return list(pairwise(borders))


def whole(part: str) -> list[float]:
    """The split that gives one part every document."""
    return [1.0 if name == part else 0.0 for name in PARTS]
