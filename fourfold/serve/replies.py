"""Replies: tokens of a sequence -> pieces of text -> whole replies and chunks of a stream.

A piece never holds half a character or part of a stop string, and the tokens beside it are those
whose text it carries: tokens wait until their text is sent, and those of a stop string never are.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.generate import TextStream, Token
from fourfold.serve.requests import SequenceRequest
from fourfold.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """A token for a client to look at: its own text, log-probabilities, and where it begins."""

    text: str
    logprob: float | None  # None for the first token of a prompt, which follows nothing
    alternatives: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True)
class TextPiece:
    """Something new of one choice of a reply."""

    choice: int
    text: str = ""
    tokens: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


class Offsets:
    """Where in the text each token begins: after all complete characters before it."""

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._stream = TextStream(tokenizer)
        self._length = start

    def next(self, token_id: int) -> int:
        offset = self._length
        self._length += len(self._stream.feed(token_id))
        return offset


class Detokenizer:
    """`take` a token, get the piece it completes, which may be empty."""

    def __init__(self, choice: int, request: SequenceRequest, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self.request = request
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, request.stop)
        self._offsets: Offsets | None = None
        start = len(request.echo or "")
        if request.options.alternatives is not None:
            self._offsets = Offsets(tokenizer, start)
        self._sent_chars = start
        self._waiting: list[TokenLogprob] = []

    def take(self, token: Token) -> TextPiece:
        is_text = token.id != self._tokenizer.eos_id
        if is_text and self._offsets is not None:
            offset = self._offsets.next(token.id)
            self._waiting.append(token_logprob(self._tokenizer, token, offset))
        text = self._stream.feed(token.id) if is_text else ""
        finish = token.finish
        if finish is not None:
            text += self._stream.flush()
        if self._stream.stopped:
            finish = "stop"
        self._sent_chars += len(text)
        return TextPiece(self.choice, text, self._release(finish), finish)

    def _release(self, finish: str | None) -> tuple[TokenLogprob, ...]:
        all_sent = finish is not None and not self._stream.stopped
        ready = [one for one in self._waiting if all_sent or one.offset < self._sent_chars]
        self._waiting = self._waiting[len(ready) :]
        return tuple(ready)


def token_logprob(tokenizer: Tokenizer, token: Token, offset: int) -> TokenLogprob:
    alternatives = tuple(
        (tokenizer.decode([one], continues=True), value) for one, value in token.alternatives
    )
    text = tokenizer.decode([token.id], continues=True)
    return TokenLogprob(text, token.logprob, alternatives, offset)


def echo_piece(
    choice: int, request: SequenceRequest, tokenizer: Tokenizer, logprobs: list[Token] | None = None
) -> TextPiece:
    """The prompt as the first piece of its choice, with its tokens where it was scored."""
    assert request.echo is not None
    offsets = Offsets(tokenizer, 0)
    tokens = [token_logprob(tokenizer, token, offsets.next(token.id)) for token in logprobs or ()]
    return TextPiece(choice, request.echo, tuple(tokens))


# -- replies and chunks, as OpenAI's clients expect them ----------------------------------------

Json = dict[str, Any]


@dataclass
class ReplyChoice:
    """One of the texts of a reply, so far."""

    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: TextPiece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish = piece.finish or self.finish


class Reply:
    """The parts both kinds of reply share."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, requests: Sequence[SequenceRequest], model: str, shows_tokens: bool) -> None:
        self._requests = requests
        self._shows_tokens = shows_tokens
        # The seed is not of OpenAI: with it a text drawn without one can be had again.
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "seed": requests[0].options.seed,
        }

    def whole(self, choices: Sequence[ReplyChoice], new_tokens: int) -> Json:
        listed = [
            {"index": number, "finish_reason": choice.finish, **self._content(choice)}
            for number, choice in enumerate(choices)
        ]
        usage = self.usage(new_tokens)
        return {**self._head, "object": self.kind, "choices": listed, "usage": usage}

    def chunk(self, piece: TextPiece) -> Json:
        choice = {"index": piece.choice, "finish_reason": piece.finish, **self._delta(piece)}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def openings(self) -> list[Json]:
        """Chunks that go before any text."""
        return []

    def closing(self, new_tokens: int) -> Json:
        """The last chunk for a client that requested the usage."""
        usage = self.usage(new_tokens)
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def usage(self, new_tokens: int) -> Json:
        # Continuations of one prompt follow each other, and it is counted once for all of them.
        read = sum(len(one.prompt) for one in self._requests if one.number == 0)
        return {
            "prompt_tokens": read,
            "completion_tokens": new_tokens,
            "total_tokens": read + new_tokens,
        }

    @abstractmethod
    def _content(self, choice: ReplyChoice) -> Json: ...

    @abstractmethod
    def _delta(self, piece: TextPiece) -> Json: ...


class CompletionReply(Reply):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _content(self, choice: ReplyChoice) -> Json:
        return {"text": choice.text, "logprobs": self._logprobs(choice.tokens)}

    def _delta(self, piece: TextPiece) -> Json:
        return {"text": piece.text, "logprobs": self._logprobs(piece.tokens)}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Json | None:
        if not self._shows_tokens:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _by_text(token: TokenLogprob) -> dict[str, float] | None:
    """The alternatives and the token itself. Of tokens with one text, the more probable counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in (*token.alternatives, (token.text, token.logprob)):
        found.setdefault(text, logprob)
    return found


class ChatReply(Reply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, requests: Sequence[SequenceRequest], model: str, shows_tokens: bool) -> None:
        super().__init__(requests, model, shows_tokens)
        self._begun: set[int] = set()  # choices whose first text is out

    def openings(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            {
                **self._head,
                "object": self.chunk_kind,
                "choices": [
                    {"index": number, "delta": delta, "finish_reason": None, "logprobs": None}
                ],
            }
            for number in range(len(self._requests))
        ]

    def _content(self, choice: ReplyChoice) -> Json:
        message = {"role": "assistant", "content": choice.text.removeprefix(" "), "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.tokens)}

    def _delta(self, piece: TextPiece) -> Json:
        text = piece.text
        if text and piece.choice not in self._begun:
            # The blank between "Assistant:" and its words belongs to the template.
            text = text.removeprefix(" ")
            self._begun.add(piece.choice)
        delta = {"content": text} if text else {}
        return {"delta": delta, "logprobs": self._logprobs(piece.tokens)}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Json | None:
        if not self._shows_tokens:
            return None
        content = [
            {
                **_entry(token.text, token.logprob),
                "top_logprobs": [_entry(*alternative) for alternative in token.alternatives],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _entry(text: str, logprob: float | None) -> Json:
    # A token that is part of a character has no text of its own, and its bytes are not known here.
    encoded = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}
