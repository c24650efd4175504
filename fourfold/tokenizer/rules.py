r"""Split rules: where byte-level BPE cuts a text into pieces, as vector operations on its bytes.

A tokenizer's own rule is a regular expression, or several applied one after the other. Those of
the families people train are known here in a second form: the kind of every character (letter,
number, blank, ...) and a function that says from the kinds of neighbours at which bytes a piece
begins. A library tries one alternative after the other at one character after the other; here all
pieces of a batch are found at once.

    GPT-2        a blank belongs to the word after it; runs of digits
    GPT-4        Llama 3, Qwen, OLMo 2: any one character before a word; digits by three, or one;
                 line ends belong to the punctuation before them
    DeepSeek     three expressions: digits by three, Chinese and Japanese, then the rest

Which characters are letters and numbers is asked of a library's own regular expressions, so that
the pieces are the library's whatever version of Unicode it knows. A rule without a vector form
(GPT-4o's, Mistral's) is left to the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tiktoken

from fourfold.tokenizer.pieces import FindBegins

# Kinds of characters, in an order that makes `kind >= BLANK` every blank.
(MARK, OTHER, LETTER, NUMBER, LOOSE, HAN, HAN_OTHER, HAN_LOOSE, BLANK, SPACE, NEWLINE) = range(11)
_UNKNOWN = 255
_PAGE = 256
_NUM_CHARACTERS = 0x110000
_SURROGATES = range(0xD800, 0xE000)
_QUOTE = ord("'")

# The characters `\s` stands for.
BLANKS = (
    *range(0x09, 0x0E),
    *(0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)),
    *(0x2028, 0x2029, 0x202F, 0x205F, 0x3000),
)
# What DeepSeek sets apart: Chinese characters, Hiragana, Katakana.
_HAN_RANGES = (range(0x4E00, 0x9FA6), range(0x3040, 0x3100))

# Bytes of UTF-8 with as many zeros after them as a reader may look ahead, the kind of the character
# each belongs to, and whether all are ASCII; to whether a piece begins at each.
Begins = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]


@dataclass(frozen=True)
class SplitRule:
    """A name; the regular expressions, each applied to what the one before it left; and both parts
    of the vector form, None where there is none."""

    name: str
    steps: tuple[str, ...]
    kinds: tuple[tuple[int, str], ...] = ()
    begins: Begins | None = None
    sets_han_apart: bool = False

    def __reduce__(self) -> tuple[Callable[[str], SplitRule], tuple[str]]:
        """Copied, or sent to another process, it is the one of its name."""
        return rule_named, (self.name,)


# -- the rules themselves -------------------------------------------------------------------------


def gpt2_begins(content: np.ndarray, kinds: np.ndarray, is_ascii: bool) -> np.ndarray:
    """GPT-2: one begins where the kind changes; but a space belongs to what follows it, a run of
    blanks before other text is cut before its last blank, and after a contraction like 're a piece
    begins whatever follows."""
    blank, mark = kinds >= BLANK, kinds == MARK
    begins = np.empty(len(kinds), bool)
    begins[:1] = True
    # A blank after another begins none, and neither does what follows a space.
    joins = blank[1:] & blank[:-1]
    joins |= (kinds[:-1] == SPACE) & ~blank[1:]
    begins[1:] = (kinds[1:] != kinds[:-1]) & ~joins | mark[1:]
    last_blank = blank[:-1] & ~(blank | mark)[1:]
    if not is_ascii and bool(np.any(blank & (content[: len(kinds)] >= 0x80))):
        begins[_first_bytes(content, np.flatnonzero(last_blank))] = True
    else:
        begins[:-1] |= last_blank
    quotes = np.flatnonzero(content[: len(kinds)] == _QUOTE)
    _cut_contractions(content, begins, quotes[begins[quotes]], any_case=False)
    return begins


def _gpt4_begins(
    content: np.ndarray, kinds: np.ndarray, is_ascii: bool, digits: int, end_is_one: bool
) -> np.ndarray:
    """GPT-4 and its heirs; `digits` of a number are in one piece, and with `end_is_one` all blanks
    at the end of a text are."""
    before = np.empty_like(kinds)
    before[:1], before[1:] = MARK, kinds[:-1]
    begins = (kinds != before) | (kinds == MARK)
    begins &= ~((kinds == OTHER) & (before == SPACE))
    begins &= ~((kinds == LETTER) & ((before == SPACE) | (before == BLANK)))
    ends_text = np.zeros(NEWLINE + 1, bool)
    ends_text[MARK] = True
    _cut_blanks(content, kinds, begins, ends_text, end_is_one)
    _cut_numbers(content, kinds, begins, digits, is_ascii)
    # One punctuation mark that begins a piece takes the word after it along.
    words = np.flatnonzero((kinds == LETTER) & (before == OTHER))
    signs = _first_bytes(content, words - 1)
    taken = begins[signs]
    begins[words[taken]] = False
    signs = signs[taken]
    _cut_contractions(content, begins, signs[content[signs] == _QUOTE], any_case=True)
    return begins


def _deepseek_begins(content: np.ndarray, kinds: np.ndarray, is_ascii: bool) -> np.ndarray:
    """DeepSeek: what its first two expressions set apart ends a text for the third."""
    before = np.empty_like(kinds)
    before[:1], before[1:] = MARK, kinds[:-1]
    letter = kinds == LETTER
    begins = (kinds != before) | (kinds == MARK)
    begins &= ~((kinds == OTHER) & (before == SPACE))
    begins &= ~(letter & ((before == SPACE) | (before == BLANK)))
    ends_text = np.zeros(NEWLINE + 1, bool)
    ends_text[[MARK, NUMBER, HAN, HAN_OTHER, HAN_LOOSE]] = True
    _cut_blanks(content, kinds, begins, ends_text, end_is_one=False)
    _cut_numbers(content, kinds, begins, 3, is_ascii)
    # What is neither letter, number, sign nor blank stays together, but the last before a word.
    for loose, word in ((LOOSE, LETTER), (HAN_LOOSE, HAN)):
        words = np.flatnonzero((kinds == word) & (before == loose))
        begins[words] = False
        begins[_first_bytes(content, words - 1)] = True
    # One ASCII sign that begins a piece takes the ASCII letters after it along, and no others.
    body = content[: len(kinds)]
    words = np.flatnonzero(letter & (body < 0x80) & (before == OTHER))
    words = words[(content[words - 1] < 0x80) & begins[words - 1]]
    begins[words] = False
    if not is_ascii and len(words):
        foreign = letter & (body >= 0x80)
        foreign[1:] &= letter[:-1] & (body[:-1] < 0x80)
        places = np.append(np.flatnonzero(foreign), len(kinds))
        ends = np.append(np.flatnonzero(~letter), len(kinds))
        first = places[places.searchsorted(words)]
        begins[first[first < ends[ends.searchsorted(words)]]] = True
    return begins


def _cut_blanks(
    content: np.ndarray,
    kinds: np.ndarray,
    begins: np.ndarray,
    ends_text: np.ndarray,
    end_is_one: bool,
) -> None:
    """A run of blanks is cut after its last line end, and before its last blank if text follows.

    Line ends right after punctuation belong to that. `ends_text` says which kinds after a run are
    as the end of the text.
    """
    blank = kinds >= BLANK
    begins[1:] &= ~(blank[1:] & blank[:-1])
    # Where each run of blanks ends; every text ends with a mark, so each run has an end.
    run_ends = 1 + np.flatnonzero(blank[:-1] & ~blank[1:])
    lines = np.flatnonzero(kinds == NEWLINE)
    if len(lines):
        gaps = np.diff(lines) != 1
        first = lines[np.concatenate(([True], gaps))]
        after = 1 + lines[np.concatenate((gaps, [True]))]
        is_tail = (first > 0) & (kinds[first - 1] == OTHER)
        begins[first[is_tail]] = False
        run_end = run_ends[run_ends.searchsorted(after)]
        next_line = np.append(first[1:], len(kinds))
        is_last = (next_line >= run_end) & (after < run_end)
        if end_is_one:
            is_last &= ~ends_text[kinds[run_end]]
        begins[after[is_last]] = True
        begins[after[is_tail]] = True
    cut = run_ends[~ends_text[kinds[run_ends]] & (kinds[run_ends - 1] != NEWLINE)]
    begins[_first_bytes(content, cut - 1)] = True


def _cut_numbers(
    content: np.ndarray, kinds: np.ndarray, begins: np.ndarray, digits: int, is_ascii: bool
) -> None:
    number = kinds == NUMBER
    if not is_ascii:
        number &= (content[: len(kinds)] & 0xC0) != 0x80
    places = np.flatnonzero(number)
    if not len(places):
        return
    order = np.arange(len(places))
    starts = np.maximum.accumulate(np.where(begins[places], order, 0))
    begins[places[(order - starts) % digits == 0]] = True


def _cut_contractions(
    content: np.ndarray, begins: np.ndarray, quotes: np.ndarray, any_case: bool
) -> None:
    """'s 't 're 've 'm 'll 'd are pieces, whatever follows."""
    first, second = content[quotes + 1], content[quotes + 2]
    long_s = np.zeros(len(quotes), bool)
    if any_case:
        long_s = (first == 0xC5) & (second == 0xBF)  # U+017F, an s to those who ignore case
        first, second = first | 0x20, second | 0x20
    of_one = _is_one_of(first, "sdmt")
    of_two = (first == ord("l")) & (second == ord("l"))
    of_two |= _is_one_of(first, "vr") & (second == ord("e"))
    for contracted, size in ((of_one, 2), (of_two | long_s, 3)):
        at = quotes[contracted]
        begins[at + 1] = False
        begins[at + size] = True


