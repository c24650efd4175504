"""Readers of token files: the Megatron pair, FleetX's two forms, and the search for datasets.

`open_datasets` turns directories, prefixes and file names into `TokenDataset`s. Everything in a
file but the ids is checked against the file's size and against itself before a token is read, by
rank 0 of a run.
"""

from __future__ import annotations

import glob
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fourfold import heartbeat, storage
from fourfold.data import cache
from fourfold.data.datasets import (
    FORMATS,
    MARKS,
    TokenDataset,
    blocks,
    document_starts,
    files_of,
    formats_at,
    passing_blocks,
    prefix_of,
    read_manifest,
)
from fourfold.data.npy import NpzFile, map_bytes, open_ids
from fourfold.errors import DataError

_FILES = [" + ".join(f"<name>{ending}" for ending in form.endings) for form in FORMATS.values()]
# Of a dataset at an address: what is copied whole, and what is not.
COPIED = (".idx", ".npz", ".json", "merges.txt", ".model", ".tiktoken")
READ_IN_BLOCKS = (".bin", "_ids.npy")
EXPECTED = f"expected {', '.join(_FILES[:-1])} or {_FILES[-1]}"


# -- finding datasets ------------------------------------------------------------------------


def open_datasets(input_dir: str | Path | Sequence[str | Path]) -> list[TokenDataset]:
    """Open every dataset of a directory (sorted, not recursive), a prefix, a file, or a list.

    A string with blanks that is not itself a path is split into a list of paths.
    """
    if isinstance(input_dir, str) and len(input_dir.split()) > 1 and not _exists(input_dir):
        input_dir = input_dir.split()
        if not any(_exists(piece) for piece in input_dir):
            raise DataError(
                f"{' '.join(input_dir)}: no such directory or dataset, nor are its pieces any; "
                f"{EXPECTED}. A mixture alternates weights and paths, as in '0.35 A 0.65 B'"
            )
    if isinstance(input_dir, (str, Path)):
        return _open_one(_located(input_dir))
    datasets = [dataset for path in input_dir for dataset in _open_one(_located(path))]
    if not datasets:
        raise DataError(f"no dataset was named; {EXPECTED}")
    return datasets


def prepared_name(output_prefix: Path) -> Path:
    """`x_text_document` for `x`, where that is the only dataset of such a name; else `x`.

    Megatron's preprocessing takes the first as output prefix and writes the second.
    """
    pattern = f"{glob.escape(output_prefix.name)}_*_document.idx"
    files = output_prefix.parent.glob(pattern) if output_prefix.name else ()
    found = {prefix_of(file) for file in files}
    return found.pop() if len(found) == 1 else output_prefix


def full_name(path: Path) -> Path:
    """`x` as `x_text_document` where only that exists."""
    if path.is_dir() or formats_at(prefix_of(path)) or read_manifest(path) is not None:
        return path
    return prepared_name(path)


def find_prefixes(path: Path) -> list[Path]:
    """The datasets a directory, prefix or file name stands for, complete or not.

    Unlike `open_datasets` this reads nothing but names and manifests, so that a dataset with a
    file missing is found too.
    """
    if path.is_dir():
        files = _files_in(path)
        found = {prefix_of(file) for file in files if file.name.endswith(MARKS)}
        # A manifest whose files are gone is a dataset too, one with everything missing.
        manifests = [file.with_suffix("") for file in files if file.suffix == ".json"]
        found |= {prefix for prefix in manifests if read_manifest(prefix) is not None}
        if not found:
            raise DataError(f"{path}: holds no dataset; {EXPECTED}")
        return sorted(found)
    prefix = prefix_of(path)
    if path.name.endswith(".json") and read_manifest(path.with_suffix("")) is not None:
        prefix = path.with_suffix("")
    if not formats_at(prefix) and read_manifest(prefix) is None:
        raise DataError(f"{storage.name_of(path)}: no such directory or dataset; {EXPECTED}")
    return [prefix]


