"""Names a user may have meant."""

from __future__ import annotations

from difflib import get_close_matches


def nearest(name: str, names: list[str]) -> str:
    """ "; did you mean hidden_size?", or nothing when no name is close."""
    by_folded = {known.lower(): known for known in names}
    matches = get_close_matches(name.lower()[:100], list(by_folded), n=1, cutoff=0.6)
    return f"; did you mean {by_folded[matches[0]]}?" if matches else ""
