"""Sequences in the rows of a cache: prompts that begin alike, prompts in parts, and drafts.

    rows = CacheRows(network, slots)
    for wave in rows.waves(running, arrived, prompt_tokens, draft_tokens):
        logits = rows.run(wave)           each turn's logits, one row for each token it may choose
    rows.settle(running)                  after tokens were chosen

A row keeps what it holds after its sequence has ended, until another takes its place. A prompt that
begins with the tokens of a row, of a running sequence or of one that has ended, begins with a copy
of those keys and values; of prompts that begin alike and arrive together the first is read first.

A draft is a guess at the next tokens: what followed the last few tokens when they occurred before
(n-gram speculation, prompt lookup). It is taken in together with the token it follows, and the
tokens are chosen as ever, from the logits at each place; a draft only decides how many places are
computed at once. As a token's numbers do not depend on what is computed with it
(fourfold/native/matrix.h), neither sharing nor drafts nor parts change a text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from fourfold.generate.sampling import Options

# A shorter beginning is computed sooner than it is found and copied.
LEAST_SHARED = 8
# Lengths of what must have occurred before, longest first.
GRAMS = (4, 3, 2)
# Rows of a step that cost little more than one: the weights are read once for all.
CHEAP_ROWS = 8
LONGEST_PAUSE = 32


class RowPart(NamedTuple):
    """The next tokens of a row; logits are wanted after the last `wanted` of them."""

    row: int
    start: int
    tokens: Sequence[int]
    wanted: int


class CacheModel(Protocol):
    """A network that takes tokens in at any place of any row, all in one call."""

    def take_in(self, parts: Sequence[RowPart]) -> Tensor:
        """Logits (sum of wanted, V)."""
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None: ...

    def wipe(self, rows: Sequence[int]) -> None: ...


@dataclass
class Running:
    """A sequence: the tokens so far and where its random numbers come from."""

    name: int
    prompt: tuple[int, ...]
    options: Options
    random: random.Random
    new: list[int] = field(default_factory=list)
    finished: bool = False
    row: int = -1  # of the cache
    stored: int = 0  # tokens in it
    pause: int = 0  # steps without a draft, after drafts that were wrong
    wrong: int = 0  # drafts in a row of which nothing was right
    seen: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-grams: the place after them
    noted: int = 0  # tokens whose n-grams are in `seen`

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.new]


class Turn(NamedTuple):
    """What a sequence has computed in one call."""

    sequence: Running
    tokens: list[int]  # the last ones are the draft
    draft: list[int]
    wanted: int


class CacheRows:
    """Which sequence, or what is left of one, is in which row."""

    def __init__(self, network: CacheModel, rows: int) -> None:
        self._network = network
        self._contents: list[list[int]] = [[] for _ in range(rows)]
        self._owners: list[Running | None] = [None] * rows
        self._used = [0] * rows  # when the row was last given away
        self._clock = 0
        # By the names of sequences placed and not computed yet: the row they begin with, and how
        # much of it.
        self._sources: dict[int, tuple[int, int]] = {}

    # -- what is computed --------------------------------------------------------------------

    def waves(
        self,
        running: Sequence[Running],
        arrived: Sequence[Running],
        prompt_tokens: int,
        draft_tokens: int,
    ) -> list[list[Turn]]:
        """One turn of each sequence; those of the second wave begin with what the first computes.

        At most `prompt_tokens` tokens of prompts are read, so long ones take several steps, and
        those that come after them wait.
        """
        reading = [one for one in running if one.stored < len(one.prompt)]
        writing = [one for one in running if one.stored >= len(one.prompt)]
        most = min(draft_tokens, CHEAP_ROWS // max(len(writing), 1) - 1)
        first = [self._next_token(one, self._draft(one, most)) for one in writing]
        second = list[Turn]()
        for sequence in [*reading, *arrived]:
            if prompt_tokens <= 0:
                break
            depends = sequence.row < 0 and self._place(sequence, first)
            turn = self._next_of_prompt(sequence, prompt_tokens)
            prompt_tokens -= len(turn.tokens)
            (second if depends else first).append(turn)
        return [wave for wave in (first, second) if wave]

    def run(self, wave: Sequence[Turn]) -> Tensor:
        for sequence in (turn.sequence for turn in wave):
            source = self._sources.pop(sequence.name, None)
            if source is not None and source[0] != sequence.row:
                self._network.copy_prefix(source[0], sequence.row, source[1])
        parts = [
            RowPart(turn.sequence.row, turn.sequence.stored, turn.tokens, turn.wanted)
            for turn in wave
        ]
        logits = self._network.take_in(parts)
        for turn in wave:
            turn.sequence.stored += len(turn.tokens) - len(turn.draft)
        return logits

    def settle(self, sequences: Sequence[Running]) -> None:
        """After tokens were chosen: what is in the rows now, and which are free."""
        for sequence in sequences:
            if sequence.row < 0:
                continue
            if sequence.new:
                # All but the last token, the drafts that were right among them.
                sequence.stored = len(sequence.prompt) + len(sequence.new) - 1
            if sequence.finished:
                self._contents[sequence.row] = sequence.tokens[: sequence.stored]
                self._owners[sequence.row] = None
                self._clock += 1
                self._used[sequence.row] = self._clock

    def wipe(self, sequences: Sequence[Running]) -> None:
        rows = [sequence.row for sequence in sequences]
        self._network.wipe(rows)
        for row in rows:
            self._contents[row], self._owners[row] = [], None

    # -- rows --------------------------------------------------------------------------------

    def _place(self, sequence: Running, wave: Sequence[Turn]) -> bool:
        """Give a sequence its row and what it shares; true if that is yet to be computed."""
        source, shared = self._longest_held(sequence.prompt)
        depends = False
        for other in (turn.sequence for turn in wave if turn.wanted and not turn.sequence.new):
            common = _common(sequence.prompt[:-1], other.prompt)
            if common >= shared + LEAST_SHARED:
                source, shared, depends = other.row, common, True
        if source is not None and self._owners[source] is None:
            sequence.row = source  # it continues what is left of another, in its place
        else:
            free = [row for row, owner in enumerate(self._owners) if owner is None]
            sequence.row = min(free, key=lambda row: (bool(self._contents[row]), self._used[row]))
        self._owners[sequence.row] = sequence
        if source is not None:
            sequence.stored = shared
            self._sources[sequence.name] = source, shared
        return depends

    def _longest_held(self, prompt: Sequence[int]) -> tuple[int | None, int]:
        """The row with the longest beginning of a prompt, and how long it is.

        The last token of a prompt is always computed: its logits are needed.
        """
        best, length = None, 0
        for row, owner in enumerate(self._owners):
            if owner is not None and owner.name in self._sources:
                continue
            held = self._contents[row] if owner is None else owner.tokens[: owner.stored]
            common = _common(prompt[:-1], held)
            if common >= max(LEAST_SHARED, length + 1):
                best, length = row, common
        return best, length

    # -- turns -------------------------------------------------------------------------------

    def _next_of_prompt(self, sequence: Running, most: int) -> Turn:
        left = list(sequence.prompt[sequence.stored :])
        return Turn(sequence, left[:most], [], int(len(left) <= most))

    def _next_token(self, sequence: Running, draft: list[int]) -> Turn:
        return Turn(sequence, [sequence.new[-1], *draft], draft, 1 + len(draft))

    def _draft(self, sequence: Running, most: int) -> list[int]:
        most = min(most, sequence.options.max_dec_len - len(sequence.new) - 1)
        if most <= 0:
            return []
        tokens = sequence.tokens
        # An n-gram is noted once something follows it.
        for end in range(max(sequence.noted, min(GRAMS)), len(tokens)):
            for size in GRAMS:
                if size <= end:
                    sequence.seen[tuple(tokens[end - size : end])] = end
        sequence.noted = len(tokens)
        if sequence.pause > 0:
            sequence.pause -= 1
            return []
        for size in GRAMS:
            place = sequence.seen.get(tuple(tokens[-size:]))
            if place is not None:
                return tokens[place : place + most]
        return []


def judge_draft(turn: Turn, right: int) -> None:
    """Fewer drafts for a text that does not repeat itself."""
    sequence = turn.sequence
    if turn.draft:
        sequence.wrong = 0 if right else sequence.wrong + 1
        sequence.pause = 0 if right else min(2**sequence.wrong, LONGEST_PAUSE)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    most = min(len(one), len(other))
    return next((place for place in range(most) if one[place] != other[place]), most)
