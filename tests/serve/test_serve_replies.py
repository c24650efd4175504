"""Pieces of text and the tokens beside them, token by token."""

from __future__ import annotations

import pytest
from helpers.served import make_untrained

from fourfold.generate import Options, Token
from fourfold.serve.replies import Detokenizer, TextPiece
from fourfold.serve.requests import SequenceRequest
from fourfold.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("words")
    make_untrained(directory)
    return Tokenizer.load(directory / "tokenizer.json")


def pieces(
    tokenizer: Tokenizer, ids: list[int], *stop: str, echo: str | None = None
) -> list[TextPiece]:
    options = Options(max_dec_len=len(ids), alternatives=0)
    writer = Detokenizer(0, SequenceRequest((1,), options, 0, stop, len(ids), echo), tokenizer)
    found = []
    for place, token_id in enumerate(ids):
        finish = "length" if place == len(ids) - 1 else None
        found.append(writer.take(Token(0, token_id, finish, -1.0)))
        if found[-1].finish is not None:
            break
    return found


def test_a_character_of_several_tokens_comes_whole_and_with_all_of_them(
    tokenizer: Tokenizer,
) -> None:
    text = "a😀é cat"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    found = pieces(tokenizer, ids, echo="before")
    assert "".join(piece.text for piece in found) == text
    assert all("\ufffd" not in piece.text for piece in found)
    tokens = [token for piece in found for token in piece.tokens]
    assert len(tokens) == len(ids)
    assert [token.offset - len("before") for token in tokens] == [0, 1, 1, 1, 1, 2, 2, 3]
    smile = next(piece for piece in found if piece.text == "😀")
    assert len(smile.tokens) == 4


def test_tokens_of_a_stop_string_are_not_shown(tokenizer: Tokenizer) -> None:
    ids = [
        token_id for text in ("x", "s", "t", "o", "p", "y") for token_id in tokenizer.encode(text)
    ]
    found = pieces(tokenizer, ids, "stop")
    assert "".join(piece.text for piece in found) == "x" and found[-1].finish == "stop"
    assert [token.text for piece in found for token in piece.tokens] == ["x"]
    # What only looked like one is shown after all.
    found = pieces(tokenizer, ids, "stow")
    assert "".join(piece.text for piece in found) == "xstopy"
    assert [len(piece.tokens) for piece in found] == [1, 0, 0, 0, 4, 1]


def test_the_end_of_text_is_no_text(tokenizer: Tokenizer) -> None:
    writer = Detokenizer(0, SequenceRequest((1,), Options(), 0, (), 16), tokenizer)
    assert writer.take(Token(0, tokenizer.eos_id, "stop")) == TextPiece(0, finish="stop")
