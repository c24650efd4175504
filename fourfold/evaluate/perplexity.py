"""Perplexity of a long text or of token files, with sliding windows.

Windows of `seq_len` inputs begin every `stride` tokens. The first counts whole; of each later one
only the last `stride` predictions count, which no window before it made, so every token but the
first is counted once and all but the first few after at least `seq_len - stride` others.

The tokens come in pieces of any length and are kept no longer than a window needs them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee

import numpy as np

from fourfold.config import Config
from fourfold.data.datasets import TokenDataset
from fourfold.data.splits import SplitData, all_datasets, check_splits, open_splits
from fourfold.data.tokenizer_check import find_end_of_text
from fourfold.errors import DataError
from fourfold.evaluate.scoring import Scorer, ScoreRequest

# Tokens of a document read at a time.
PIECE_TOKENS = 1 << 16


@dataclass(frozen=True)
class Loss:
    """Total loss in nats over the tokens that count, and how many bytes of text those are."""

    total: float
    tokens: int
    num_bytes: int | None = None

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """In terms of the bytes that were predicted, and no others."""
        assert self.num_bytes is not None
        return self.total / math.log(2) / max(self.num_bytes, 1)


def windows(
    pieces: Iterable[Sequence[int] | np.ndarray], seq_len: int, stride: int
) -> Iterator[ScoreRequest]:
    """The windows over all pieces laid end to end, each scored on the tokens it counts."""
    assert 1 <= stride <= seq_len, (stride, seq_len)
    source = iter(pieces)
    buffer = np.empty(0, np.int64)
    seen = 1  # tokens at the beginning of `buffer` that are counted, or can have no prediction
    while True:
        buffer, ended = _filled(buffer, source, seq_len + 2)
        window = buffer[: seq_len + 1]
        if len(window) > seen:
            yield ScoreRequest(window, len(window) - seen)
            seen = len(window)
        if ended and len(buffer) <= seq_len + 1:
            return
        buffer, seen = buffer[stride:], seen - stride


def _filled(
    buffer: np.ndarray, source: Iterator[Sequence[int] | np.ndarray], tokens: int
) -> tuple[np.ndarray, bool]:
    """`buffer` filled up to `tokens` ids from `source`, and whether `source` ran out."""
    parts, found = [buffer], len(buffer)
    while found < tokens:
        piece = next(source, None)
        if piece is None:
            return np.concatenate(parts), True
        parts.append(np.asarray(piece, np.int64))
        found += len(piece)
    return np.concatenate(parts) if len(parts) > 1 else buffer, False


def measure_loss(
    scorer: Scorer,
    pieces: Iterable[Sequence[int] | np.ndarray],
    seq_len: int,
    stride: int,
    *,
    ignored_input: int | None = None,
    token_bytes: np.ndarray | None = None,
) -> Loss:
    """The loss of the pieces; what follows `ignored_input` (the end of text) does not count.

    `token_bytes` is the number of bytes of text each id stands for.
    """
    requests, scored = tee(windows(pieces, seq_len, stride))
    total, counted, num_bytes = 0.0, 0, 0
    for request, score in zip(scored, scorer.score(requests)):
        tokens = np.asarray(request.tokens)
        labels = tokens[-request.scored :]
        counts = tokens[-request.scored - 1 : -1] != ignored_input
        total -= float(score.logprobs.numpy()[counts].sum())
        counted += int(counts.sum())
        if token_bytes is not None:
            _check_known(labels, len(token_bytes))
            num_bytes += int(token_bytes[labels[counts]].sum())
    if not counted:
        raise DataError(
            "no token can be scored: each is scored by those before it in its text, and none "
            "has any; give a longer text"
        )
    return Loss(total, counted, None if token_bytes is None else num_bytes)


def _check_known(tokens: np.ndarray, vocab_size: int) -> None:
    if (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"token id {largest} is not in the vocabulary of {vocab_size} of Global.tokenizer, so "
            "the data was made with another one; name that, or set it to null for no bits per byte"
        )


# -- WikiText ---------------------------------------------------------------------------------

_REPLACED = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
# Text in brackets or quotation marks loses the blanks around it.
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
    """Words as the benchmark counts them: whatever is between single blanks."""
    return len(text.strip().split(" "))


# -- tokens of prepared data --------------------------------------------------------------------


def read_part(config: Config) -> tuple[Iterator[np.ndarray], int | None]:
    """Tokens of the part `Eval.part`, at most `Eval.max_tokens`, and the end-of-text id if known.

    They come in pieces, read from the files on demand.

    A weighted mixture is read as its sources, whole and one after the other: what is measured is
    the data, not the order training would take it in.
    """
    name = config.Eval.part
    parts = open_splits(config)
    part = parts.get(name)
    if part is None:
        raise DataError(
            f"Eval.part={name}, but Data.dataset.{name}_data is null; choose one of "
            f"{', '.join(parts)}"
        )
    check_splits(config, {name: part})
    found = sum(
        int(source.sizes[documents.start : documents.stop].sum(dtype=np.int64))
        for source, documents in _documents(part)
    )
    if found < 2:
        raise DataError(
            f"the {name} part of the data holds {found} tokens; give it a share in "
            "Data.dataset.split, or choose another Eval.part"
        )
    end_of_text, _ = find_end_of_text(config, all_datasets(parts))
    return _pieces(part, config.Eval.max_tokens or found), end_of_text


def _documents(part: SplitData) -> Iterator[tuple[TokenDataset, range]]:
    for source in part.datasets:
        yield source, part.spec.documents(source)


def _pieces(part: SplitData, left: int) -> Iterator[np.ndarray]:
    for source, documents in _documents(part):
        for document in documents:
            size = int(source.sizes[document])
            for start in range(0, size, PIECE_TOKENS):
                stop = min(start + PIECE_TOKENS, size, start + left)
                yield source.tokens(document, start, stop)
                left -= stop - start
                if left == 0:
                    return
