"""Token datasets: documents of token ids in one flat, memory-mapped array, whatever the format.

    format     files of the dataset `x`
    megatron   x.bin, x.idx
    fleetx     x_ids.npy, x_idx.npz
    legacy     x_ids.npz

and in each case `x.json`, the manifest, if Fourfold wrote them. `FORMATS` is the one table of
these names; `fourfold.data.readers` has a reader for each format,
`fourfold.tools.prepare.writers` a writer.

A `TokenDataset` is what a reader returns after validating everything but the ids. The ids
themselves are checked by `check_ids`, which reads them all once if no manifest vouches for them.

A "document" here is what the originals index by: a sequence of the Megatron `.idx`, an entry of
the FleetX `lens`. With sentence splitting each sentence counts as one.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fourfold import heartbeat, storage
from fourfold.data import cache
from fourfold.data.npy import RemoteArray
from fourfold.errors import DataError

BLOCK = 1 << 22
WILL_NEED = getattr(mmap, "MADV_WILLNEED", None)  # absent on Windows
DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK_TOKENS = 8192
MAX_MANIFEST_BYTES = 64 << 20
KEEP_SECONDS = 10.0  # between two notes of how far a long reading has come


# -- names on disk ---------------------------------------------------------------------------


class TokenFormat(NamedTuple):
    """How a format names the files of a dataset.

    The first ending is that of the ids, the `path` of a `TokenDataset`. The `marks` are endings by
    which a directory is searched: a `.bin` alone may be anything. Index caches of all these systems
    end differently (`_doc_idx.npy`, `.dsc`, ...) or are in subdirectories, so they are never taken
    for data.
    """

    endings: tuple[str, ...]
    marks: tuple[str, ...]


FORMATS = {
    "megatron": TokenFormat((".bin", ".idx"), marks=(".idx",)),
    "fleetx": TokenFormat(("_ids.npy", "_idx.npz"), marks=("_ids.npy", "_idx.npz")),
    "legacy": TokenFormat(("_ids.npz",), marks=("_ids.npz",)),
}
MARKS = tuple(mark for form in FORMATS.values() for mark in form.marks)


def prefix_of(path: Path) -> Path:
    """The dataset's name without what its format appends: `x.bin`, `x_ids.npy` -> `x`."""
    for form in FORMATS.values():
        for ending in form.endings:
            if path.name.endswith(ending):
                return path.with_name(path.name.removesuffix(ending))
    return path


def files_of(prefix: Path, form: str) -> list[Path]:
    """The files of a dataset of that format, the ids first."""
    return [prefix.with_name(prefix.name + ending) for ending in FORMATS[form].endings]


def formats_at(prefix: Path) -> list[str]:
    """The formats of which at least one file exists under this name."""
    return [form for form in FORMATS if any(file.exists() for file in files_of(prefix, form))]


def manifest_file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """`<prefix>.json` if `fourfold data prepare` wrote it; raw text may have that name too."""
    file = manifest_file(prefix_of(path))
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and "fourfold" in content else None


def manifest_section(manifest: dict[str, Any] | None, key: str) -> dict[str, Any]:
    """An object inside a manifest; empty if there is none, because it may have been edited."""
    section = (manifest or {}).get(key)
    return section if isinstance(section, dict) else {}


# -- a dataset -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizerRecord:
    """What the manifest of a dataset says about the tokenizer that made its tokens."""

    identity: str
    vocab_size: int
    eos_id: int | None
    names: frozenset[str]  # its identity, and the one older versions knew it by


