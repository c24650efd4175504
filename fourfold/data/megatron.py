"""The Megatron `.bin` / `.idx` pair (MMIDIDX version 1).

    offset     bytes   content, little-endian
    0          9       magic
    9          8       version, 1
    17         1       dtype code of the .bin
    18         8       S, the number of sequences
    26         8       D, the length of the document index
    34         4 S     tokens of each sequence, int32
    34+4S      8 S     byte offset of each sequence in the .bin, int64
    34+12S     8 D     first sequence of each document and, at the end, S, int64
    34+12S+8D  S       optional: a mode byte of each sequence, not used for text

The `.bin` is the ids of all sequences one after the other. Everything in the index is checked
against the file sizes and against itself before a token is read, by the first rank of a run.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from fourfold import heartbeat
from fourfold.data import cache
from fourfold.data.dataset import BLOCK, TokenDataset, blocks
from fourfold.data.npy import map_bytes
from fourfold.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FLOAT_CODES = {6: "float64", 7: "float32"}


def open_megatron(prefix: Path) -> TokenDataset:
    """Open `<prefix>.idx` and `<prefix>.bin`."""
    idx = prefix.with_name(prefix.name + ".idx")
    bin_ = prefix.with_name(prefix.name + ".bin")
    for file, other in ((idx, bin_), (bin_, idx)):
        if not file.is_file():
            raise DataError(f"{file}: missing; {other.name} needs it beside it")
    index = map_bytes(idx)
    dtype, sequences, documents = _read_header(index, idx)

    borders = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
    sizes = index[borders[0] : borders[1]].view("<i4")
    pointers = index[borders[1] : borders[2]].view("<i8")
    document_index = index[borders[2] : borders[3]].view("<i8")

    if cache.is_trusted() and sequences:
        total = int(pointers[-1]) // dtype.itemsize + int(sizes[-1])
    else:
        total = _check_sequences(sizes, pointers, dtype.itemsize, idx)
        _check_document_index(document_index, sequences, idx)
    _check_bin_size(bin_, total, sequences, dtype)
    ids = map_bytes(bin_).view(dtype)
    return TokenDataset(bin_, ids, sizes, pointers, start_unit=dtype.itemsize)


def _read_header(index: np.ndarray, idx: Path) -> tuple[np.dtype, int, int]:
    header = index[: HEADER.size].tobytes()
    if header.startswith(LEGACY_MAGIC):
        raise DataError(
            f"{idx}: the old TNTIDX format ('lazy' or 'cached') is not read; make it again with "
            "`fourfold data prepare`, or with Megatron's preprocess_data.py --dataset-impl mmap"
        )
    if not header.startswith(MAGIC):
        raise DataError(f"{idx}: not a Megatron index (it starts with {header[:9]!r})")
    if len(header) < HEADER.size:
        raise DataError(
            f"{idx}: {len(header)} bytes are shorter than the {HEADER.size} of a header"
        )
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{idx}: version {version} is unknown; only version 1 exists")
    if code not in DTYPES:
        known = FLOAT_CODES.get(code, "unknown")
        raise DataError(f"{idx}: dtype code {code} ({known}) is not an integer type")
    needed = HEADER.size + 12 * sequences + 8 * documents
    if len(index) not in (needed, needed + sequences):
        raise DataError(
            f"{idx}: {sequences} sequences and {documents} document entries need {needed} bytes, "
            f"the file has {len(index)}; it is truncated or damaged, copy or write it again"
        )
    return DTYPES[code], sequences, documents


def _check_sequences(sizes: np.ndarray, pointers: np.ndarray, itemsize: int, idx: Path) -> int:
    """Sizes are not negative and pointers follow from them; returns the number of tokens."""
    total = 0
    for first in range(0, len(sizes), BLOCK):
        size = sizes[first : first + BLOCK].astype(np.int64)
        pointer = pointers[first : first + BLOCK]
        if size.min() < 0:
            at = first + int(size.argmin())
            raise DataError(f"{idx}: size of sequence {at} is {sizes[at]}; the index is damaged")
        ends = np.cumsum(size) + total
        wrong = np.flatnonzero(pointer != (ends - size) * itemsize)
        if len(wrong):
            at = first + int(wrong[0])
            raise DataError(
                f"{idx}: pointer of sequence {at} is {pointers[at]}, the sizes before it give "
                f"{int(ends[wrong[0]] - size[wrong[0]]) * itemsize}; the index is damaged"
            )
        total = int(ends[-1])
        heartbeat.alive()
    return total


def _check_document_index(document_index: np.ndarray, sequences: int, idx: Path) -> None:
    if len(document_index) == 0:
        raise DataError(f"{idx}: the document index is empty; it must run from 0 to {sequences}")
    first, last = int(document_index[0]), int(document_index[-1])
    if first != 0 or last != sequences:
        raise DataError(
            f"{idx}: the document index runs from {first} to {last}, not from 0 to {sequences}"
        )
    previous = 0
    for block in blocks(document_index):
        if block[0] < previous or np.any(block[1:] < block[:-1]):
            raise DataError(f"{idx}: the document index decreases; the index is damaged")
        previous = int(block[-1])


def _check_bin_size(bin_: Path, total: int, sequences: int, dtype: np.dtype) -> None:
    held = bin_.stat().st_size
    if held == total * dtype.itemsize:
        return
    if held == (total + sequences) * dtype.itemsize:
        raise DataError(
            f"{bin_}: holds exactly one token per document more than its .idx counts, as written "
            "by versions of preprocess_data.py whose --append-eod forgot to count the end of "
            "document; every document would be read shifted, so prepare the data again"
        )
    raise DataError(
        f"{bin_}: {held} bytes, but the .idx counts {total} tokens of {dtype}, "
        f"{total * dtype.itemsize} bytes; the pair does not belong together or is truncated"
    )
