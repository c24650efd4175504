"""Who saves and loads together: plain values, so that nothing here knows how ranks talk.

Saving needs no talk at all: the ranks meet in a directory (`meeting`), which also works from a
thread. Loading needs one collective, `agree`, by which all ranks take the same turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _own_word(text: str | None) -> str | None:
    return text


@dataclass(frozen=True)
class Crew:
    """One rank's view of the ranks of a job. The default is a process by itself."""

    rank: int = 0
    size: int = 1
    # Unique per start of the job and the same on all its ranks.
    session: str = ""
    # A collective: the text of the first rank that gave one, unchanged, or None if none did.
    agree: Callable[[str | None], str | None] = _own_word
    # How long to wait for another rank to do its part of a save.
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.session, "many ranks need a session to meet in"

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value` (plain JSON) on every rank; a collective."""
        told = self.agree(json.dumps(value) if self.rank == 0 else None)
        assert told is not None
        return json.loads(told)

    def unclaimed(self, names: list[str], mine: set[str]) -> list[str]:
        """Those of `names`, the same list on all ranks, that no rank has; a collective.

        Each round takes off the names of one rank. Ranks that hold the same names are done in
        one, so there are about as many rounds as pipeline stages.
        """
        left = names
        while True:
            told = self.agree(
                json.dumps(claim) if (claim := [n for n in left if n in mine]) else None
            )
            if told is None:
                return left
            taken = set(json.loads(told))
            left = [name for name in left if name not in taken]


ALONE = Crew()
