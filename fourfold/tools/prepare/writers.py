"""Writers of token files: runs of documents, from other token files or made for the purpose.

`write_dataset` puts runs of documents one after the other into one dataset of any of the three
formats, without decoding or reordering anything. Files are streamed in blocks, so memory stays at a
few blocks whatever their size. They are written under hidden temporary names, synced and renamed
when all are complete, the manifest last: what has its final name is whole.
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
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from fourfold.atomic_files import sync_directory
from fourfold.data.datasets import (
    BLOCK,
    FORMATS,
    TokenDataset,
    blocks,
    files_of,
    formats_at,
    manifest_file,
    passing_blocks,
    read_manifest,
)
from fourfold.data.readers import DTYPES, HEADER, MAGIC, document_index
from fourfold.errors import DataError

MANIFEST_VERSION = 1
# Called with the bytes done and the bytes to do, after every few megabytes.
ByteProgress = Callable[[int, int], None]
Advance = Callable[[int], None]
CODES = {dtype: code for code, dtype in DTYPES.items()}


def silent(done: int, total: int) -> None:
    """The `ByteProgress` of work nobody watches."""


def counting(progress: ByteProgress, total: int) -> Callable[[int], None]:
    """`progress` for work that knows only how much it did since the last call."""
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return advance


class DocumentRun(ABC):
    """Consecutive documents of a dataset to be written.

    A document is a sequence of the Megatron index, an entry of FleetX's `lens`. `first` and
    `source` say where the run comes from, for messages.
    """

    num_tokens: int
    first: int = 0
    source: Path | str = "the data"

    # The document index of the run, counted from its start; None where it is 0, 1, 2, ...
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


class DocumentRange(DocumentRun):
    """The documents `first` to `stop` of a dataset.

    A document of several sentences that crosses an end of the range is cut there.
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


