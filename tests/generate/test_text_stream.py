"""Text while it is written: whole characters, stop strings, and nothing lost."""

from __future__ import annotations

import pytest
from helpers.networks import Recomputing, spelling
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.generate import Options, TextStream, complete
from fourfold.tokenizer import END_OF_TEXT, Tokenizer, train

TOKENIZER: Tokenizer = train(["the cat sat on the mat"], 262)
GREEDY = Options(max_dec_len=40, decode_strategy="greedy_search", num_return_sequences=2)


def streamed(text: str, stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(TOKENIZER, stop)
    pieces = [stream.feed(token_id) for token_id in TOKENIZER.encode(text)]
    return [*pieces, stream.flush()], stream.stopped


@settings(deadline=None)
@given(text=st.text("the cat sät 猫 🐈\n", max_size=30))
def test_the_pieces_are_the_text_and_never_hold_half_a_character(text: str) -> None:
    pieces, _ = streamed(text, [])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@settings(deadline=None)
@given(
    text=st.text("ab猫", max_size=14),
    stop=st.lists(st.text("ab猫", min_size=1, max_size=3), max_size=3),
)
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stop: list[str]) -> None:
    pieces, stopped = streamed(text, stop)
    # The stop string that is complete first ends the text; of several at once, the first in it.
    ends = [n for n in range(len(text) + 1) if any(one in text[:n] for one in stop)]
    if not ends:
        assert ("".join(pieces), stopped) == (text, False)
        return
    before = text[: ends[0]]
    begins = {before.find(one) for one in stop if one in before}
    assert stopped and "".join(pieces) in {before[:begin] for begin in begins}


def test_ids_that_are_no_text_do_not_get_lost() -> None:
    half = TOKENIZER.encode("猫")[:-1]
    stream = TextStream(TOKENIZER)
    assert [stream.feed(token_id) for token_id in half] == [""] * len(half)
    assert stream.flush() == TOKENIZER.decode(half)


def test_complete_is_the_continuation_without_marker_or_padding() -> None:
    network = Recomputing(spelling(TOKENIZER, "the cat", " sat on the mät", width=384))
    [continuations] = complete(network, TOKENIZER, ["the cat"], GREEDY)
    assert [one.text for one in continuations] == [" sat on the mät"] * 2
    assert [one.finish for one in continuations] == ["stop"] * 2


def test_the_prompt_is_text_whatever_it_says() -> None:
    network = Recomputing(spelling(TOKENIZER, END_OF_TEXT, "!", width=262))
    [[first, _]] = complete(network, TOKENIZER, [END_OF_TEXT], GREEDY)
    assert first.text == "!"


def test_a_stop_string_ends_a_text_before_it() -> None:
    network = Recomputing(spelling(TOKENIZER, "the", " cat sat. on the mat", width=262))
    shown: list[tuple[int, int, str]] = []
    [[first, second]] = complete(
        network,
        TOKENIZER,
        ["the"],
        GREEDY,
        stop=["t. o", "zzz"],
        on_text=lambda *piece: shown.append(piece),
    )
    assert first.text == second.text == " cat sa" and first.finish == "stop"
    assert "".join(text for prompt, number, text in shown if number == 0) == " cat sa"
    assert len(shown) > 2


def test_stop_strings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="empty stop string"):
        TextStream(TOKENIZER, ["a", ""])
    beams = Options(decode_strategy="beam_search", num_beams=2)
    with pytest.raises(UserError, match="stop strings do not go with"):
        complete(
            Recomputing(spelling(TOKENIZER, "a", "b", 262)), TOKENIZER, ["a"], beams, stop=["."]
        )
