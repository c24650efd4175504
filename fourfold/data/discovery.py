"""Which files form datasets: directories, prefixes and file names to open `TokenDataset`s."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path

from fourfold.data.dataset import TokenDataset, prefix_of
from fourfold.data.fleetx import open_fleetx, open_legacy
from fourfold.data.megatron import open_megatron
from fourfold.errors import DataError

# The endings that mark a dataset of each format. Index caches of all these systems end otherwise
# (`_doc_idx.npy`, `.dsc`, ...) or lie in subdirectories, so they are never taken for data.
MARKS: dict[str, Callable[[Path], TokenDataset]] = {
    ".idx": open_megatron,
    "_idx.npz": open_fleetx,
    "_ids.npy": open_fleetx,
    "_ids.npz": open_legacy,
}
EXPECTED = "expected <name>.bin + <name>.idx, <name>_ids.npy + <name>_idx.npz or <name>_ids.npz"


def open_datasets(
    input_dir: str | Path | Sequence[str | Path],
) -> list[TokenDataset]:
    """Open every dataset of a directory (sorted, not recursive), a prefix, a file, or a list.

    A string with blanks that names nothing by itself is a list of what its pieces name.
    """
    if isinstance(input_dir, str) and len(input_dir.split()) > 1 and not _exists(Path(input_dir)):
        input_dir = input_dir.split()
        if not any(_exists(Path(piece)) for piece in input_dir):
            raise DataError(
                f"{' '.join(input_dir)}: no such directory or dataset, nor are its pieces any; "
                f"{EXPECTED}. A mixture alternates weights and paths, as in '0.35 A 0.65 B'"
            )
    if isinstance(input_dir, (str, Path)):
        return _open_one(Path(input_dir))
    datasets = [dataset for path in input_dir for dataset in _open_one(Path(path))]
    if not datasets:
        raise DataError(f"no dataset was named; {EXPECTED}")
    return datasets


def prepared_name(output_prefix: Path) -> Path:
    """`x_text_document` for `x`, where that is the only dataset of such a name; else `x`.

    Megatron's way of preparing takes the one as output prefix and writes the other.
    """
    pattern = f"{glob.escape(output_prefix.name)}_*_document.idx"
    files = output_prefix.parent.glob(pattern) if output_prefix.name else ()
    found = {prefix_of(file) for file in files}
    return found.pop() if len(found) == 1 else output_prefix


def _exists(path: Path) -> bool:
    return path.is_dir() or bool(_readers_of(path) or _readers_of(prepared_name(path)))


def _open_one(path: Path) -> list[TokenDataset]:
    if path.is_dir():
        return _open_directory(path)
    readers = _readers_of(path)
    if not readers:
        path = prepared_name(path)
        readers = _readers_of(path)
    if not readers:
        raise DataError(f"{path}: no such directory or dataset; {EXPECTED}")
    prefix = prefix_of(path)
    if len(readers) > 1:
        raise DataError(f"{prefix}: exists in more than one format; name one of its files")
    return [readers.pop()(prefix)]


def _readers_of(path: Path) -> set[Callable[[Path], TokenDataset]]:
    """The reader a file name asks for, or the readers for which a prefix has files."""
    for mark, reader in [*MARKS.items(), (".bin", open_megatron)]:
        if path.name.endswith(mark) and path.is_file():
            return {reader}
    return {reader for mark, reader in MARKS.items() if path.with_name(path.name + mark).is_file()}


def _open_directory(directory: Path) -> list[TokenDataset]:
    found: dict[Path, set[Callable[[Path], TokenDataset]]] = {}
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise DataError(f"{directory}: cannot be listed ({error.strerror})") from error
    for name in names:
        if not name.startswith(".") and any(name.endswith(mark) for mark in MARKS):
            file = directory / name
            found.setdefault(prefix_of(file), set()).update(_readers_of(file))
    if not found:
        raise DataError(f"{directory}: holds no dataset; {EXPECTED}")
    for prefix, readers in found.items():
        if len(readers) > 1:
            raise DataError(
                f"{prefix}: exists in more than one format, its documents would count twice; "
                "move one away or name a file instead of the directory"
            )
    return [reader(prefix) for prefix, (reader,) in sorted(found.items())]
