"""Pieces of text as OpenAI's clients expect them: whole replies and chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.serve.asking import Wanted
from fourfold.serve.writing import Piece, Shown

Json = dict[str, Any]


@dataclass
class Choice:
    """One of the texts of a reply, so far."""

    text: str = ""
    tokens: list[Shown] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish = piece.finish or self.finish


class Reply:
    """The parts both kinds of reply share."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, wanted: Sequence[Wanted], model: str, shows_tokens: bool) -> None:
        self._wanted = wanted
        self._shows_tokens = shows_tokens
        # The seed is not of OpenAI: with it a text drawn without one can be had again.
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "seed": wanted[0].options.seed,
        }

    def whole(self, choices: Sequence[Choice], new_tokens: int) -> Json:
        listed = [
            {"index": number, "finish_reason": choice.finish, **self._content(choice)}
            for number, choice in enumerate(choices)
        ]
        usage = self.usage(new_tokens)
        return {**self._head, "object": self.kind, "choices": listed, "usage": usage}

    def chunk(self, piece: Piece) -> Json:
        choice = {"index": piece.choice, "finish_reason": piece.finish, **self._delta(piece)}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def openings(self) -> list[Json]:
        """Chunks that go before any text."""
        return []

    def closing(self, new_tokens: int) -> Json:
        """The last chunk of a client that asked for the usage."""
        usage = self.usage(new_tokens)
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def usage(self, new_tokens: int) -> Json:
        # Continuations of one prompt follow each other, and it is counted once for all of them.
        read = sum(len(one.prompt) for one in self._wanted if one.number == 0)
        return {
            "prompt_tokens": read,
            "completion_tokens": new_tokens,
            "total_tokens": read + new_tokens,
        }

    @abstractmethod
    def _content(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _delta(self, piece: Piece) -> Json: ...


class CompletionReply(Reply):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _content(self, choice: Choice) -> Json:
        return {"text": choice.text, "logprobs": self._logprobs(choice.tokens)}

    def _delta(self, piece: Piece) -> Json:
        return {"text": piece.text, "logprobs": self._logprobs(piece.tokens)}

    def _logprobs(self, tokens: Sequence[Shown]) -> Json | None:
        if not self._shows_tokens:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _by_text(token: Shown) -> dict[str, float] | None:
    """The alternatives and the token itself. Of tokens with one text, the more probable counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in (*token.alternatives, (token.text, token.logprob)):
        found.setdefault(text, logprob)
    return found


class ChatReply(Reply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, wanted: Sequence[Wanted], model: str, shows_tokens: bool) -> None:
        super().__init__(wanted, model, shows_tokens)
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
            for number in range(len(self._wanted))
        ]

    def _content(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text.removeprefix(" "), "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.tokens)}

    def _delta(self, piece: Piece) -> Json:
        text = piece.text
        if text and piece.choice not in self._begun:
            # The blank between "Assistant:" and its words belongs to the template.
            text = text.removeprefix(" ")
            self._begun.add(piece.choice)
        delta = {"content": text} if text else {}
        return {"delta": delta, "logprobs": self._logprobs(piece.tokens)}

    def _logprobs(self, tokens: Sequence[Shown]) -> Json | None:
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
