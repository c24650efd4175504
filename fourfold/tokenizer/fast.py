"""The fast path: much text at once, with the ids a tokenizer's own library gives.

`byte_bpe` finds out whether a tokenizer.json is byte-level BPE that merge ranks express, with a
split rule that is known here; `SentenceWords`, whether it is SentencePiece's BPE whose words are
encoded one by one. Each says None to whatever it does not understand, and such text is encoded by
`tokenizers`. `FastEncoder` then encodes texts from a memory of their pieces, asks `tiktoken` (or
`tokenizers`, for SentencePiece's words) for each distinct piece once, and leaves a text with
something special in it to the slow way.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import tiktoken
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import normalizers

from fourfold.tokenizer import rules
from fourfold.tokenizer.pieces import FindBegins, PieceEncoder
from fourfold.tokenizer.rules import SplitRule

SLICE_CHARACTERS = 1 << 20
LITTLE_CHARACTERS = 1 << 14
CUT, END = "\x00", "\x01"  # within a text, and after each
BLANK_SIGN = "▁"  # SentencePiece's blank

# GPT-2's rule without its look ahead, which only decides where a run of blanks before other text is
# cut: before its last blank. With a mark put there beforehand the shorter rule gives the same
# pieces, at twice the speed, since regular expressions without look ahead need no backtracking.
_MARKED_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}\x00\x01]+|\s+|[\x00\x01]"
_WHOLE_PIECES = r"[^\x01]+|\x01"
_BEFORE_SPACE = re.compile(r"\S(?= \S)")
_BLANK = np.zeros(0x3002, dtype=bool)  # the last entry stands for all characters beyond
_BLANK[list(rules.BLANKS)] = True

Encoded = tuple[np.ndarray, np.ndarray]  # ids of all texts, and how many each has


# -- what a tokenizer is made of ------------------------------------------------------------------


@dataclass(frozen=True)
class ByteBpe:
    """Byte-level BPE: the bytes of each token with its id, which is also the order of merging.

    `specials` are never text; `added` are found in texts before they are split.
    """

    ranks: dict[bytes, int]
    rule: SplitRule
    specials: dict[str, int]
    added: dict[str, int]
    composes: bool  # NFC first

    @property
    def is_plain(self) -> bool:
        """Whether it is GPT-2's in all but its vocabulary."""
        return self.rule is rules.GPT2 and not self.added and not self.composes


def byte_bpe(file: TokenizerFile, state: dict[str, Any]) -> ByteBpe | None:
    """The merge ranks of a tokenizer.json, or None where ids alone do not determine the merges.

    `tiktoken` joins any two neighbours whose bytes together are a token, lowest id first;
    `tokenizers` joins listed pairs, first listed first. They agree in two cases. Each token has
    one pair, ids rise along the list, and each token, encoded alone, is itself: then the inside of
    a token is always in the state its one merge expects. Or the list has, in the order of ids,
    every pair of tokens that together are a token, as files made from merge ranks do: then the two
    say the same.
    """
    rule = rules.rule_of(state["pre_tokenizer"])
    composes = _composes(state["normalizer"])
    if rule is None or composes is None or not _is_byte_level(state):
        return None
    model = state["model"]
    added = {str(token["content"]): int(token["id"]) for token in state["added_tokens"]}
    vocab = {token: number for token, number in model["vocab"].items() if token not in added}
    byte_of = byte_of_character()
    if not set(vocab) >= set(byte_of) or not set("".join(vocab)) <= set(byte_of):
        return None
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else pair for pair in model["merges"]]
    merged = ["".join(pair) for pair in pairs]
    if any(token not in vocab for token in merged):
        return None
    takes_whole = bool(model.get("ignore_merges"))
    if sorted([*byte_of, *merged]) == sorted(vocab):
        rises = all(vocab[one] < vocab[other] for one, other in pairwise(merged))
        agrees = rises and _every_token_is_itself(file, vocab)
    else:
        rises = all(vocab[one] <= vocab[other] for one, other in pairwise(merged))
        agrees = rises and _has_every_pair(pairs, vocab)
        agrees = agrees and (takes_whole or _every_token_is_itself(file, vocab))
    if not agrees:
        return None
    special = {str(token["content"]) for token in state["added_tokens"] if token["special"]}
    return ByteBpe(
        {bytes(map(byte_of.__getitem__, token)): number for token, number in vocab.items()},
        rule,
        {token: number for token, number in added.items() if token in special},
        {token: number for token, number in added.items() if token not in special},
        composes,
    )


