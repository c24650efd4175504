"""The unit of work of `prepare`: some chunks of text, tokenized into files of their own.

A finished part `name` is three files in the work directory:

    name.bin    token ids, as they will stand in the result
    name.len    tokens of each document (int32), 0 for an empty one
    name.json   counts, and what could not be read; written last, so it marks the part finished

Parts depend only on the input and the settings, so any process may make any part, in any order.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from fourfold.data.dataset import BLOCK
from fourfold.data.inputs import InputFile
from fourfold.data.pieces import Piece
from fourfold.data.text import DAMAGED_FILE, Bad, ChunkReader, TextRule
from fourfold.errors import DataError
from fourfold.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 18
PLACES_KEPT = 20
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class TokenRule:
    """How documents become tokens."""

    dtype: str
    append_eod: bool = True
    min_length: int = 0
    strip: bool = False  # blanks around a document, as FleetX does
    keep_empty: bool = True  # an entry for documents without a token, as Megatron does


@dataclass(frozen=True)
class Part:
    """Chunks that are read one after the other, as (number of the file, chunk)."""

    chunks: tuple[tuple[int, int], ...]
    chunk_bytes: int | None  # None: the files are read whole
    kind: str = "part"

    @classmethod
    def of_file(cls, number: int) -> Part:
        """A whole file that could be cut as well; named so that the two are not mixed up."""
        return cls(((number, 0),), None, "file")

    @property
    def name(self) -> str:
        return "{}-{:06d}-{:06d}".format(self.kind, *self.chunks[0])

    def is_in(self, reports: set[str]) -> bool:
        """Whether its report is among the names of finished ones."""
        return f"{self.name}.json" in reports


@dataclass
class ChunkReport:
    """What one chunk contained."""

    file: int
    num_lines: int
    ended: bool
    source_bytes: int  # of the file as it lies on disk, read so far
    bad: dict[str, int] = field(default_factory=dict)  # kind -> how many
    places: list[Bad] = field(default_factory=list)  # the first of them
    texts: int = 0  # that could be read


@dataclass
class PartReport:
    """What one part contained; `documents` have tokens, `empty` and `short` ones are left out."""

    documents: int = 0
    empty: int = 0
    short: int = 0
    tokens: int = 0
    text_bytes: int = 0
    chunks: list[ChunkReport] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        return sum(sum(chunk.bad.values()) for chunk in self.chunks)


class PartMaker:
    """Makes parts in a work directory; one per process."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[InputFile],
        text_rule: TextRule,
        token_rule: TokenRule,
        tokenizer: Tokenizer,
    ) -> None:
        self._directory = directory
        self._files = files
        self._reader = ChunkReader(text_rule)
        self._rule = token_rule
        self._tokenizer = tokenizer

    def make(self, part: Part) -> PartReport:
        try:
            return self._make(part)
        except OSError as error:
            raise DataError(
                f"{error.filename or self._directory}: {error.strerror or error}; make room, or "
                "whatever else it takes, and the same command goes on from here"
            ) from error

    def _make(self, part: Part) -> PartReport:
        report = PartReport()
        ids_file = _unfinished(self._directory, f"{part.name}.bin")
        lengths_file = _unfinished(self._directory, f"{part.name}.len")
        with ids_file.open("wb") as ids, lengths_file.open("wb") as lengths:
            tokens = TokenWriter(ids, lengths, self._tokenizer, self._rule, report)
            tokens.write(self._texts(part, report))
            for stream in (ids, lengths):
                stream.flush()
                os.fsync(stream.fileno())
        ids_file.replace(self._directory / f"{part.name}.bin")
        lengths_file.replace(self._directory / f"{part.name}.len")
        write_json(self._directory / f"{part.name}.json", asdict(report))
        return report

    def close(self) -> None:
        self._reader.close()

    def _texts(self, part: Part, report: PartReport) -> Iterator[str]:
        for number, chunk in part.chunks:
            kinds: Counter[str] = Counter()
            places: list[Bad] = []
            texts = 0
            documents = self._reader.documents(self._files[number], chunk, part.chunk_bytes)
            for document in documents:
                if isinstance(document, str):
                    texts += 1
                    yield document
                    continue
                kinds[document.kind] += 1
                if len(places) < PLACES_KEPT or document.kind == DAMAGED_FILE:
                    places.append(document)
            report.chunks.append(
                ChunkReport(
                    number,
                    self._reader.num_lines,
                    self._reader.ended,
                    self._reader.source_bytes,
                    dict(kinds),
                    places,
                    texts,
                )
            )


