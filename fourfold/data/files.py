"""What a dataset is on disk: its format, its files, its manifest's record of them.

    format     files of the dataset `x`
    megatron   x.bin, x.idx
    fleetx     x_ids.npy, x_idx.npz
    legacy     x_ids.npz

and in each case `x.json`, the manifest, if Fourfold wrote them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fourfold.data.dataset import TokenDataset, blocks, mapping_of, prefix_of, read_manifest
from fourfold.data.discovery import EXPECTED, MARKS, prepared_name
from fourfold.data.megatron import HEADER
from fourfold.data.npy import NpzFile, map_bytes
from fourfold.errors import DataError

# The first file of each holds the ids; it is the `path` of a `TokenDataset`.
ENDINGS = {
    "megatron": (".bin", ".idx"),
    "fleetx": ("_ids.npy", "_idx.npz"),
    "legacy": ("_ids.npz",),
}
FORMATS = tuple(ENDINGS)
DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)  # absent on Windows

# Called with the bytes done and the bytes to do, after every few megabytes.
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """The `Progress` of work nobody watches."""


def counting(progress: Progress, total: int) -> Callable[[int], None]:
    """`progress` for work that knows only how much it did since the last call."""
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return advance


class Record(NamedTuple):
    """What a manifest says of one file; None where it says nothing."""

    file: Path
    num_bytes: int | None
    sha256: str | None


def format_of(dataset: TokenDataset) -> str:
    return next(form for form in FORMATS if dataset.path.name.endswith(ENDINGS[form][0]))


def files_of(prefix: Path, form: str) -> list[Path]:
    return [prefix.with_name(prefix.name + ending) for ending in ENDINGS[form]]


def manifest_file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def formats_at(prefix: Path) -> list[str]:
    """The formats of which at least one file exists under this name."""
    return [form for form in FORMATS if any(file.exists() for file in files_of(prefix, form))]


def full_name(path: Path) -> Path:
    """`x` as `x_text_document` where only that exists."""
    if path.is_dir() or formats_at(prefix_of(path)) or read_manifest(path) is not None:
        return path
    return prepared_name(path)


def find_prefixes(path: Path) -> list[Path]:
    """The datasets a directory, prefix or file name stands for, whole or not.

    Unlike `open_datasets` this reads nothing but names and manifests, so that a dataset with a
    file missing is found too.
    """
    if path.is_dir():
        try:
            files = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise DataError(f"{path}: cannot be listed ({error.strerror})") from error
        found = {prefix_of(file) for file in files if file.name.endswith(tuple(MARKS))}
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
        raise DataError(f"{path}: no such directory or dataset; {EXPECTED}")
    return [prefix]


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


def records_of(manifest: dict[str, Any], prefix: Path) -> list[Record]:
    """What a manifest says of the files of the formats it mentions; nothing if damaged."""
    hashes, sizes = manifest.get("sha256"), manifest.get("bytes")
    hashes = hashes if isinstance(hashes, dict) else {}
    sizes = sizes if isinstance(sizes, dict) else {}
    records = []
    for form, endings in ENDINGS.items():
        keys = [ending.removeprefix(".") for ending in endings]
        if not hashes.keys().isdisjoint(keys):
            for key, file in zip(keys, files_of(prefix, form)):
                size, digest = sizes.get(key), hashes.get(key)
                records.append(
                    Record(
                        file,
                        size if isinstance(size, int) else None,
                        digest if isinstance(digest, str) else None,
                    )
                )
    return records


def document_index(dataset: TokenDataset) -> np.ndarray | None:
    """First sequence of each document and, at the end, their number; None where each is one.

    This is what Megatron keeps after the pointers and FleetX as `docs`. It differs from 0, 1, 2,
    ... only for data split into sentences.
    """
    form = format_of(dataset)
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


def has_modes(dataset: TokenDataset) -> bool:
    """Whether a Megatron index carries a mode byte for each sequence (mixed text and images)."""
    if format_of(dataset) != "megatron":
        return False
    file = dataset.path.with_suffix(".idx")
    with file.open("rb") as stream:
        _, _, _, sequences, entries = HEADER.unpack(stream.read(HEADER.size))
    return sequences > 0 and file.stat().st_size > HEADER.size + 12 * sequences + 8 * entries


def empty_groups(index: np.ndarray | None) -> int:
    """Documents of a document index that have no sequence, as Megatron keeps empty ones."""
    return 0 if index is None else int(np.count_nonzero(index[1:] == index[:-1]))


def passing_blocks(ids: np.ndarray) -> Iterator[np.ndarray]:
    """The blocks of a large array for one reading from start to end.

    A mapped block's pages are given back when the next one is asked for; they would otherwise
    count as this process's memory until all of the file does.
    """
    for block in blocks(ids):
        yield block
        mapping = mapping_of(block)
        if mapping is not None and DONT_NEED is not None and len(block):
            mapped, start = mapping
            page = start - start % mmap.PAGESIZE
            with suppress(OSError):  # it is advice, and some systems take none
                mapped.madvise(DONT_NEED, page, start + block.nbytes - page)


def _counts_up(index: np.ndarray, sequences: int) -> bool:
    # It runs from 0 to `sequences` without decreasing (the readers checked), so steps of one
    # throughout are the same as this many entries and no step of nought.
    return len(index) == sequences + 1 and bool(np.all(index[1:] > index[:-1]))