def _is_byte_level(state: dict[str, Any]) -> bool:
    model, decoder = state["model"], state["decoder"]
    altering = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model["type"] == "BPE"
        and not any(model.get(option) for option in (*altering, "fuse_unk", "byte_fallback"))
        and decoder is not None
        and decoder["type"] == "ByteLevel"
    )


def _composes(normalizer: dict[str, Any] | None) -> bool | None:
    """Whether a text is brought to NFC, and None if anything else is done to it."""
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    return bool(steps) if all(step["type"] == "NFC" for step in steps) else None


def _every_token_is_itself(file: TokenizerFile, vocab: dict[str, int]) -> bool:
    model: Any = file.model
    takes_whole = bool(model.ignore_merges)
    model.ignore_merges = False
    try:
        for token, number in vocab.items():
            parts = model.tokenize(token)
            if len(parts) != 1 or parts[0].id != number:
                return False
    finally:
        model.ignore_merges = takes_whole
    return True


def _has_every_pair(pairs: list[Any], vocab: dict[str, int]) -> bool:
    listed = set(map(tuple, pairs))
    return listed == set(every_pair(vocab)) and len(listed) == len(pairs)


def every_pair(vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that together are a token, in the order of that token's id, and of the
    ids of the two where it has several."""
    for token in sorted(vocab, key=vocab.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        found = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        yield from sorted(found, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def byte_of_character() -> dict[str, int]:
    """The printable stand-in of each byte in GPT-2's files.

    Printable Latin-1 stands for itself; the rest is numbered from U+0100 in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + position): byte for position, byte in enumerate(others)
    }


@dataclass(frozen=True)
class SentenceWords:
    """SentencePiece's BPE where no token goes from another character to a blank after it, so that
    a text can be cut before its blanks. `alone` are ASCII characters that no other is joined to."""

    begins_with_blank: str  # "always", "unless it does" or "never"
    alone: bytes
    added: tuple[str, ...]

    @classmethod
    def of(cls, state: dict[str, Any]) -> SentenceWords | None:
        model = state["model"]
        altering = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        if model["type"] != "BPE" or any(model.get(option) for option in altering):
            return None
        begins = _sentence_begins(state["normalizer"], state["pre_tokenizer"])
        bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
        vocab = model["vocab"]
        if begins is None or not model.get("byte_fallback") or not bytes_ <= set(vocab):
            return None
        added = [str(token["content"]) for token in state["added_tokens"] if not token["special"]]
        joined = ["".join(pair) for pair in model["merges"]]
        if any(BLANK_SIGN in token.lstrip(BLANK_SIGN) for token in joined):
            return None
        within = set("".join(joined))
        alone = bytes(byte for byte in range(2, 128) if chr(byte) not in within and byte != 0x20)
        return cls(begins, alone, tuple(added))


def _sentence_begins(
    normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None
) -> str | None:
    prepend = {"type": "Prepend", "prepend": BLANK_SIGN}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK_SIGN}
    if pre_tokenizer is None and normalizer is not None and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
        known = {2: ("always", [prepend, replace]), 1: ("never", [replace])}
        begins, expected = known.get(len(steps), (None, []))
        return begins if steps == expected else None
    if pre_tokenizer is None and normalizer == replace:
        return "never"
    if normalizer is None and pre_tokenizer is not None and pre_tokenizer["type"] == "Metaspace":
        schemes = {"always": "unless it does", "first": "unless it does", "never": "never"}
        is_plain = pre_tokenizer["replacement"] == BLANK_SIGN and not pre_tokenizer["split"]
        return schemes.get(pre_tokenizer["prepend_scheme"]) if is_plain else None
    return None


# -- encoding -------------------------------------------------------------------------------------


