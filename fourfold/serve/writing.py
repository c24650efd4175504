"""Tokens of one sequence become the pieces of text a client receives, each with its tokens.

A piece never holds half a character or part of a stop string, and the tokens beside it are those
whose text it carries: tokens wait until their text is given out, and those of a stop string never
are.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.generate import TextStream, Token
from fourfold.serve.asking import Wanted
from fourfold.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shown:
    """A token for a client to look at: its own text, log-probabilities, and where it begins."""

    text: str
    logprob: float | None  # None for the first token of a prompt, which follows nothing
    alternatives: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """Something new of one choice of a reply."""

    choice: int
    text: str = ""
    tokens: tuple[Shown, ...] = ()
    finish: str | None = None


class Offsets:
    """Where in the text each token begins: behind all complete characters before it."""

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._stream = TextStream(tokenizer)
        self._length = start

    def next(self, token_id: int) -> int:
        offset = self._length
        self._length += len(self._stream.feed(token_id))
        return offset


class Writer:
    """`take` a token, get the piece it completes, which may be empty."""

    def __init__(self, choice: int, wanted: Wanted, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self.wanted = wanted
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, wanted.stop)
        self._offsets: Offsets | None = None
        start = len(wanted.echo or "")
        if wanted.options.alternatives is not None:
            self._offsets = Offsets(tokenizer, start)
        self._given = start
        self._held: list[Shown] = []

    def take(self, token: Token) -> Piece:
        is_text = token.id != self._tokenizer.eos_id
        if is_text and self._offsets is not None:
            offset = self._offsets.next(token.id)
            self._held.append(shown(self._tokenizer, token, offset))
        text = self._stream.feed(token.id) if is_text else ""
        finish = token.finish
        if finish is not None:
            text += self._stream.flush()
        if self._stream.stopped:
            finish = "stop"
        self._given += len(text)
        return Piece(self.choice, text, self._release(finish), finish)

    def _release(self, finish: str | None) -> tuple[Shown, ...]:
        all_given = finish is not None and not self._stream.stopped
        ready = [one for one in self._held if all_given or one.offset < self._given]
        self._held = self._held[len(ready) :]
        return tuple(ready)


def shown(tokenizer: Tokenizer, token: Token, offset: int) -> Shown:
    alternatives = tuple((tokenizer.decode([one]), value) for one, value in token.alternatives)
    return Shown(tokenizer.decode([token.id]), token.logprob, alternatives, offset)


def echoed(
    choice: int, wanted: Wanted, tokenizer: Tokenizer, judged: list[Token] | None = None
) -> Piece:
    """The prompt as the first piece of its choice, with its tokens where they were `judged`."""
    assert wanted.echo is not None
    offsets = Offsets(tokenizer, 0)
    tokens = [shown(tokenizer, token, offsets.next(token.id)) for token in judged or ()]
    return Piece(choice, wanted.echo, tuple(tokens))