class TokenDataset:
    """Documents of token ids: `ids` is flat, document d is `sizes[d]` tokens from its start.

    `starts` are multiples of `start_unit` (a Megatron `.idx` counts bytes), so that the arrays of a
    file can be used in place.
    """

    def __init__(
        self,
        path: Path,
        ids: np.ndarray | RemoteArray,
        sizes: np.ndarray,
        starts: np.ndarray,
        start_unit: int = 1,
    ) -> None:
        assert len(sizes) == len(starts)
        self.path = path
        self._ids = ids
        self.sizes = sizes
        self._starts = starts
        self._start_unit = start_unit
        self.cache_dir: str | Path | None = None
        self._mapping = mapping_of(ids) if isinstance(ids, np.ndarray) else None

    def __repr__(self) -> str:
        return f"TokenDataset({self.path}: {len(self)} documents, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def dtype(self) -> np.dtype:
        return self._ids.dtype

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def is_remote(self) -> bool:
        """Whether its tokens are at an address, and fetched when they are read."""
        return isinstance(self._ids, RemoteArray)

    @property
    def ids(self) -> np.ndarray:
        """All tokens; a view where the file is here, read into memory where it is not."""
        return self.between(0, self.num_tokens)

    def between(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of `ids`, as a view where the file is here."""
        if isinstance(self._ids, RemoteArray):
            return self._ids.read(start, min(stop, self.num_tokens))
        return self._ids[start:stop]

    def blocks_from(self, start: int, stop: int | None = None) -> Iterator[np.ndarray]:
        """Tokens start..stop in blocks, for one reading."""
        stop = self.num_tokens if stop is None else min(stop, self.num_tokens)
        if isinstance(self._ids, RemoteArray):
            for begin in range(start, stop, BLOCK):
                yield self.between(begin, min(begin + BLOCK, stop))
        else:
            yield from passing_blocks(self._ids[start:stop])

    @property
    def file_status(self) -> storage.Object:
        """Size and time of the file of its ids."""
        known = storage.status(self.path)
        if known is None:
            raise DataError(f"{storage.name_of(self.path)}: is gone")
        return known

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A view of tokens start..stop of one document (to its end by default)."""
        size = int(self.sizes[document])
        stop = size if stop is None else stop
        assert 0 <= start <= stop <= size, (document, start, stop, size)
        first = int(self._starts[document]) // self._start_unit
        self._read_ahead(first + start, first + stop)
        return self.between(first + start, first + stop)

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin in `ids`, int64."""
        return np.asarray(self._starts[documents] // self._start_unit, np.int64)

    def count_tokens(self, first: int, last: int) -> int:
        """Tokens of the documents first..last-1, which follow each other."""
        if first >= last:
            return 0
        begin, end = (int(start) // self._start_unit for start in self._starts[[first, last - 1]])
        return end + int(self.sizes[last - 1]) - begin

    def _read_ahead(self, start: int, stop: int) -> None:
        """Have the kernel read exactly these tokens ahead (madvise).

        Left to page faults it reads megabytes around each place, which for samples spread over a
        file that is not in the page cache takes some fifty times as long.
        """
        if self._mapping is None or WILL_NEED is None or start == stop:
            return
        mapped, offset = self._mapping
        first_byte = offset + start * self.dtype.itemsize
        page = first_byte - first_byte % mmap.PAGESIZE
        with suppress(OSError):  # it is advice, and some file systems take none
            mapped.madvise(WILL_NEED, page, offset + stop * self.dtype.itemsize - page)

    @property
    def format(self) -> str:
        """The name of its format, a key of `FORMATS`."""
        return next(
            name for name, form in FORMATS.items() if self.path.name.endswith(form.endings[0])
        )

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """How the data was made, from `<prefix>.json`, or None without one."""
        return read_manifest(self.path)

    @cached_property
    def tokenizer_record(self) -> TokenizerRecord | None:
        """None without a manifest, or with one that does not name a tokenizer."""
        about = manifest_section(self.manifest, "tokenizer")
        identity, size, eos = about.get("identity"), about.get("vocab_size"), about.get("eos_id")
        if not isinstance(identity, str) or not isinstance(size, int):
            return None
        names = {name for name in (identity, about.get("older_identity")) if isinstance(name, str)}
        eos_id = eos if isinstance(eos, int) else None
        return TokenizerRecord(identity, size, eos_id, frozenset(names))

    @cached_property
    def is_as_written(self) -> bool:
        """Whether the files have the sizes, and hold the counts, that Fourfold recorded of them."""
        manifest = self.manifest or {}
        sizes, prefix = manifest.get("bytes"), prefix_of(self.path)
        if not isinstance(sizes, dict) or not isinstance(manifest.get("sha256"), dict):
            return False
        ending = self.path.name.removeprefix(prefix.name).removeprefix(".")
        counts = {
            "tokens": self.num_tokens,
            "documents": len(self),
            "dtype": self.dtype.name,
        }
        return sizes.get(ending) == self.file_status.size and all(
            manifest.get(key) == value for key, value in counts.items()
        )

    @property
    def places(self) -> list[Path]:
        """Where results about this dataset are kept."""
        return cache.places(self.path.parent, self.cache_dir)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, the same for the same documents in any format or place.

        It covers the token dtype, every document's length, and the tokens: all of them up to
        half a million, beyond that 64 evenly spaced blocks of 8192 including both ends. A
        change between the blocks that moves no document border goes unnoticed.
        """
        if cache.is_trusted():
            kept = cache.read_record(self.places, self._files_key) or {}
            if isinstance(kept.get("fingerprint"), str):
                return str(kept["fingerprint"])
        return self._hashed()

    def keep_fingerprint(self) -> None:
        """Keep it for the other ranks of this start, which then need not read every length."""
        record = {"fingerprint": self.fingerprint}
        cache.write_record(self.places, self._files_key, record)

    @property
    def _files_key(self) -> str:
        prefix = prefix_of(self.path)
        index = [file for form in FORMATS for file in files_of(prefix, form)[1:]]
        status = [storage.status(file) for file in [*index, self.path]]
        marks = [(each.size, each.changed_ns) for each in status if each is not None]
        return cache.key_of({"what": "fingerprint", "file": self.path.name, "status": marks})

    def _hashed(self) -> str:
        digest = hashlib.sha256(
            f"tokens v1 {self.dtype.newbyteorder('<').str} {len(self)} {self.num_tokens}".encode()
        )
        length_dtype = "<i4" if self.sizes.dtype.itemsize <= 4 else "<i8"
        for block in blocks(self.sizes):
            digest.update(np.ascontiguousarray(block, length_dtype).data)
            heartbeat.alive()
        little_endian = self.dtype.newbyteorder("<")
        for start in self._fingerprint_starts():
            stop = min(int(start) + FINGERPRINT_BLOCK_TOKENS, self.num_tokens)
            self._read_ahead(int(start), stop)
            digest.update(np.ascontiguousarray(self.between(start, stop), little_endian).data)
        return digest.hexdigest()

    def _fingerprint_starts(self) -> np.ndarray:
        last = max(self.num_tokens - FINGERPRINT_BLOCK_TOKENS, 0)
        if self.num_tokens <= FINGERPRINT_BLOCKS * FINGERPRINT_BLOCK_TOKENS:
            return np.arange(0, self.num_tokens, FINGERPRINT_BLOCK_TOKENS)
        return np.linspace(0, last, FINGERPRINT_BLOCKS).astype(np.int64)

    def max_id(self) -> int:
        """The largest token id, -1 without tokens. Reads every token."""
        return self._id_range()[1]

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError unless every id is in 0..vocab_size-1.

        The manifest is trusted for data that Fourfold wrote and whose files have the recorded
        sizes. Otherwise the first call reads every token. The result is kept in the cache directory
        under the content's fingerprint and the file's time stamp, and so is, now and then, how far
        the reading has come, so that an interrupted start resumes there.
        """
        # Ids that cannot be out of range need not be read.
        limits = np.iinfo(self.dtype)
        if cache.is_trusted() or (limits.min >= 0 and limits.max < vocab_size):
            return
        if (
            self.tokenizer_record is not None
            and self.tokenizer_record.vocab_size <= vocab_size
            and self.is_as_written
        ):
            return
        smallest, largest = self._cached_id_range()
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise DataError(
                f"{self.path}: token id {wrong} is outside the vocabulary of {vocab_size} "
                f"(ids 0 to {vocab_size - 1}); the data was made with another tokenizer: raise "
                f"Model.vocab_size to at least {largest + 1} or prepare the data again"
            )

    def _cached_id_range(self) -> tuple[int, int]:
        content = {"content": self.fingerprint, "time": self.file_status.changed_ns}
        key = cache.key_of({"what": "id range", **content})
        stored = _range_of(cache.read_record(self.places, key))
        if stored is not None:
            return stored
        key_so_far = cache.key_of({"what": "id range so far", **content})
        so_far = cache.read_record(self.places, key_so_far) or {}
        begin, known = so_far.get("tokens"), _range_of(so_far)
        if not isinstance(begin, int) or known is None or not 0 <= begin <= self.num_tokens:
            begin, known = 0, (0, -1)

        def keep(tokens: int, smallest: int, largest: int) -> None:
            note = {"tokens": tokens, "smallest": smallest, "largest": largest}
            cache.write_record(self.places, key_so_far, note)

        smallest, largest = self._id_range(begin, known, keep)
        cache.write_record(self.places, key, {"smallest": smallest, "largest": largest})
        return smallest, largest

    def _id_range(
        self,
        begin: int = 0,
        known: tuple[int, int] = (0, -1),
        keep: Callable[[int, int, int], None] = lambda *_: None,
    ) -> tuple[int, int]:
        """The smallest id or 0, and the largest, from token `begin` on and of those before."""
        smallest, largest = known
        kept = time.monotonic()
        for block in self.blocks_from(begin):
            smallest = min(smallest, int(block.min()))
            largest = max(largest, int(block.max()))
            begin += len(block)
            heartbeat.alive()
            if time.monotonic() - kept >= KEEP_SECONDS:
                keep(begin, smallest, largest)
                kept = time.monotonic()
        return smallest, largest


def _range_of(record: dict[str, Any] | None) -> tuple[int, int] | None:
    smallest, largest = (record or {}).get("smallest"), (record or {}).get("largest")
    return (smallest, largest) if isinstance(smallest, int) and isinstance(largest, int) else None


# -- large arrays ----------------------------------------------------------------------------


def blocks(array: np.ndarray) -> list[np.ndarray]:
    """Consecutive views small enough that an operation on one needs little memory."""
    return [array[start : start + BLOCK] for start in range(0, len(array), BLOCK)]


def passing_blocks(ids: np.ndarray) -> Iterator[np.ndarray]:
    """The blocks of a large array for one reading from start to end.

    A mapped block's pages are released when the next one is requested; otherwise they would count
    as this process's memory until all of the file did.
    """
    for block in blocks(ids):
        yield block
        mapping = mapping_of(block)
        if mapping is not None and DONT_NEED is not None and len(block):
            mapped, start = mapping
            page = start - start % mmap.PAGESIZE
            with suppress(OSError):  # it is advice, and some systems take none
                mapped.madvise(DONT_NEED, page, start + block.nbytes - page)


def mapping_of(array: np.ndarray) -> tuple[mmap.mmap, int] | None:
    """The memory map an array is a view of and the offset of its first byte, if it is one."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root.base, mmap.mmap):
        return None
    return root.base, array.__array_interface__["data"][0] - root.__array_interface__["data"][0]


def document_starts(sizes: np.ndarray) -> np.ndarray:
    """Where each document starts in the flat ids: the exclusive running sum of the sizes."""
    starts = np.empty(len(sizes), np.int64)
    starts[:1] = 0
    np.cumsum(sizes[:-1], out=starts[1:])
    return starts
