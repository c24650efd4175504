"""Token files written from pieces: documents of other token files, or made for the purpose.

`write_pieces` puts pieces one after the other into one dataset of any of the three formats,
without decoding or reordering anything. Files are streamed in blocks, so memory stays at a few
blocks whatever their size. They are written under hidden temporary names, synced and renamed
when all are complete, the manifest last: what bears its final name is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from fourfold.data.dataset import BLOCK, TokenDataset, blocks
from fourfold.data.files import (
    ENDINGS,
    Progress,
    counting,
    document_index,
    files_of,
    manifest_file,
    passing_blocks,
    silent,
)
from fourfold.data.megatron import DTYPES, HEADER, MAGIC
from fourfold.errors import DataError

Advance = Callable[[int], None]
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Piece(ABC):
    """Consecutive documents of a dataset to be written.

    A document is a sequence of the Megatron index, an entry of FleetX's `lens`. `first` and
    `source` say where the piece comes from, for messages.
    """

    num_tokens: int
    first: int = 0
    source: Path | str = "the data"

    # The document index of the piece, counted from its start; None where it is 0, 1, 2, ...
    borders: np.ndarray | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def lengths(self) -> Iterator[np.ndarray]:
        """Tokens of each document, in blocks."""

    @abstractmethod
    def tokens(self) -> Iterator[np.ndarray]:
        """The ids of all documents, in blocks that know nothing of document borders."""

    @property
    def num_groups(self) -> int:
        """Documents in the sense of the document index, sentences taken together."""
        return len(self) if self.borders is None else len(self.borders) - 1


class DocumentRange(Piece):
    """The documents `first` to `stop` of a dataset.

    A document of several sentences that lies across an end of the range is cut there.
    """

    def __init__(self, dataset: TokenDataset, first: int, stop: int) -> None:
        assert 0 <= first <= stop <= len(dataset), (first, stop, len(dataset))
        self.dataset = dataset
        self.source = dataset.path
        self.first = first
        self.stop = stop
        self.borders = _borders(dataset, first, stop)
        before = int(dataset.sizes[:first].sum(dtype=np.int64))
        self.num_tokens = int(dataset.sizes[first:stop].sum(dtype=np.int64))
        self._token_range = slice(before, before + self.num_tokens)

    def __len__(self) -> int:
        return self.stop - self.first

    def lengths(self) -> Iterator[np.ndarray]:
        yield from blocks(self.dataset.sizes[self.first : self.stop])

    def tokens(self) -> Iterator[np.ndarray]:
        yield from passing_blocks(self.dataset.ids[self._token_range])


def _borders(dataset: TokenDataset, first: int, stop: int) -> np.ndarray | None:
    index = document_index(dataset)
    if index is None or (first, stop) == (0, len(dataset)):
        return index
    inside = index[(index > first) & (index < stop)]
    return np.concatenate(([first], inside, [stop])) - first


def common_dtype(dtypes: Sequence[np.dtype], form: str) -> np.dtype:
    """The smallest type that holds all of `dtypes` and that the format can store."""
    widest = np.result_type(*dtypes).newbyteorder("<")
    if widest.kind == "f" or (form == "megatron" and widest not in CODES):
        return np.dtype("<i8")
    return widest


def write_pieces(
    prefix: Path,
    form: str,
    dtype: np.dtype,
    pieces: Sequence[Piece],
    description: dict[str, Any],
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write one dataset and its manifest: `description` followed by what was written."""
    with ExitStack() as stack:
        stack.enter_context(writable(prefix))
        prefix.parent.mkdir(parents=True, exist_ok=True)
        files = [stack.enter_context(UnfinishedFile(file)) for file in files_of(prefix, form)]
        total = sum(piece.num_tokens for piece in pieces) * dtype.itemsize
        WRITERS[form](files, pieces, dtype, counting(progress, total))
        endings = [ending.removeprefix(".") for ending in ENDINGS[form]]
        manifest = description | {
            "format": form,
            "documents": sum(map(len, pieces)),
            "tokens": sum(piece.num_tokens for piece in pieces),
            "dtype": dtype.name,
            "bytes": {ending: file.num_bytes for ending, file in zip(endings, files)},
            "sha256": {ending: file.hexdigest() for ending, file in zip(endings, files)},
        }
        described = stack.enter_context(UnfinishedFile(manifest_file(prefix)))
        described.write(json.dumps(manifest, indent=2).encode() + b"\n")
        commit([*files, described])
    return manifest