def _located(where: str | Path) -> Path:
    """The path of what is named, with everything here that is not ids, if it is an address."""
    path = storage.local_path(where)
    address = storage.address_of(path)
    if address is not None:
        if storage.children(address):
            storage.refresh(path, _is_copied)
        else:
            prefix = prefix_of(path).name
            storage.refresh(path.parent, lambda name: name.startswith(prefix) and _is_copied(name))
    return path


def _is_copied(name: str) -> bool:
    """The index of a dataset, its manifest and its tokenizer; ids are read block by block."""
    return name.endswith(COPIED) and not name.endswith(READ_IN_BLOCKS)


def _exists(where: str) -> bool:
    if storage.is_address(where) and len(where.split()) > 1:
        return False
    path = _located(where)
    return path.is_dir() or bool(_formats_of(path) or _formats_of(prepared_name(path)))


def _open_one(path: Path) -> list[TokenDataset]:
    if path.is_dir():
        return _open_directory(path)
    forms = _formats_of(path)
    if not forms:
        path = prepared_name(path)
        forms = _formats_of(path)
    if not forms:
        raise DataError(f"{storage.name_of(path)}: no such directory or dataset; {EXPECTED}")
    prefix = prefix_of(path)
    if len(forms) > 1:
        raise DataError(
            f"{storage.name_of(prefix)}: exists in more than one format; name one of its files"
        )
    return [READERS[forms.pop()](prefix)]


def _formats_of(path: Path) -> set[str]:
    """The format a file name implies, or the formats for which a prefix has files."""
    for name, form in FORMATS.items():
        if path.name.endswith(form.endings) and storage.status(path) is not None:
            return {name}
    return {
        name
        for name, form in FORMATS.items()
        if any(storage.status(path.with_name(path.name + mark)) for mark in form.marks)
    }


def _open_directory(directory: Path) -> list[TokenDataset]:
    found: dict[Path, set[str]] = {}
    for file in _files_in(directory):
        if file.name.endswith(MARKS):
            found.setdefault(prefix_of(file), set()).update(_formats_of(file))
    if not found:
        raise DataError(f"{storage.name_of(directory)}: holds no dataset; {EXPECTED}")
    for prefix, forms in found.items():
        if len(forms) > 1:
            raise DataError(
                f"{storage.name_of(prefix)}: exists in more than one format, its documents "
                "would count twice; "
                "move one away or name a file instead of the directory"
            )
    return [READERS[form](prefix) for prefix, (form,) in sorted(found.items())]


def _files_in(directory: Path) -> list[Path]:
    try:
        names = {entry.name for entry in directory.iterdir()}
        if storage.address_of(directory) is not None:
            names |= {*storage.noted(directory)}
        return [directory / name for name in sorted(names) if not name.startswith(".")]
    except OSError as error:
        raise DataError(f"{directory}: cannot be listed ({error.strerror})") from error


# -- Megatron --------------------------------------------------------------------------------

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
    """Open `<prefix>.idx` and `<prefix>.bin`.

        offset     bytes   content of the .idx (MMIDIDX version 1), little-endian
        0          9       magic
        9          8       version, 1
        17         1       dtype code of the .bin
        18         8       S, the number of sequences
        26         8       D, the length of the document index
        34         4 S     tokens of each sequence, int32
        34+4S      8 S     byte offset of each sequence in the .bin, int64
        34+12S     8 D     first sequence of each document and, at the end, S, int64
        34+12S+8D  S       optional: a mode byte of each sequence, not used for text

    The `.bin` is the ids of all sequences one after the other.
    """
    bin_, idx = files_of(prefix, "megatron")
    _check_pair(idx, bin_)
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
    ids = open_ids(bin_, dtype)
    return TokenDataset(bin_, ids, sizes, pointers, start_unit=dtype.itemsize)


def _check_pair(first: Path, second: Path) -> None:
    for file, other in ((first, second), (second, first)):
        if storage.status(file) is None:
            raise DataError(f"{storage.name_of(file)}: missing; {other.name} needs it beside it")


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
    first = total = 0
    for pointer in passing_blocks(pointers):
        size = sizes[first : first + len(pointer)].astype(np.int64)
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
        first += len(pointer)
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
    for block in passing_blocks(document_index):
        if block[0] < previous or np.any(block[1:] < block[:-1]):
            raise DataError(f"{idx}: the document index decreases; the index is damaged")
        previous = int(block[-1])


