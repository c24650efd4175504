"""Much text at once is cut and looked up by vector operations: the ids are the library's."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerFile

from fourfold.tokenizer import Tokenizer, fast, pieces, train

# What the split rule treats in its own way: contractions and what only looks like them, blanks of
# one to three bytes and what only looks like one, letters, marks and numbers of several scripts.
HARD = [
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'", "''", "'S", "\u2019s", "'l", "'v", "'r"),
    *(" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x0c", "\x85", "\xa0", "\u1680", "\u2003", "\u2028"),
    *("\u2029", "\u202f", "\u205f", "\u3000", "\u200b", "\u180e", "\ufeff", "\x1c", "\x1f", "\x7f"),
    *("a", "Z", "the", "é", "ß", "e\u0301", "北京", "नमस्ते", "ﷺ", "ﬁ", "𝒳", "𐐷", "ª", "ǅ", "ʰ"),
    *(
        "1",
        "42",
        "²",
        "½",
        "Ⅷ",
        "٣",
        "𝟙",
        "一",
        "①",
        "零",
        "!",
        "=" * 40,
        "\u0301",
        "🏳️‍🌈",
        "\ufffd",
    ),
    *("\ue000", "\U0010ffff", "\ud800", "x" * 8, "y" * 16, "z" * 17, "w" * 33, " " * 33),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return train([file.read_text(encoding="utf-8") for file in files], 1500)


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> TokenizerFile:
    file = TokenizerFile.from_str(tokenizer.to_json())
    file.encode_special_tokens = True
    return file


@pytest.fixture(autouse=True)
def any_text_is_much(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fast, "LITTLE_CHARACTERS", -1)
    yield


def check(tokenizer: Tokenizer, reference: TokenizerFile, texts: list[str]) -> None:
    ids, lengths = tokenizer.encode_joined(texts)
    sound = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    expected = [reference.encode(text).ids for text in sound]
    assert lengths.tolist() == [len(each) for each in expected]
    assert ids.tolist() == [one for each in expected for one in each]


@settings(deadline=None, max_examples=500)
@given(texts=st.lists(st.lists(st.sampled_from(HARD), max_size=12).map("".join), max_size=4))
def test_hard_text(tokenizer: Tokenizer, reference: TokenizerFile, texts: list[str]) -> None:
    check(tokenizer, reference, texts)


@settings(deadline=None, max_examples=300)
@given(texts=st.lists(st.text(), max_size=4))
def test_any_unicode(tokenizer: Tokenizer, reference: TokenizerFile, texts: list[str]) -> None:
    check(tokenizer, reference, texts)


def test_marks_of_our_own_in_a_text_are_text(
    tokenizer: Tokenizer, reference: TokenizerFile
) -> None:
    check(tokenizer, reference, ["a\x00 b", "\x01", "c \x01\x00", ""])


def test_every_character_between_others(tokenizer: Tokenizer, reference: TokenizerFile) -> None:
    """Its kind decides where pieces start before and after it."""
    codes = [code for code in range(2, sys.maxunicode + 1, 7) if not 0xD800 <= code < 0xE000]
    codes = sorted({*range(2, 0x3100), *codes[:: 1 + len(codes) // 20_000]})
    texts = [f"a{c}b {c}1{c}  {c}{c}'s{c} " for c in map(chr, codes)]
    check(tokenizer, reference, texts)


def test_forgetting_changes_nothing(
    tokenizer: Tokenizer, reference: TokenizerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MOST_PIECES", 100)
    # So small that most pieces find no place in a table.
    monkeypatch.setattr(pieces, "_TABLES", ((1, 4), (2, 4), (4, 4)))
    fresh = Tokenizer(TokenizerFile.from_str(tokenizer.to_json()))
    words = [f"word{number} {number * number}" for number in range(2000)]
    for first in range(0, len(words), 250):
        check(fresh, reference, words[first : first + 300])


def test_threads_that_encode_at_once_agree(tokenizer: Tokenizer) -> None:
    texts = [f"some text number {number}" for number in range(400)]
    expected, _ = tokenizer.encode_joined(texts)
    results: list[np.ndarray] = []

    def encode() -> None:
        results.extend(tokenizer.encode_joined(texts)[0] for _ in range(20))

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(np.array_equal(result, expected) for result in results)
