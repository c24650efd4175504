"""SentencePiece's `.model` files, read into the form of `tokenizers`.

The file is a protocol buffer of pieces with scores, how they were trained, and how text is
normalized. It is read by the few lines below, with every length compared with what is there, and
becomes a tokenizer with the same ids: BPE with every pair of pieces that make a piece, in the order
of scores, or Unigram with its scores. What `tokenizers` cannot do in the same way is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as TokenizerFile

from fourfold.errors import DataError
from fourfold.tokenizer.facts import SpecialNames
from fourfold.tokenizer.fast import BLANK_SIGN, every_pair
from fourfold.tokenizer.ranks import begin_with

MOST_BYTES = 64 << 20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_KINDS = {3: "WORD", 4: "CHAR"}
_ROUNDS = 3
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


@dataclass
class SentenceModel:
    """What a `.model` file says; numbers it leaves out mean what is given here."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    kind: int = UNIGRAM
    blanks_are_suffixes: bool = False
    falls_back_to_bytes: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    characters_map: bytes = b""
    begins_with_blank: bool = True
    removes_blanks: bool = True
    escapes_blanks: bool = True

    def name_of(self, number: int) -> str | None:
        return self.pieces[number][0] if 0 <= number < len(self.pieces) else None


# -- the protocol buffer --------------------------------------------------------------------------


def looks_like_sentencepiece(start: bytes) -> bool:
    """Its first field is a piece, and that piece's first field is its text."""
    return len(start) > 3 and start[0] == 0x0A and start[2] == 0x0A


def read_model(path: Path) -> SentenceModel:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise DataError(
            f"{path}: {size} bytes, more than the {MOST_BYTES} of any tokenizer known; name the "
            "tokenizer's own file"
        )
    try:
        model = _parse(path.read_bytes())
    except (ValueError, struct.error) as error:
        raise DataError(
            f"{path}: not a readable SentencePiece model ({error}); the file is damaged or of "
            "another kind"
        ) from None
    if len({text for text, _, _ in model.pieces}) != len(model.pieces) or not model.pieces:
        raise DataError(f"{path}: no pieces, or one of them twice; the file is damaged")
    return model


def _parse(content: bytes) -> SentenceModel:
    model = SentenceModel()
    for number, value in _fields(content):
        if number == 1:
            model.pieces.append(_piece(_as_bytes(value)))
        elif number == 2:
            trained = dict(_fields(_as_bytes(value)))
            model.kind = _as_int(trained.get(3, UNIGRAM))
            model.blanks_are_suffixes = bool(trained.get(24, False))
            model.falls_back_to_bytes = bool(trained.get(35, False))
            model.unk_id, model.bos_id = _as_int(trained.get(40, 0)), _as_int(trained.get(41, 1))
            model.eos_id, model.pad_id = _as_int(trained.get(42, 2)), _as_int(trained.get(43, -1))
        elif number == 3:
            normalized = dict(_fields(_as_bytes(value)))
            model.characters_map = _as_bytes(normalized.get(2, b""))
            model.begins_with_blank = bool(normalized.get(3, True))
            model.removes_blanks = bool(normalized.get(4, True))
            model.escapes_blanks = bool(normalized.get(5, True))
    return model


def _piece(content: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(content))
    (score,) = struct.unpack("<f", _as_bytes(fields.get(2, bytes(4))))
    return _as_bytes(fields.get(1, b"")).decode(), score, _as_int(fields.get(3, NORMAL))


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers of fields with their values, in the order they stand there."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(content, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(content, at)
        elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if wire == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"byte {at}: a field of the unknown type {wire}")
        if size > len(content) - at:
            raise ValueError(f"byte {at}: a field of {size} bytes, and {len(content) - at} follow")
        yield number, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError("it ends within a number")
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"byte {at}: a number of more than ten bytes")


def _as_int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value - (1 << 64) if value >= 1 << 63 else value


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


# -- as a tokenizer.json --------------------------------------------------------------------------


