"""One token file set, whatever its format: documents of token ids in one flat array.

A `TokenDataset` is what the format readers return after validating everything but the ids. The
ids themselves are checked by `check_ids`, which reads them all once.

A "document" here is what the originals index by: a sequence of the Megatron `.idx`, an entry of
the FleetX `lens`. With sentence splitting each sentence counts as one.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.data import cache
from fourfold.errors import DataError

BLOCK = 1 << 22
WILL_NEED = getattr(mmap, "MADV_WILLNEED", None)  # absent on Windows
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK_TOKENS = 8192
MAX_MANIFEST_BYTES = 64 << 20


class TokenDataset:
    """Documents of token ids: `ids` is flat, document d is `sizes[d]` tokens from its start.

    `starts` are multiples of `start_unit` (a Megatron `.idx` counts bytes), so that the arrays of
    a file can be used where they lie.
    """

    def __init__(
        self,
        path: Path,
        ids: np.ndarray,
        sizes: np.ndarray,
        starts: np.ndarray,
        start_unit: int = 1,
    ) -> None:
        assert len(sizes) == len(starts)
        self.path = path
        self.ids = ids
        self.sizes = sizes
        self._starts = starts
        self._start_unit = start_unit
        self._mapping = mapping_of(ids)

    def __repr__(self) -> str:
        return f"TokenDataset({self.path}: {len(self)} documents, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def dtype(self) -> np.dtype:
        return self.ids.dtype

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A view of tokens start..stop of one document (to its end by default)."""
        size = int(self.sizes[document])
        stop = size if stop is None else stop
        assert 0 <= start <= stop <= size, (document, start, stop, size)
        first = int(self._starts[document]) // self._start_unit
        self._ask_for(first + start, first + stop)
        return self.ids[first + start : first + stop]

    def _ask_for(self, start: int, stop: int) -> None:
        """Have the system read just these tokens, at once.

        Left to page faults it reads megabytes around each place, which for samples spread over a
        file that is not in memory takes some fifty times as long.
        """
        if self._mapping is None or WILL_NEED is None or start == stop:
            return
        mapped, offset = self._mapping
        first_byte = offset + start * self.dtype.itemsize
        page = first_byte - first_byte % mmap.PAGESIZE
        with suppress(OSError):  # it is advice, and some file systems take none
            mapped.madvise(WILL_NEED, page, offset + stop * self.dtype.itemsize - page)

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """How the data was made, from `<prefix>.json`, or None without one."""
        return read_manifest(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, the same for the same documents in any format or place.

        It covers the token dtype, every document's length, and the tokens: all of them up to
        half a million, beyond that 64 evenly spaced blocks of 8192 including both ends. A
        change between the blocks that moves no document border goes unnoticed.
        """
        digest = hashlib.sha256(
            f"tokens v1 {self.dtype.newbyteorder('<').str} {len(self)} {self.num_tokens}".encode()
        )
        length_dtype = "<i4" if self.sizes.dtype.itemsize <= 4 else "<i8"
        for block in blocks(self.sizes):
            digest.update(np.ascontiguousarray(block, length_dtype).data)
        little_endian = self.dtype.newbyteorder("<")
        for start in self._fingerprint_starts():
            stop = min(int(start) + FINGERPRINT_BLOCK_TOKENS, self.num_tokens)
            self._ask_for(int(start), stop)
            digest.update(np.ascontiguousarray(self.ids[start:stop], little_endian).data)
        return digest.hexdigest()

    def _fingerprint_starts(self) -> np.ndarray:
        last = max(self.num_tokens - FINGERPRINT_BLOCK_TOKENS, 0)
        if self.num_tokens <= FINGERPRINT_BLOCKS * FINGERPRINT_BLOCK_TOKENS:
            return np.arange(0, self.num_tokens, FINGERPRINT_BLOCK_TOKENS)
        return np.linspace(0, last, FINGERPRINT_BLOCKS).astype(np.int64)

    def max_id(self) -> int:
        """The largest token id, -1 without tokens. Reads every token."""
        return self._id_range[1]

    @cached_property
    def _id_range(self) -> tuple[int, int]:
        smallest, largest = 0, -1
        for block in blocks(self.ids):
            smallest = min(smallest, int(block.min()))
            largest = max(largest, int(block.max()))
        return smallest, largest

    def check_ids(self, vocab_size: int, cache_dir: str | Path | None = None) -> None:
        """Raise DataError unless every id is in 0..vocab_size-1.

        The first call reads every token; the result is kept in the cache directory under the
        content's fingerprint and the file's time stamp, so later runs open at once.
        """
        # Ids that cannot be out of range need not be read.
        limits = np.iinfo(self.dtype)
        if limits.min >= 0 and limits.max < vocab_size:
            return
        smallest, largest = self._cached_id_range(cache_dir)
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise DataError(
                f"{self.path}: token id {wrong} is outside the vocabulary of {vocab_size} "
                f"(ids 0 to {vocab_size - 1}); the data was made with another tokenizer: raise "
                f"Model.vocab_size to at least {largest + 1} or prepare the data again"
            )

    def _cached_id_range(self, cache_dir: str | Path | None) -> tuple[int, int]:
        modified = self.path.stat().st_mtime_ns
        key = cache.key_of({"what": "id range", "content": self.fingerprint, "time": modified})
        places = cache.places(self.path.parent, cache_dir)
        stored = cache.read_record(places, key)
        if stored is not None:
            smallest, largest = stored.get("smallest"), stored.get("largest")
            if isinstance(smallest, int) and isinstance(largest, int):
                return smallest, largest
        smallest, largest = self._id_range
        cache.write_record(places, key, {"smallest": smallest, "largest": largest})
        return smallest, largest


def blocks(array: np.ndarray) -> list[np.ndarray]:
    """Consecutive views small enough that an operation on one needs little memory."""
    return [array[start : start + BLOCK] for start in range(0, len(array), BLOCK)]


def prefix_of(path: Path) -> Path:
    """The dataset's name without what its format appends: `x.bin`, `x_ids.npy` -> `x`."""
    for ending in (".bin", ".idx", "_ids.npy", "_idx.npz", "_ids.npz"):
        if path.name.endswith(ending):
            return path.with_name(path.name.removesuffix(ending))
    return path


def read_manifest(path: Path) -> dict[str, Any] | None:
    """`<prefix>.json` if `fourfold data prepare` wrote it; raw text may bear that name too."""
    prefix = prefix_of(path)
    file = prefix.with_name(prefix.name + ".json")
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and "fourfold" in content else None


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