def write_dataset(
    prefix: Path,
    form: str,
    dtype: np.dtype,
    runs: Sequence[DocumentRun],
    description: dict[str, Any],
    progress: ByteProgress = silent,
) -> dict[str, Any]:
    """Write one dataset and its manifest: `description` followed by what was written."""
    with ExitStack() as stack:
        stack.enter_context(writable(prefix))
        prefix.parent.mkdir(parents=True, exist_ok=True)
        files = [stack.enter_context(UnfinishedFile(file)) for file in files_of(prefix, form)]
        total = sum(run.num_tokens for run in runs) * dtype.itemsize
        WRITERS[form](files, runs, dtype, counting(progress, total))
        endings = [ending.removeprefix(".") for ending in FORMATS[form].endings]
        manifest = description | {
            "format": form,
            "documents": sum(map(len, runs)),
            "tokens": sum(run.num_tokens for run in runs),
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
    """Reports a full disk, or a directory that cannot be written to, as the user's to fix."""
    try:
        yield
    except BrokenPipeError:
        raise  # from the display of the progress
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space there" if full else "fix that"
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
    sync_directory(files[0].path.parent)  # the names are safe only once that is done


class FormatWriter(Protocol):
    def __call__(
        self,
        files: Sequence[UnfinishedFile],
        runs: Sequence[DocumentRun],
        dtype: np.dtype,
        advance: Advance,
    ) -> None: ...


class ByteSink(Protocol):
    def write(self, data: memoryview, /) -> object: ...


def _write_megatron(
    files: Sequence[UnfinishedFile], runs: Sequence[DocumentRun], dtype: np.dtype, advance: Advance
) -> None:
    bin_, idx = files
    _write_tokens(bin_, runs, dtype, advance)
    sequences, entries = sum(map(len, runs)), _index_entries(runs)
    idx.write(HEADER.pack(MAGIC, 1, CODES[dtype], sequences, entries))
    _write_lengths(idx, runs, np.dtype("<i4"), "megatron")
    offset = 0
    for run in runs:
        for lengths in run.lengths():
            ends = offset + np.cumsum(lengths, dtype="<i8") * dtype.itemsize
            idx.write(np.concatenate(([offset], ends[:-1])).astype("<i8").data)
            offset = int(ends[-1])
    _write_document_index(idx, runs)


def _write_fleetx(
    files: Sequence[UnfinishedFile], runs: Sequence[DocumentRun], dtype: np.dtype, advance: Advance
) -> None:
    ids, idx = files
    ids.write(_npy_header(dtype, sum(run.num_tokens for run in runs)))
    _write_tokens(ids, runs, dtype, advance)
    with idx.archive() as archive:
        with _npy_member(archive, "lens", np.dtype("<i4"), sum(map(len, runs))) as lens:
            _write_lengths(lens, runs, np.dtype("<i4"), "fleetx")
        with _npy_member(archive, "docs", np.dtype("<i8"), _index_entries(runs)) as docs:
            _write_document_index(docs, runs)


def _write_legacy(
    files: Sequence[UnfinishedFile], runs: Sequence[DocumentRun], dtype: np.dtype, advance: Advance
) -> None:
    (file,) = files
    _check_lengths(runs, dtype, "legacy")
    with file.archive() as archive:
        num_tokens = sum(run.num_tokens for run in runs)
        with _npy_member(archive, "ids", dtype, num_tokens) as ids:
            _write_tokens(ids, runs, dtype, advance)
        with _npy_member(archive, "lens", dtype, sum(map(len, runs))) as lens:
            _write_lengths(lens, runs, dtype, "legacy")


WRITERS: dict[str, FormatWriter] = {
    "megatron": _write_megatron,
    "fleetx": _write_fleetx,
    "legacy": _write_legacy,
}


def _write_tokens(
    sink: ByteSink, runs: Sequence[DocumentRun], dtype: np.dtype, advance: Advance
) -> None:
    for run in runs:
        for block in run.tokens():
            if not np.can_cast(block.dtype, dtype) and int(block.max()) > np.iinfo(dtype).max:
                raise DataError(
                    f"{run.source}: token id {block.max()} does not fit in {dtype}; no "
                    "vocabulary is that large, so the file is damaged"
                )
            sink.write(np.ascontiguousarray(block, dtype).data)
            advance(len(block) * dtype.itemsize)


def _write_lengths(sink: ByteSink, runs: Sequence[DocumentRun], dtype: np.dtype, form: str) -> None:
    _check_lengths(runs, dtype, form)
    for run in runs:
        for lengths in run.lengths():
            sink.write(np.ascontiguousarray(lengths, dtype).data)


def _check_lengths(runs: Sequence[DocumentRun], dtype: np.dtype, form: str) -> None:
    most = np.iinfo(dtype).max
    for run in runs:
        first = run.first
        for lengths in run.lengths():
            longest = int(lengths.argmax())
            if lengths[longest] > most:
                instead = {"legacy": "fleetx or megatron"}.get(form, "shorter documents")
                raise DataError(
                    f"{run.source}: document {first + longest} has {lengths[longest]} "
                    f"tokens, but the {form} format keeps lengths as {dtype.name}, up to {most}; "
                    f"choose {instead}"
                )
            first += len(lengths)


def _index_entries(runs: Sequence[DocumentRun]) -> int:
    return 1 + sum(run.num_groups for run in runs)


def _write_document_index(sink: ByteSink, runs: Sequence[DocumentRun]) -> None:
    sink.write(np.zeros(1, "<i8").data)
    shift = 0
    for run in runs:
        borders, groups = run.borders, run.num_groups
        # Every run's index starts with its own 0, where the run before it ends.
        for start in range(1, groups + 1, BLOCK):
            stop = min(start + BLOCK, groups + 1)
            if borders is None:
                block = np.arange(start, stop, dtype="<i8")
            else:
                block = borders[start:stop].astype("<i8")
            sink.write((block + shift).data)
        shift += len(run)


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


# -- before and after writing ----------------------------------------------------------------


def check_output(prefix: Path, form: str, overwrite: bool) -> None:
    """Refuse a name under which something else would be replaced or mixed up."""
    if prefix.name == "" or prefix.is_dir():
        raise DataError(
            f"{prefix}: is a directory; give the output a name in it, like {prefix / 'data'}"
        )
    manifest = manifest_file(prefix)
    if manifest.exists() and read_manifest(prefix) is None:
        raise DataError(
            f"{manifest}: exists and is not a manifest of token files, but the manifest of "
            f"{prefix} would replace it; choose another prefix"
        )
    present = formats_at(prefix)
    for other in present:
        if other != form:
            raise DataError(
                f"{prefix}: exists in the {other} format, beside which the name would be "
                "ambiguous; choose another prefix or remove it"
            )
    if not overwrite and (present or manifest.exists()):
        raise DataError(f"{prefix}: exists already; choose another prefix or give --overwrite")


class RecordedFile(NamedTuple):
    """What a manifest says of one file; None where it says nothing."""

    file: Path
    num_bytes: int | None
    sha256: str | None


def records_of(manifest: dict[str, Any], prefix: Path) -> list[RecordedFile]:
    """What a manifest says of the files of the formats it mentions; nothing if damaged."""
    hashes, sizes = manifest.get("sha256"), manifest.get("bytes")
    hashes = hashes if isinstance(hashes, dict) else {}
    sizes = sizes if isinstance(sizes, dict) else {}
    records = []
    for form, names in FORMATS.items():
        keys = [ending.removeprefix(".") for ending in names.endings]
        if not hashes.keys().isdisjoint(keys):
            for key, file in zip(keys, files_of(prefix, form)):
                size, digest = sizes.get(key), hashes.get(key)
                records.append(
                    RecordedFile(
                        file,
                        size if isinstance(size, int) else None,
                        digest if isinstance(digest, str) else None,
                    )
                )
    return records