@contextmanager
def writable(prefix: Path) -> Iterator[None]:
    """A full disk, a directory one may not write to: the user's to mend."""
    try:
        yield
    except BrokenPipeError:
        raise  # of whoever shows the progress
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room there" if full else "mend that"
        raise DataError(
            f"{prefix}: cannot be written ({error.strerror or error}); {remedy} or choose another "
            "prefix"
        ) from error


class UnfinishedFile:
    """A file under a temporary name, hashed as it is written; gone unless renamed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._hash: hashlib._Hash | None = hashlib.sha256()

    def __enter__(self) -> UnfinishedFile:
        self._file = self._unfinished.open("wb")
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        assert self._hash is not None
        self._file.write(data)
        self._hash.update(data)

    def archive(self) -> zipfile.ZipFile:
        """A zip archive as the content of the file, as `numpy.savez` would make it."""
        self._hash = None  # zip goes back to fill in lengths, so the hash is taken at the end
        return zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)

    @property
    def num_bytes(self) -> int:
        self._file.flush()
        return self._unfinished.stat().st_size

    def hexdigest(self) -> str:
        if self._hash is not None:
            return self._hash.hexdigest()
        self._file.flush()
        with self._unfinished.open("rb") as written:
            return hashlib.file_digest(written, "sha256").hexdigest()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def rename(self) -> None:
        self._unfinished.replace(self.path)


def commit(files: Sequence[UnfinishedFile]) -> None:
    """Give complete files their names; `files` runs from the ids to the manifest."""
    for file in files:
        file.sync()
    # Old files go first, the reader's entry points before what they point to: a crash in between
    # leaves a dataset that is missing, never one that mixes old and new.
    for file in reversed(files[1:]):
        file.path.unlink(missing_ok=True)
    for file in files:
        file.rename()
    if hasattr(os, "O_DIRECTORY"):  # the names are safe only once the directory is; not on Windows
        directory = os.open(files[0].path.parent, os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class Writer(Protocol):
    def __call__(
        self,
        files: Sequence[UnfinishedFile],
        pieces: Sequence[Piece],
        dtype: np.dtype,
        advance: Advance,
    ) -> None: ...


class Sink(Protocol):
    def write(self, data: memoryview, /) -> object: ...


def _write_megatron(
    files: Sequence[UnfinishedFile], pieces: Sequence[Piece], dtype: np.dtype, advance: Advance
) -> None:
    bin_, idx = files
    _write_tokens(bin_, pieces, dtype, advance)
    sequences, entries = sum(map(len, pieces)), _index_entries(pieces)
    idx.write(HEADER.pack(MAGIC, 1, CODES[dtype], sequences, entries))
    _write_lengths(idx, pieces, np.dtype("<i4"), "megatron")
    offset = 0
    for piece in pieces:
        for lengths in piece.lengths():
            ends = offset + np.cumsum(lengths, dtype="<i8") * dtype.itemsize
            idx.write(np.concatenate(([offset], ends[:-1])).astype("<i8").data)
            offset = int(ends[-1])
    _write_document_index(idx, pieces)


def _write_fleetx(
    files: Sequence[UnfinishedFile], pieces: Sequence[Piece], dtype: np.dtype, advance: Advance
) -> None:
    ids, idx = files
    ids.write(_npy_header(dtype, sum(piece.num_tokens for piece in pieces)))
    _write_tokens(ids, pieces, dtype, advance)
    with idx.archive() as archive:
        with _npy_member(archive, "lens", np.dtype("<i4"), sum(map(len, pieces))) as lens:
            _write_lengths(lens, pieces, np.dtype("<i4"), "fleetx")
        with _npy_member(archive, "docs", np.dtype("<i8"), _index_entries(pieces)) as docs:
            _write_document_index(docs, pieces)


def _write_legacy(
    files: Sequence[UnfinishedFile], pieces: Sequence[Piece], dtype: np.dtype, advance: Advance
) -> None:
    (file,) = files
    _check_lengths(pieces, dtype, "legacy")
    with file.archive() as archive:
        num_tokens = sum(piece.num_tokens for piece in pieces)
        with _npy_member(archive, "ids", dtype, num_tokens) as ids:
            _write_tokens(ids, pieces, dtype, advance)
        with _npy_member(archive, "lens", dtype, sum(map(len, pieces))) as lens:
            _write_lengths(lens, pieces, dtype, "legacy")


WRITERS: dict[str, Writer] = {
    "megatron": _write_megatron,
    "fleetx": _write_fleetx,
    "legacy": _write_legacy,
}


def _write_tokens(sink: Sink, pieces: Sequence[Piece], dtype: np.dtype, advance: Advance) -> None:
    for piece in pieces:
        for block in piece.tokens():
            if not np.can_cast(block.dtype, dtype) and int(block.max()) > np.iinfo(dtype).max:
                raise DataError(
                    f"{piece.source}: token id {block.max()} does not fit in {dtype}; no "
                    "vocabulary is that large, so the file is damaged"
                )
            sink.write(np.ascontiguousarray(block, dtype).data)
            advance(len(block) * dtype.itemsize)


def _write_lengths(sink: Sink, pieces: Sequence[Piece], dtype: np.dtype, form: str) -> None:
    _check_lengths(pieces, dtype, form)
    for piece in pieces:
        for lengths in piece.lengths():
            sink.write(np.ascontiguousarray(lengths, dtype).data)


def _check_lengths(pieces: Sequence[Piece], dtype: np.dtype, form: str) -> None:
    most = np.iinfo(dtype).max
    for piece in pieces:
        first = piece.first
        for lengths in piece.lengths():
            longest = int(lengths.argmax())
            if lengths[longest] > most:
                instead = {"legacy": "fleetx or megatron"}.get(form, "shorter documents")
                raise DataError(
                    f"{piece.source}: document {first + longest} has {lengths[longest]} "
                    f"tokens, but the {form} format keeps lengths as {dtype.name}, up to {most}; "
                    f"choose {instead}"
                )
            first += len(lengths)


def _index_entries(pieces: Sequence[Piece]) -> int:
    return 1 + sum(piece.num_groups for piece in pieces)


def _write_document_index(sink: Sink, pieces: Sequence[Piece]) -> None:
    sink.write(np.zeros(1, "<i8").data)
    shift = 0
    for piece in pieces:
        borders, groups = piece.borders, piece.num_groups
        # Every piece's index starts with its own 0, where the piece before it ends.
        for start in range(1, groups + 1, BLOCK):
            stop = min(start + BLOCK, groups + 1)
            if borders is None:
                block = np.arange(start, stop, dtype="<i8")
            else:
                block = borders[start:stop].astype("<i8")
            sink.write((block + shift).data)
        shift += len(piece)


def _npy_header(dtype: np.dtype, count: int) -> bytes:
    """What `numpy.save` puts before the values of a one-dimensional array."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    )
    return header.getvalue()


def _npy_member(archive: zipfile.ZipFile, name: str, dtype: np.dtype, count: int) -> IO[bytes]:
    member = archive.open(f"{name}.npy", "w", force_zip64=True)
    member.write(_npy_header(dtype, count))
    return member
