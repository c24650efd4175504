"""Who saves and loads together: plain values, so that nothing here knows how ranks talk.

A save begins with a word from every rank, so that what keeps rank 0 from beginning is known to all
at once. From then on it needs no talk: the ranks meet in a directory (`meeting`), which also works
from a thread. Loading is done in turns that all ranks take together.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fourfold import heartbeat
from fourfold.mesh import Mesh


def _own_word(text: str | None) -> str | None:
    return text


def _own_words(text: str) -> list[str]:
    return [text]


def silent() -> None:
    """A beat that nobody listens to."""


@dataclass(frozen=True)
class Crew:
    """One rank's view of the ranks of a job. The default is a process by itself."""

    rank: int = 0
    size: int = 1
    # Unique per start of the job and the same on all its ranks.
    session: str = ""
    # A collective: the text of the first rank that gave one, unchanged, or None if none did.
    agree: Callable[[str | None], str | None] = _own_word
    # How long to wait for another rank, of which nothing is to be seen, to do its part of a save.
    timeout_seconds: float = 600.0
    # A collective: what every rank said, by rank.
    gather: Callable[[str], list[str]] = _own_words
    # Called every few megabytes by a rank that is at work, and not by one that waits.
    beat: Callable[[], None] = silent

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.session, "many ranks need a session to meet in"

    @classmethod
    def of(cls, mesh: Mesh, timeout_seconds: float) -> Crew:
        """The ranks of a mesh; a collective."""
        session = mesh.agree(secrets.token_hex(8)) or ""
        talk = (mesh.agree, timeout_seconds, mesh.gather)
        return cls(mesh.rank, mesh.size, session, *talk, beat=heartbeat.alive)

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

    def dealt(self, wanted: list[str], sizes: dict[str, int]) -> list[str]:
        """This rank's share of all files wanted by any rank: those it wants itself, if it can.

        Each file falls to one rank that wants it, so that what is read to be checked is then
        read again from memory; of several the one with the least to do takes it. A collective.
        """
        order = {file: number for number, file in enumerate(sizes)}
        mine = sum(1 << order[file] for file in wanted)
        everyone = [int(word, 16) for word in self.gather(f"{mine:x}")]
        assert len(everyone) == self.size, "a crew that loads together must be able to gather"
        takers: dict[str, list[int]] = {}
        files = list(sizes)
        for rank, wants in enumerate(everyone):
            while wants:
                lowest = wants & -wants
                wants ^= lowest
                takers.setdefault(files[lowest.bit_length() - 1], []).append(rank)
        load = [0] * len(everyone)
        share = []
        for file in sorted(takers):
            taker = min(takers[file], key=load.__getitem__)
            load[taker] += sizes[file]
            if taker == self.rank:
                share.append(file)
        return share


ALONE = Crew()
