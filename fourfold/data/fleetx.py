"""FleetX token files, new and old.

<prefix>_ids.npy   all token ids, one-dimensional
<prefix>_idx.npz   `lens`: tokens of each sentence or document; `docs`: running count of
                   entries of `lens`, from 0 (the original reader ignores it, we check it)

<prefix>_ids.npz   the older form: `ids` and `lens` in one archive. Its `lens` may be uint16
                   and have wrapped around for documents beyond 65535 tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fourfold.data import cache
from fourfold.data.dataset import TokenDataset, blocks, document_starts
from fourfold.data.npy import NpzFile, map_npy
from fourfold.errors import DataError


def open_fleetx(prefix: Path) -> TokenDataset:
    """Open `<prefix>_ids.npy` and `<prefix>_idx.npz`."""
    ids_file = prefix.with_name(prefix.name + "_ids.npy")
    idx_file = prefix.with_name(prefix.name + "_idx.npz")
    for file, other in ((ids_file, idx_file), (idx_file, ids_file)):
        if not file.is_file():
            raise DataError(f"{file}: missing; {other.name} needs it beside it")
    ids = map_npy(ids_file)
    archive = NpzFile(idx_file)
    sizes = _checked_lens(archive.array("lens"), len(ids), idx_file)
    if "docs" in archive:
        _check_docs(archive.array("docs"), len(sizes), idx_file)
    return TokenDataset(ids_file, ids, sizes, document_starts(sizes))


def open_legacy(prefix: Path) -> TokenDataset:
    """Open `<prefix>_ids.npz`."""
    file = prefix.with_name(prefix.name + "_ids.npz")
    if not file.is_file():
        raise DataError(f"{file}: missing")
    archive = NpzFile(file)
    ids = archive.array("ids", check=not cache.is_trusted())
    sizes = _checked_lens(archive.array("lens"), len(ids), file)
    return TokenDataset(file, ids, sizes, document_starts(sizes))


def _checked_lens(lens: np.ndarray, num_ids: int, file: Path) -> np.ndarray:
    """`lens` as int32 (int64 if a document needs it), proven to add up to the ids."""
    total = 0
    for block in blocks(lens):
        smallest, largest = int(block.min()), int(block.max())
        if smallest < 0 or largest > num_ids:
            wrong = smallest if smallest < 0 else largest
            raise DataError(f"{file}: lens has the entry {wrong}, there are {num_ids} ids")
        # No entry exceeds num_ids here, so a block's sum fits in int64 long before a file could
        # hold that many ids.
        total += int(block.sum(dtype=np.int64))
    if total != num_ids:
        raise DataError(
            f"{file}: lens adds up to {total}, there are {num_ids} ids; "
            + _why(lens, num_ids - total)
        )
    return lens.astype(np.int32 if num_ids < 2**31 else np.int64, copy=False)


def _why(lens: np.ndarray, missing: int) -> str:
    if lens.dtype.itemsize == 2 and missing > 0 and missing % 65536 == 0:
        return (
            f"lens is 16 bits wide and wrapped around for documents longer than 65535 tokens "
            f"({missing // 65536} times); prepare the data again, the lengths are lost"
        )
    return "the two do not belong together or are damaged; prepare the data again"


def _check_docs(docs: np.ndarray, entries: int, file: Path) -> None:
    if len(docs) == 0 or int(docs[0]) != 0 or int(docs[-1]) != entries:
        ends = f"from {docs[0]} to {docs[-1]}" if len(docs) else "over nothing"
        raise DataError(f"{file}: docs runs {ends}, not from 0 to the {entries} entries of lens")
    previous = 0
    for block in blocks(docs):
        if int(block[0]) < previous or np.any(block[1:] < block[:-1]):
            raise DataError(f"{file}: docs decreases; the file is damaged")
        previous = int(block[-1])