def sentence_file(path: Path) -> tuple[TokenizerFile, SpecialNames]:
    """The tokenizer of a `.model` file in the form of `tokenizers`, and what its ids are for."""
    model = read_model(path)
    _refuse_what_differs(path, model)
    file = TokenizerFile(_bpe(path, model) if model.kind == BPE else _unigram(path, model))
    steps: list[Any] = []
    if model.removes_blanks:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.begins_with_blank:
        steps.append(normalizers.Prepend(BLANK_SIGN))
    steps.append(normalizers.Replace(" ", BLANK_SIGN))
    file.normalizer = normalizers.Sequence(steps)
    ends = [decoders.Strip(" ", 1, 0)] if model.begins_with_blank else []
    file.decoder = decoders.Sequence(
        [decoders.Replace(BLANK_SIGN, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    # After a symbol of the user the library would begin a new text, with a blank of its own; where
    # texts begin so, a symbol is a command, and in a document it is text.
    symbols_are_text = not model.begins_with_blank
    file.add_tokens(
        [
            AddedToken(
                text, special=not (kind == USER_DEFINED and symbols_are_text), normalized=False
            )
            for text, _, kind in model.pieces
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    names = SpecialNames(
        eos=model.name_of(model.eos_id),
        bos=model.name_of(model.bos_id),
        pad=model.name_of(model.pad_id),
        unk=model.name_of(model.unk_id),
        adds_bos=model.name_of(model.bos_id) is not None,
    )
    if names.bos is not None:
        file.post_processor = begin_with(names.bos, model.bos_id)
    # The library reads some numbers a little off; so that a saved copy says the same as this one.
    for _ in range(_ROUNDS):
        file = TokenizerFile.from_str(file.to_str())
    return file, names


def _refuse_what_differs(path: Path, model: SentenceModel) -> None:
    kinds = {kind for _, _, kind in model.pieces}
    wrong = None
    if model.kind not in (UNIGRAM, BPE):
        wrong = f"its model is of the kind {_KINDS.get(model.kind, model.kind)}"
    elif model.blanks_are_suffixes or not model.escapes_blanks:
        wrong = "its blanks belong to the word before them, or are not escaped"
    elif model.characters_map:
        wrong = "its text is first normalized by a map of characters, as NFKC does"
    elif UNUSED in kinds:
        wrong = "it has pieces that are marked as unused"
    elif model.falls_back_to_bytes and sum(kind == BYTE for _, _, kind in model.pieces) != 256:
        wrong = "it falls back to bytes and has not 256 of them"
    elif model.name_of(model.unk_id) is None:
        wrong = "it has no piece for what is unknown"
    if wrong is not None:
        raise DataError(
            f"{path}: {wrong}, for which the `tokenizers` library gives other ids; give the "
            "tokenizer.json of its model"
        )


def _bpe(path: Path, model: SentenceModel) -> models.BPE:
    """SentencePiece joins the two neighbours that make the piece of the highest score."""
    scores = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    several = [text for text in scores if len(text) > 1]
    runs = {text for text in several if not text.strip(BLANK_SIGN)}
    words = [text for text in several if text not in runs]
    lowest = min((scores[text] for text in words), default=0.0)
    is_ordered = len({scores[text] for text in several}) == len(several)
    runs_are_last = all(scores[text] < lowest for text in runs)
    if not is_ordered and (
        len({scores[text] for text in words}) != len(words) or not runs_are_last
    ):
        raise DataError(
            f"{path}: two pieces have the same score, so which is joined first is not said; give "
            "the tokenizer.json of its model"
        )
    characters = set("".join(several)) - set(scores)
    if characters:
        raise DataError(
            f"{path}: {min(characters)!r} is within pieces and not one itself; the file is damaged "
            "or of another kind"
        )
    # Of runs of blanks, all of one score, SentencePiece joins the leftmost two. That makes the
    # first run as long as it can be before another begins, as joining to the longest does.
    ordered = sorted(scores, key=lambda text: -scores[text])
    if not is_ordered:
        ordered = [text for text in ordered if text not in runs]
        ordered += sorted(runs, key=len, reverse=True)
    order = {text: place for place, text in enumerate(ordered)}
    return models.BPE(
        vocab={text: number for number, (text, _, _) in enumerate(model.pieces)},
        merges=list(every_pair(order)),
        unk_token=model.name_of(model.unk_id),
        fuse_unk=True,
        byte_fallback=model.falls_back_to_bytes,
    )


def _unigram(path: Path, model: SentenceModel) -> models.Unigram:
    vocab = [(text, score) for text, score, _ in model.pieces]
    return models.Unigram(vocab, model.unk_id, model.falls_back_to_bytes)