class TokenWriter:
    """Documents in, ids and lengths out; counts into a report."""

    def __init__(
        self,
        ids: IO[bytes],
        lengths: IO[bytes],
        tokenizer: Tokenizer,
        rule: TokenRule,
        report: PartReport,
    ) -> None:
        self._ids = ids
        self._lengths = lengths
        self._tokenizer = tokenizer
        self._rule = rule
        self._report = report

    def write(self, texts: Iterable[str]) -> None:
        batch: list[str] = []
        characters = 0
        for text in texts:
            if self._rule.strip:
                text = text.strip()
            if len(text) <= self._rule.min_length and self._rule.min_length > 0:
                self._report.short += 1
                continue
            batch.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_CHARACTERS // 16:
                self._write_batch(batch)
                batch, characters = [], 0
        if batch:
            self._write_batch(batch)

    def _write_batch(self, texts: list[str]) -> None:
        dtype = np.dtype(self._rule.dtype)
        ids, lengths = self._tokenizer.encode_joined(texts)
        # The dtype follows from the vocabulary, so an id beyond it is a fault of ours.
        assert len(ids) == 0 or int(ids.max()) <= np.iinfo(dtype).max
        filled = lengths > 0
        self._report.empty += int(np.count_nonzero(~filled))
        if self._rule.append_eod:
            ends = np.cumsum(lengths)[filled]
            ids = np.insert(ids, ends, self._tokenizer.eos_id)
            lengths = lengths + filled
        if not self._rule.keep_empty:
            lengths = lengths[filled]
        if len(lengths) and int(lengths.max()) > MOST_TOKENS:
            raise DataError(
                f"a document has {int(lengths.max())} tokens, and lengths are kept in 32 bits, up "
                f"to {MOST_TOKENS}; divide it, or lower --max-document-mb to leave it out"
            )
        self._ids.write(ids.astype(dtype).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self._report.documents += int(np.count_nonzero(filled))
        self._report.tokens += len(ids)
        self._report.text_bytes += sum(
            len(text) if text.isascii() else _utf8(text) for text in texts
        )


def _utf8(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


class FinishedPart(Piece):
    """A finished part as a piece of the dataset to be written; files are opened when read."""

    def __init__(self, stem: Path, report: PartReport, dtype: np.dtype) -> None:
        self._stem = stem
        self._report = report
        self._dtype = dtype
        self.num_tokens = report.tokens

    def __len__(self) -> int:
        return self._report.documents

    @property
    def num_groups(self) -> int:
        return self._stem.with_suffix(".len").stat().st_size // 4

    @property
    def borders(self) -> np.ndarray | None:  # type: ignore[override]
        """Megatron's document index: an empty document is a border without a sequence."""
        if self.num_groups == len(self):
            return None
        filled = self._all_lengths() > 0
        return np.concatenate(([0], np.cumsum(filled, dtype=np.int64)))

    def lengths(self) -> Iterator[np.ndarray]:
        lengths = self._all_lengths()
        if len(self):
            yield lengths[lengths > 0]

    def tokens(self) -> Iterator[np.ndarray]:
        with self._stem.with_suffix(".bin").open("rb") as file:
            while len(block := np.fromfile(file, self._dtype, BLOCK)):
                yield block

    def _all_lengths(self) -> np.ndarray:
        return np.fromfile(self._stem.with_suffix(".len"), "<i4")


def read_report(stem: Path, token_bytes: int) -> PartReport | None:
    """The report of a part if it is finished."""
    try:
        content: dict[str, Any] = json.loads(stem.with_suffix(".json").read_bytes())
        num_bytes = stem.with_suffix(".bin").stat().st_size
        num_entries = stem.with_suffix(".len").stat().st_size // 4
    except FileNotFoundError:
        return None
    # After a power cut the report may be there and what was written before it not.
    if num_bytes != content["tokens"] * token_bytes or num_entries < content["documents"]:
        return None
    chunks = [ChunkReport(**chunk) for chunk in content.pop("chunks")]
    for chunk in chunks:
        chunk.places = [Bad(*place) for place in chunk.places]
    return PartReport(**content, chunks=chunks)


def write_json(path: Path, content: object) -> None:
    unfinished = _unfinished(path.parent, path.name)
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _unfinished(directory: Path, name: str) -> Path:
    return directory / f".{name}.{os.getpid()}.tmp"
