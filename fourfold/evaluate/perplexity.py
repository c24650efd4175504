"""Perplexity over a long stretch of tokens, seen through windows.

Windows of `seq_len` inputs begin every `stride` tokens. The first counts whole; of each later one
only the last `stride` predictions count, which no window before it made, so every token but the
first is counted once and all but the first few after at least `seq_len - stride` others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fourfold.errors import DataError
from fourfold.evaluate.scoring import Question, Scorer


@dataclass(frozen=True)
class Loss:
    """Total loss in nats over the tokens that count."""

    total: float
    tokens: int

    def mean(self, over: int | None = None) -> float:
        return self.total / max(self.tokens if over is None else over, 1)


def bits_per_byte(total_loss: float, num_bytes: int) -> float:
    return total_loss / math.log(2) / max(num_bytes, 1)


def windows(num_tokens: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Start, stop, and how many of the last tokens count, of each window."""
    assert 1 <= stride <= seq_len, (stride, seq_len)
    counted = 0  # predictions so far; the last token to predict is number num_tokens - 1
    for start in range(0, num_tokens - 1, stride):
        stop = min(start + seq_len + 1, num_tokens)
        if stop - 1 > counted:
            yield start, stop, stop - 1 - counted
            counted = stop - 1


def measure_loss(
    scorer: Scorer,
    tokens: Sequence[int],
    seq_len: int,
    stride: int,
    ignored_input: int | None = None,
) -> Loss:
    """The loss of `tokens`; what follows `ignored_input` (the end of text) does not count."""
    if len(tokens) < 2:
        raise DataError(
            f"{len(tokens)} token{'s' * (len(tokens) != 1)} cannot be evaluated: each is judged by "
            "those before it; give a longer text"
        )
    places = list(windows(len(tokens), seq_len, stride))
    questions = (Question(tokens[start:stop], asked) for start, stop, asked in places)
    total, counted = 0.0, 0
    for (_, stop, asked), answer in zip(places, scorer.answer(questions)):
        inputs = tokens[stop - 1 - asked : stop - 1]
        counts = [token != ignored_input for token in inputs]
        total -= sum(p for p, kept in zip(answer.logprobs.tolist(), counts) if kept)
        counted += sum(counts)
    return Loss(total, counted)


# -- WikiText ---------------------------------------------------------------------------------

_REPLACED = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
# What stands between brackets or quotation marks loses the blanks around it.
_TIGHTENED = (
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
_HEADINGS = (("= = = =", "===="), ("= = =", "==="), ("= =", "=="))
_LAST = ((" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"))


def detokenize_wikitext(text: str) -> str:
    """Undo the spacing of WikiText's raw files, by the rules Megatron and FleetX share."""
    for spaced, plain in _REPLACED:
        text = text.replace(spaced, plain)
    for spaced, tight in _TIGHTENED:
        text = re.sub(spaced, tight, text)
    for spaced, plain in (*_HEADINGS, *_LAST):
        text = text.replace(spaced, plain)
    return text


def count_words(text: str) -> int:
    """Words as the benchmark counts them: what stands between single blanks."""
    return len(text.strip().split(" "))