def _is_one_of(characters: np.ndarray, wanted: str) -> np.ndarray:
    return np.isin(characters, np.frombuffer(wanted.encode(), np.uint8))


def _first_bytes(content: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Where the characters begin that these bytes end."""
    for _ in range(3):
        inside = (content[at] & 0xC0) == 0x80
        if not inside.any():
            break
        at = at - inside
    return at


# -- the rules people use -------------------------------------------------------------------------

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS_NUMBERS = ((LETTER, r"\p{L}"), (NUMBER, r"\p{N}"))
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _gpt4_like(name: str, letter: str, other: str, digits: int) -> SplitRule:
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    split = (
        rf"{_APOSTROPHES}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{number}| ?[^\s{other}]+[\r\n]*{_LINES}"
    )
    kinds = ((LETTER, letter), (NUMBER, r"\p{N}"))
    begins = partial(_gpt4_begins, digits=digits, end_is_one=False)
    return SplitRule(name, (split,), kinds, begins)


def _gpt4o_like(name: str, contraction: str, number: str) -> SplitRule:
    lead = r"[^\r\n\p{L}\p{N}]?"
    word = f"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}"
    return SplitRule(name, (rf"{word}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_LINES}",))


GPT2 = SplitRule("gpt2", (GPT2_SPLIT,), _LETTERS_NUMBERS, gpt2_begins)
LLAMA3 = _gpt4_like("gpt4", r"\p{L}", r"\p{L}\p{N}", 3)
QWEN = _gpt4_like("qwen", r"\p{L}", r"\p{L}\p{N}", 1)
QWEN35 = _gpt4_like("qwen3.5", r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}", 1)
# As OpenAI's own library has it: blanks at the end of a text are one piece.
CL100K = SplitRule(
    "cl100k",
    (LLAMA3.steps[0].replace(_LINES, rf"|\s+\z{_LINES}"),),
    _LETTERS_NUMBERS,
    partial(_gpt4_begins, digits=3, end_is_one=True),
)
O200K = _gpt4o_like("gpt4o", f"{_APOSTROPHES}?", r"\p{N}{1,3}")
TEKKEN = _gpt4o_like("tekken", "", r"\p{N}")
DEEPSEEK = SplitRule(
    "deepseek",
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    ((LOOSE, r"[^\p{L}\p{M}\p{N}\p{P}\p{S}]"), (LETTER, r"[\p{L}\p{M}]"), (NUMBER, r"\p{N}")),
    _deepseek_begins,
    sets_han_apart=True,
)

RULES = {rule.name: rule for rule in (GPT2, LLAMA3, QWEN, QWEN35, CL100K, O200K, TEKKEN, DEEPSEEK)}
_OF_STEPS = {rule.steps: rule for rule in RULES.values()}


def rule_named(name: str) -> SplitRule:
    return RULES[name]


def rule_of(pre_tokenizer: dict[str, Any] | None) -> SplitRule | None:
    """The rule of a tokenizer.json's pre-tokenizer, if it is one of these and nothing more."""
    steps = [pre_tokenizer]
    if pre_tokenizer is not None and pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    splits: list[str] = []
    for step in steps[:-1]:
        if step is None or step["type"] != "Split" or "Regex" not in step["pattern"]:
            return None
        # Where every character is part of a match, removing all else removes nothing.
        keeps_all = (step["behavior"], step["invert"]) == ("Isolated", False)
        is_same = (step["behavior"], step["invert"]) == ("Removed", True) and len(steps) == 2
        if not (keeps_all or is_same):
            return None
        splits.append(step["pattern"]["Regex"])
    bytes_of = steps[-1] if steps else None
    if bytes_of is None or bytes_of["type"] != "ByteLevel" or bytes_of["add_prefix_space"]:
        return None
    if bytes_of.get("use_regex", True):
        splits.append(GPT2_SPLIT)
    return _OF_STEPS.get(tuple(splits))


# -- kinds of characters --------------------------------------------------------------------------


def finder(rule: SplitRule, mark: str) -> FindBegins:
    """Where pieces begin in texts that each end with `mark`."""
    kinds_of, begins_of = CharacterKinds(rule, mark), rule.begins
    assert begins_of is not None

    def find(content: np.ndarray, size: int, is_ascii: bool) -> np.ndarray:
        return begins_of(content, kinds_of.of(content[:size], is_ascii), is_ascii)

    return find


class CharacterKinds:
    """The kind of every character, learned from the library page by page."""

    def __init__(self, rule: SplitRule, mark: str) -> None:
        single_bytes = {bytes([byte]): byte for byte in range(256)}
        self._of_kind = {
            kind: tiktoken.Encoding(
                "kind", pat_str=expression, mergeable_ranks=single_bytes, special_tokens={}
            )
            for kind, expression in rule.kinds
        }
        self._sets_han_apart = rule.sets_han_apart
        self._kinds = np.full(_NUM_CHARACTERS, _UNKNOWN, np.uint8)
        self._learn(0)
        self._kinds[ord(mark)] = MARK
        self._of_byte = self._kinds[:_PAGE].tobytes()

    def of(self, content: np.ndarray, is_ascii: bool) -> np.ndarray:
        """The kind of the character each byte of UTF-8 belongs to."""
        kinds = np.frombuffer(bytearray(content.tobytes().translate(self._of_byte)), np.uint8)
        if is_ascii:
            return kinds
        first = np.flatnonzero(content >= 0xC0)
        lead = content[first]
        sizes = 2 + (lead >= 0xE0) + (lead >= 0xF0).astype(np.intp)
        codes = lead & (0x7F >> sizes)
        codes = codes.astype(np.intp)
        for byte in range(1, 4):
            longer = np.flatnonzero(sizes > byte)
            codes[longer] = codes[longer] << 6 | content[first[longer] + byte] & 0x3F
        found = self._kinds[codes]
        for page in np.unique(codes[found == _UNKNOWN] // _PAGE).tolist():
            self._learn(page)
        found = self._kinds[codes]
        for byte in range(4):
            longer = np.flatnonzero(sizes > byte)
            kinds[first[longer] + byte] = found[longer]
        return kinds

    def _learn(self, page: int) -> None:
        codes = range(page * _PAGE, (page + 1) * _PAGE)
        text = "".join(chr(code) for code in codes if code not in _SURROGATES)
        kinds = self._kinds[codes.start : codes.stop]
        kinds[:] = OTHER
        for kind, encoding in self._of_kind.items():
            found = bytes(encoding.encode_ordinary(text)).decode()
            self._kinds[[ord(character) for character in found]] = kind
        for span in _HAN_RANGES if self._sets_han_apart else ():
            inside = slice(max(span.start, codes.start), max(span.stop, codes.start))
            inside = slice(inside.start, min(inside.stop, codes.stop))
            apart = self._kinds[inside]
            for kind, han in ((LETTER, HAN), (OTHER, HAN_OTHER), (LOOSE, HAN_LOOSE)):
                apart[apart == kind] = han
        for code in BLANKS:
            if code in codes:
                self._kinds[code] = BLANK
        if page == 0:
            self._kinds[ord(" ")] = SPACE
            self._kinds[[ord("\r"), ord("\n")]] = NEWLINE