class FastEncoder:
    """Texts to ids, given `slowly`, which encodes any one text rightly."""

    def __init__(
        self,
        parts: ByteBpe | SentenceWords,
        slowly: Callable[[str], np.ndarray],
        words: Callable[[Sequence[str]], Encoded] | None = None,
    ) -> None:
        """`words` encodes many words of SentencePiece's, as they stand in a text."""
        self._parts = parts
        self._slowly = slowly
        self._words = words
        self._free = threading.Lock()
        self._added = tuple(parts.added)
        # What all of them begin with is looked for first.
        self._added_start = _common_start(self._added)

    def encode_joined(self, texts: Sequence[str]) -> Encoded:
        """The ids of all texts one after the other; a long one in slices, so that it costs the
        memory of its ids and not many times that of its characters."""
        if sum(map(len, texts)) <= SLICE_CHARACTERS:
            return self._encode_short(texts)
        ids, lengths = [], []
        for batch in _batches(texts):
            encoded = self._encode_short(batch) if len(batch) > 1 else self._encode_long(batch[0])
            ids.append(encoded[0])
            lengths.append(encoded[1])
        return np.concatenate(ids), np.concatenate(lengths)

    def encode_within(self, text: str) -> np.ndarray:
        """The ids of a text as they are after other text."""
        return self._encode_one(text, within=True)

    def _encode_long(self, text: str) -> Encoded:
        if self._holds_added(text):
            return joined_ids([self._slowly(text)])
        slices = list(_slices(text))
        parts = [self._encode_short([slices[0]])[0]]
        parts += [self._encode_short([part], within=True)[0] for part in slices[1:]]
        return joined_ids([np.concatenate(parts)])

    def _encode_short(self, texts: Sequence[str], within: bool = False) -> Encoded:
        """`within` a longer text they do not begin it."""
        joined = self._normalized(texts, within)
        is_sound = joined.count(END) == len(texts) and CUT not in joined
        if not is_sound or self._holds_added(joined):
            return joined_ids([self._encode_one(text, within) for text in texts])
        # The memory of pieces serves one thread at a time, and does not pay for little text.
        is_much = LITTLE_CHARACTERS < len(joined) <= 2 * SLICE_CHARACTERS
        if self._find is not None and is_much and self._free.acquire(blocking=False):
            try:
                return self._pieces.encode(joined)
            finally:
                self._free.release()
        if self._is_gpt2:
            return self._encode_marked(joined)
        return joined_ids([self._encode_one(text, within) for text in texts])

    def _encode_one(self, text: str, within: bool) -> np.ndarray:
        if isinstance(self._parts, ByteBpe) and self._find is None:
            return self.by_expression(text)
        if within and isinstance(self._parts, SentenceWords):
            # In pieces of its own, since a text that begins here would begin with a blank.
            assert self._words is not None
            return self._words([without_surrogates(text).replace(" ", BLANK_SIGN)])[0]
        return self._slowly(text)

    def _holds_added(self, text: str) -> bool:
        if not self._added or (self._added_start and self._added_start not in text):
            return False
        return any(token in text for token in self._added)

    def _normalized(self, texts: Sequence[str], within: bool) -> str:
        parts = self._parts
        if isinstance(parts, ByteBpe):
            joined = without_surrogates(END.join([*texts, ""]))
            return composed(joined) if parts.composes else joined
        if parts.begins_with_blank == "always" and not within:
            texts = [f" {text}" if text else text for text in texts]
        elif parts.begins_with_blank == "unless it does" and not within:
            texts = [f" {text}" if text and text[0] != " " else text for text in texts]
        joined = without_surrogates(END.join([*texts, ""]))
        # A sign that stands for a blank is one to the library, and here it would not be.
        return joined if BLANK_SIGN not in joined else CUT

    @property
    def _is_gpt2(self) -> bool:
        return isinstance(self._parts, ByteBpe) and self._parts.rule is rules.GPT2

    @cached_property
    def _find(self) -> FindBegins | None:
        if isinstance(self._parts, SentenceWords):
            return _word_finder(self._parts)
        return None if self._parts.rule.begins is None else rules.finder(self._parts.rule, END)

    @cached_property
    def _pieces(self) -> PieceEncoder:
        assert self._find is not None
        return PieceEncoder(self._encode_pieces, self._find, END)

    def _encode_pieces(self, pieces: Sequence[str]) -> Encoded:
        if isinstance(self._parts, SentenceWords):
            assert self._words is not None
            return self._words([piece.replace(" ", BLANK_SIGN) for piece in pieces])
        return self._encode_marked(END.join([*pieces, ""]))

    def _encode_marked(self, joined: str) -> Encoded:
        """Texts of GPT-2's rule, or pieces of any, each followed by its mark."""
        assert isinstance(self._parts, ByteBpe)
        if self._is_gpt2:
            joined = _with_cuts(joined)
        ids = self._ranked.encode_to_numpy(joined, allowed_special=set(), disallowed_special=())
        if self._is_gpt2:
            ids = ids[ids != self._parts.ranks[CUT.encode()]]
        is_end = ids == self._parts.ranks[END.encode()]
        lengths = np.diff(np.flatnonzero(is_end), prepend=-1) - 1
        return ids[~is_end], lengths

    @cached_property
    def _ranked(self) -> tiktoken.Encoding:
        return self._encoding(_MARKED_SPLIT if self._is_gpt2 else _WHOLE_PIECES)

    @cached_property
    def _expression(self) -> tiktoken.Encoding:
        assert isinstance(self._parts, ByteBpe)
        (split,) = self._parts.rule.steps
        return self._encoding(split)

    def _encoding(self, split: str) -> tiktoken.Encoding:
        assert isinstance(self._parts, ByteBpe)
        return tiktoken.Encoding(
            "fourfold",
            pat_str=split,
            mergeable_ranks=self._parts.ranks,
            special_tokens=self._parts.specials | self._parts.added,
        )

    def by_expression(self, text: str) -> np.ndarray:
        """As `tiktoken` itself does it, with the rule's one regular expression."""
        assert isinstance(self._parts, ByteBpe)
        text = without_surrogates(text)
        text = composed(text) if self._parts.composes else text
        return self._expression.encode_to_numpy(text, allowed_special=set(), disallowed_special=())

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self._ranked.decode_bytes(list(ids))


