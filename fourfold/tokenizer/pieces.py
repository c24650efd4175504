"""A memory of the pieces of texts, as vector operations on their bytes.

Byte-level BPE cuts a text into pieces (a word with the blank before it, a number, punctuation, a
run of blanks) and encodes each by itself, so a piece has the same ids wherever it stands. The
pieces of a whole batch are found at once (`rules`), and their ids are looked up in tables by their
bytes: exactly, since a piece of up to 32 bytes is compared as a number of one, two or four words.
Pieces that were never seen go to a library, all in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np

# Beyond this many pieces all are forgotten: some 30 MB.
MOST_PIECES = 1 << 17
# Of each table: words of 8 bytes that a key has, and the logarithm of its places.
_TABLES = ((1, 18), (2, 17), (4, 15))
_LONGEST_WORDS = 4
_PADDING = bytes(8 * (_LONGEST_WORDS + 2))
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F], np.uint64
)
_WORD_MASKS = np.array([(1 << 8 * length) - 1 for length in range(9)], np.uint64)

# Texts to the ids of all, one after the other, and how many each has.
EncodeTexts = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
# The bytes of texts with zeros after them, how many bytes they have, and whether all are ASCII; to
# whether a piece begins at each.
FindBegins = Callable[[np.ndarray, int, bool], np.ndarray]


class PieceEncoder:
    """Encodes texts joined by a mark, given an `encode` that is right and slower.

    The mark is one ASCII character that ends each text and is in none; no text holds a zero byte.
    """

    def __init__(self, encode: EncodeTexts, begins: FindBegins, mark: str) -> None:
        self._encode = encode
        self._begins = begins
        self._mark = ord(mark)
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[bytes, int] = {}  # of every piece known
        self._tables = [_PieceTable(width, bits) for width, bits in _TABLES]
        # By the number of a piece: its first id, how many it has, and where all of them are.
        self._first = np.empty(0, np.uint32)
        self._count = np.empty(0, np.intp)
        self._place = np.empty(0, np.intp)
        self._ids = np.empty(0, np.uint32)

    def encode(self, joined: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, and how many each has."""
        if len(self._numbers) > MOST_PIECES:
            self._forget()
        encoded = joined.encode()
        content = np.frombuffer(encoded + _PADDING, np.uint8)
        starts, lengths, before_end = self._split(content, len(encoded), joined.isascii())
        numbers = self._numbers_of(encoded, content, starts, lengths)
        counts = self._count[numbers]
        ends = np.cumsum(counts)
        ids = np.empty(int(ends[-1]) if len(ends) else 0, np.uint32)
        begins = ends - counts
        ids[begins] = self._first[numbers]
        several = np.flatnonzero(counts > 1)
        if len(several):
            counts = counts[several]
            within = _ranges(counts)
            places = np.repeat(self._place[numbers[several]], counts) + within
            ids[np.repeat(begins[several], counts) + within] = self._ids[places]
        upto = np.concatenate(([0], ends))[before_end]
        return ids, np.diff(upto, prepend=0)

    # -- pieces ------------------------------------------------------------------------------

    def _split(
        self, content: np.ndarray, size: int, is_ascii: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where each piece starts, how long it is, and how many lie before the end of each text."""
        starts = np.flatnonzero(self._begins(content, size, is_ascii))
        lengths = np.diff(starts, append=size)
        marks = starts.searchsorted(np.flatnonzero(content[:size] == self._mark))
        before_end = marks - np.arange(len(marks))
        return np.delete(starts, marks), np.delete(lengths, marks), before_end

    def _numbers_of(
        self, encoded: bytes, content: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        words = content[: len(content) // 8 * 8].view(np.uint64)
        numbers = np.full(len(starts), -1, np.intp)
        for table, inside in self._by_length(lengths):
            numbers[inside] = table.find(_keys(words, starts[inside], lengths[inside], table.width))
        missing = np.flatnonzero(numbers < 0)
        if not len(missing):
            return numbers
        starts, lengths = starts[missing], lengths[missing]
        spans = zip(starts.tolist(), (starts + lengths).tolist())
        pieces = [encoded[start:end] for start, end in spans]
        self._learn(pieces)
        found = np.array([self._numbers[piece] for piece in pieces])
        for table, inside in self._by_length(lengths):
            keys = _keys(words, starts[inside], lengths[inside], table.width)
            table.add(keys, found[inside])
        numbers[missing] = found
        return numbers

    def _by_length(self, lengths: np.ndarray) -> Iterator[tuple[_PieceTable, np.ndarray]]:
        """Each table, and which pieces belong to it; the longest belong to none."""
        shorter = 0
        for table in self._tables:
            yield table, np.flatnonzero((lengths > shorter) & (lengths <= 8 * table.width))
            shorter = 8 * table.width

    def _learn(self, pieces: list[bytes]) -> None:
        """Give a number and ids to the pieces that have none."""
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._numbers]
        if not new:
            return
        ids, lengths = self._encode([piece.decode() for piece in new])
        places = np.cumsum(lengths) - lengths
        self._first = np.concatenate((self._first, ids[places]))
        self._count = np.concatenate((self._count, lengths))
        self._place = np.concatenate((self._place, places + len(self._ids)))
        self._ids = np.concatenate((self._ids, ids))
        self._numbers.update(zip(new, count(len(self._numbers))))


def _ranges(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)


def _keys(
    words: np.ndarray, starts: np.ndarray, lengths: np.ndarray, width: int
) -> list[np.ndarray]:
    """The bytes of pieces as numbers, `width` words each, zeros after their end."""
    at = starts >> 3
    shift = ((starts & 7) << 3).astype(np.uint64)
    rest = np.uint64(64) - shift
    keys = []
    low = words[at]
    for word in range(width):
        high = words[at + (word + 1)]
        # What is shifted by as much as a word has bits is gone, as it should be.
        key = (low >> shift) | (high << rest)
        key &= _WORD_MASKS[np.clip(lengths - 8 * word, 0, 8)]
        keys.append(key)
        low = high
    return keys


class _PieceTable:
    """Numbers of pieces by their keys; a piece is in one of two places, or left out."""

    def __init__(self, width: int, bits: int) -> None:
        self.width = width
        self._bits = bits
        size = 1 << bits
        self._keys = [np.zeros(size, np.uint64) for _ in range(width)]  # no piece is all zeros
        self._numbers = np.full(size, -1, np.intp)

    def find(self, keys: list[np.ndarray]) -> np.ndarray:
        """The number of each piece, -1 for those that are not here."""
        hashed = self._hash(keys)
        numbers = self._at(self._first_place(hashed), keys)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            second = self._second_place(hashed[missing])
            numbers[missing] = self._at(second, [key[missing] for key in keys])
        return numbers

    def add(self, keys: list[np.ndarray], numbers: np.ndarray) -> None:
        """Into a free place; what finds none stays out."""
        hashed = self._hash(keys)
        left = np.arange(len(numbers))
        for place_of in (self._first_place, self._second_place):
            place = place_of(hashed[left])
            is_free = self._numbers[place] < 0
            free, place = left[is_free], place[is_free]
            self._numbers[place] = numbers[free]
            # Of several for one place, one is there now, and its key must be that one's.
            won = self._numbers[place] == numbers[free]
            for held, key in zip(self._keys, keys):
                held[place[won]] = key[free[won]]
            left = left[self._at(place_of(hashed[left]), [key[left] for key in keys]) < 0]

    def _at(self, place: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        same = self._keys[0][place] == keys[0]
        for held, key in zip(self._keys[1:], keys[1:]):
            same &= held[place] == key
        return np.where(same, self._numbers[place], -1)

    def _hash(self, keys: list[np.ndarray]) -> np.ndarray:
        hashed = keys[0] * _MULTIPLIERS[0]
        for key, multiplier in zip(keys[1:], _MULTIPLIERS[1:]):
            hashed ^= key * multiplier
        return hashed

    def _first_place(self, hashed: np.ndarray) -> np.ndarray:
        return (hashed >> np.uint64(64 - self._bits)).view(np.intp)

    def _second_place(self, hashed: np.ndarray) -> np.ndarray:
        shifted = hashed >> np.uint64(64 - 2 * self._bits)
        return (shifted & np.uint64((1 << self._bits) - 1)).view(np.intp)
