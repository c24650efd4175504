"""Split rules: the pieces that vector operations find are those of the regular expressions."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import regex
from helpers.hard_text import FRAGMENTS
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import Regex, pre_tokenizers

from fourfold.tokenizer import rules
from fourfold.tokenizer.rules import SplitRule

MARK = "\x01"
VECTOR_RULES = [rule for rule in rules.RULES.values() if rule.begins is not None]
by_name = pytest.mark.parametrize("rule", VECTOR_RULES, ids=lambda rule: rule.name)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@pytest.fixture(scope="module")
def finders() -> dict[str, rules.FindBegins]:
    return {rule.name: rules.finder(rule, MARK) for rule in VECTOR_RULES}


def pieces_of(find: rules.FindBegins, texts: list[str]) -> list[str]:
    """Of several texts at once, each with its mark."""
    joined = MARK.join([*texts, ""]).encode()
    content = np.frombuffer(joined + bytes(48), np.uint8)
    begins = np.flatnonzero(find(content, len(joined), joined.isascii())).tolist()
    spans = zip(begins, [*begins[1:], len(joined)])
    return [joined[start:stop].decode() for start, stop in spans]


def expected(rule: SplitRule, texts: list[str]) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(step), "isolated") for step in rule.steps]
    split = pre_tokenizers.Sequence(steps)
    return [
        piece
        for text in texts
        for piece in [*(piece for piece, _ in split.pre_tokenize_str(text)), MARK]
    ]


@by_name
@settings(deadline=None, max_examples=300)
@given(texts=st.lists(TEXTS, max_size=4))
def test_hard_text(finders: dict[str, rules.FindBegins], rule: SplitRule, texts: list[str]) -> None:
    assert pieces_of(finders[rule.name], texts) == expected(rule, texts)


@by_name
@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(exclude_characters="\x00\x01", exclude_categories=["Cs"])))
def test_any_unicode(finders: dict[str, rules.FindBegins], rule: SplitRule, text: str) -> None:
    assert pieces_of(finders[rule.name], [text]) == expected(rule, [text])


@by_name
def test_every_kind_of_character_between_others(
    finders: dict[str, rules.FindBegins], rule: SplitRule
) -> None:
    """Its kind decides where pieces begin before and after it."""
    codes = [code for code in range(2, sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    codes = sorted({*range(2, 0x800), *range(0x2000, 0x3100), *codes[:: len(codes) // 8000]})
    texts = [f"a{c}b {c}1{c}  {c}{c}'s{c}({c} '{c}\n{c}北{c} " for c in map(chr, codes)]
    assert pieces_of(finders[rule.name], texts) == expected(rule, texts)


@settings(deadline=None, max_examples=300)
@given(text=TEXTS)
def test_gpt4s_rule_is_that_of_openais_library(
    finders: dict[str, rules.FindBegins], text: str
) -> None:
    # Its function would fetch the ranks; only the expression is wanted.
    constants = openai_public.cl100k_base.__code__.co_consts
    expression = next(one for one in constants if r"\s++$" in str(one))
    assert pieces_of(finders["cl100k"], [text])[:-1] == regex.findall(expression, text)


def test_a_rule_is_the_same_one_wherever_it_is_sent() -> None:
    for rule in rules.RULES.values():
        assert copy.deepcopy(rule) is rule


BYTES_ALONE = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def split(step: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": step}, "behavior": behavior, "invert": invert}


def sequence(*steps: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def test_rules_are_known_by_their_expressions_and_nothing_else() -> None:
    for rule in rules.RULES.values():
        assert rules.rule_of(sequence(*map(split, rule.steps), BYTES_ALONE)) is rule
    (step,) = rules.LLAMA3.steps
    assert rules.rule_of(sequence(split(step, "Removed", True), BYTES_ALONE)) is rules.LLAMA3
    assert rules.rule_of(BYTES_ALONE | {"use_regex": True}) is rules.GPT2
    for other in (
        None,
        BYTES_ALONE,
        BYTES_ALONE | {"use_regex": True, "add_prefix_space": True},
        {"type": "Whitespace"},
        sequence(),
        sequence(split(step)),
        sequence(split(step, "Removed", False), BYTES_ALONE),
        sequence(split(step), split(step), BYTES_ALONE),
        sequence(split(step + "|x"), BYTES_ALONE),
        sequence({"type": "Digits", "individual_digits": True}, split(step), BYTES_ALONE),
    ):
        assert rules.rule_of(other) is None