def _word_finder(parts: SentenceWords) -> FindBegins:
    alone = np.zeros(256, bool)
    alone[[*parts.alone, ord(END)]] = True

    def find(content: np.ndarray, size: int, is_ascii: bool) -> np.ndarray:
        body = content[:size]
        space = body == 0x20
        begins = alone[body]
        begins[1:] |= begins[:-1].copy() | (space[1:] & ~space[:-1])
        begins[:1] = True
        return begins

    return find


def _common_start(texts: Sequence[str]) -> str:
    least, most = min(texts, default=""), max(texts, default="")
    same = next((at for at, (a, b) in enumerate(zip(least, most)) if a != b), len(least))
    return least[:same]


def joined_ids(encoded: Sequence[np.ndarray]) -> Encoded:
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    return np.concatenate([np.empty(0, np.uint32), *encoded]), lengths


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts together as long as a slice may be, a longer one alone."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > SLICE_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def _slices(text: str) -> Iterator[str]:
    """A text in slices that encode as they would within it, short where it has spaces."""
    start = 0
    while len(text) - start > SLICE_CHARACTERS:
        # No piece of any rule goes from a character that is no blank to a space after it.
        cut = _BEFORE_SPACE.search(text, start + SLICE_CHARACTERS)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _with_cuts(text: str) -> str:
    """`text` with a mark before the last blank of each run of blanks that other text follows."""
    codec, dtype = ("ascii", np.uint8) if text.isascii() else ("utf-32-le", np.uint32)
    characters = np.frombuffer(text.encode(codec), dtype)
    if dtype == np.uint8:
        blank = _BLANK[characters]
    else:
        blank = _BLANK[np.minimum(characters, len(_BLANK) - 1)]
    cuts = 1 + np.flatnonzero(blank[:-2] & blank[1:-1] & ~blank[2:])
    # The mark that ends a text must not look like text to the blanks before it.
    cuts = cuts[characters[cuts + 1] != ord(END)]
    return np.insert(characters, cuts, ord(CUT)).tobytes().decode(codec)


def without_surrogates(text: str) -> str:
    """Surrogate pairs joined, lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@cache
def _unassigned() -> np.ndarray:
    """Characters that this Python's version of Unicode does not know, and a later one may."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(0x110000)])


def composed(text: str) -> str:
    """NFC as `tokenizers` has it; Python's is much faster, and the same for what Python knows."""
    if text.isascii():
        return text
    characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    if int(characters.max()) < 0x300:  # nothing to compose, nothing composed otherwise
        return text
    if bool(_unassigned()[characters].any()):
        return str(normalizers.NFC().normalize_str(text))
    return unicodedata.normalize("NFC", text)
