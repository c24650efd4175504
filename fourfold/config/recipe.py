"""Data recipes: paths, or weights and paths (a blend); and the shares of a split.

    "0.35 A 0.65 B"   ["0.35", "A", "0.65", "B"]   a weighted mixture of A and B
    "A"   ["A", "B"]                               A, or A followed by B

A weight is the source's share of the samples served, whatever the sources' sizes; only the ratio
of the weights counts. In a string the parts are separated by blanks, so a path with blanks in it
goes into a list. Whether anything exists at a path is not looked at here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Whose way of rounding: Megatron Core's, or that of Megatron-DeepSpeed, which FleetX shares.
Rounding = Literal["megatron_core", "megatron_deepspeed"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Recipe:
    """Paths in the order given, and a weight for each unless they just follow each other."""

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None

    def __str__(self) -> str:
        if self.weights is None:
            return ", ".join(self.paths)
        return ", ".join(f"{weight:g} {path}" for weight, path in zip(self.weights, self.paths))


def parse_recipe(value: str | Sequence[str]) -> Recipe:
    """Raises ValueError for weights that mean nothing."""
    pieces = value.split() if isinstance(value, str) else [str(piece) for piece in value]
    written = pieces[::2]
    if not pieces or len(pieces) % 2 or not all(_NUMBER.fullmatch(text) for text in written):
        return Recipe((value,) if isinstance(value, str) else tuple(pieces), None)
    weights = tuple(float(text) for text in written)
    for text, weight, path in zip(written, weights, pieces[1::2]):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"the weight {text} of {path} is not above 0; leave the source out or give it a "
                "share, as in '0.35 A 0.65 B'"
            )
    if not math.isfinite(sum(weights)):
        raise ValueError("the weights are too large to add up; only their ratio counts")
    return Recipe(tuple(pieces[1::2]), weights)


def parse_split(value: str | Sequence[float]) -> list[float]:
    """'949,50,1' or [949, 50, 1] as three shares adding up to 1; missing ones are 0.

    Raises ValueError for what is no split.
    """
    texts: Sequence[str | float] = value
    if isinstance(value, str):
        texts = value.split("," if "," in value else "/")
    try:
        shares = [float(text) for text in texts]
    except (TypeError, ValueError):
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < 1e12 for share in shares):
        raise ValueError("give one to three shares of at least 0, such as '949,50,1'")
    total = sum(shares)
    if not total > 0:
        raise ValueError("at least one share must be above 0, as in '949,50,1'")
    return [share / total for share in shares] + [0.0] * (3 - len(shares))