def _check_bin_size(bin_: Path, total: int, sequences: int, dtype: np.dtype) -> None:
    known = storage.status(bin_)
    num_bytes = 0 if known is None else known.size
    if num_bytes == total * dtype.itemsize:
        return
    if num_bytes == (total + sequences) * dtype.itemsize:
        raise DataError(
            f"{bin_}: holds exactly one token per document more than its .idx counts, as written "
            "by versions of preprocess_data.py whose --append-eod forgot to count the end of "
            "document; every document would be read shifted, so prepare the data again"
        )
    raise DataError(
        f"{bin_}: {num_bytes} bytes, but the .idx counts {total} tokens of {dtype}, "
        f"{total * dtype.itemsize} bytes; the pair does not belong together or is truncated"
    )


# -- FleetX ----------------------------------------------------------------------------------


def open_fleetx(prefix: Path) -> TokenDataset:
    """Open `<prefix>_ids.npy` and `<prefix>_idx.npz`.

    The archive holds `lens`, the tokens of each sentence or document, and `docs`, the running
    count of entries of `lens` from 0 (the original reader ignores it, we check it).
    """
    ids_file, idx_file = files_of(prefix, "fleetx")
    _check_pair(ids_file, idx_file)
    ids = open_ids(ids_file)
    archive = NpzFile(idx_file)
    sizes = _checked_lens(archive.array("lens"), len(ids), idx_file)
    if "docs" in archive:
        _check_docs(archive.array("docs"), len(sizes), idx_file)
    return TokenDataset(ids_file, ids, sizes, document_starts(sizes))


def open_legacy(prefix: Path) -> TokenDataset:
    """Open `<prefix>_ids.npz`, the older form: `ids` and `lens` in one archive.

    Its `lens` may be uint16 and have wrapped around for documents beyond 65535 tokens.
    """
    (file,) = files_of(prefix, "legacy")
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


READERS: dict[str, Callable[[Path], TokenDataset]] = {
    "megatron": open_megatron,
    "fleetx": open_fleetx,
    "legacy": open_legacy,
}

# -- the document index ----------------------------------------------------------------------


def document_index(dataset: TokenDataset) -> np.ndarray | None:
    """First sequence of each document and, at the end, their number; None where each is one.

    This is what Megatron keeps after the pointers and FleetX as `docs`. It differs from 0, 1, 2,
    ... only for data split into sentences.
    """
    form = dataset.format
    index: np.ndarray | None = None
    if form == "megatron":
        file = dataset.path.with_suffix(".idx")
        content = map_bytes(file)
        _, _, _, sequences, entries = HEADER.unpack(content[: HEADER.size].tobytes())
        start = HEADER.size + 12 * sequences
        index = content[start : start + 8 * entries].view("<i8")
    elif form == "fleetx":
        archive = NpzFile(files_of(prefix_of(dataset.path), form)[1])
        index = archive.array("docs") if "docs" in archive else None
    if index is None or _counts_up(index, len(dataset)):
        return None
    return index


def _counts_up(index: np.ndarray, sequences: int) -> bool:
    # It runs from 0 to `sequences` without decreasing (the readers checked), so steps of one
    # throughout are the same as this many entries and no step of nought.
    return len(index) == sequences + 1 and bool(np.all(index[1:] > index[:-1]))


def empty_groups(index: np.ndarray | None) -> int:
    """Documents of a document index that have no sequence, as Megatron keeps empty ones."""
    return 0 if index is None else int(np.count_nonzero(index[1:] == index[:-1]))


def has_modes(dataset: TokenDataset) -> bool:
    """Whether a Megatron index carries a mode byte for each sequence (mixed text and images)."""
    if dataset.format != "megatron":
        return False
    file = dataset.path.with_suffix(".idx")
    with file.open("rb") as stream:
        _, _, _, sequences, entries = HEADER.unpack(stream.read(HEADER.size))
    return sequences > 0 and file.stat().st_size > HEADER.size + 12 * sequences + 8 * entries
