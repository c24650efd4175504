"""Suggestions ("did you mean"): the names and sizes nearest to those given."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The name most like `name`, or nothing when none is close."""
    by_folded = {known.lower(): known for known in names}
    if len(name) <= 3:  # any two such words are alike: tpu is not a slip of gpu, but gup is
        return [known for low, known in by_folded.items() if sorted(low) == sorted(name.lower())]
    matches = get_close_matches(name.lower()[:100], list(by_folded), n=1, cutoff=0.6)
    return [by_folded[match] for match in matches]


def did_you_mean(names: Iterable[str]) -> str:
    """What to append to a message: "; did you mean hidden_size?"."""
    choices = " or ".join(names)
    return f"; did you mean {choices}?" if choices else ""


def multiple_near(size: int, factor: int) -> str:
    """ "28 or 32": the multiples of `factor` on both sides of `size`."""
    below = size // factor * factor
    return f"{below} or {below + factor}" if below > 0 else str(factor)
