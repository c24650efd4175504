"""The safetensors files of a checkpoint: pieces of tensors to files, and back into pieces.

Files are named after the first part of the tensors' names, `model-00001-of-00002.safetensors`,
so that a reader of the model alone reads and hashes nothing else; one of many ranks adds its
number, `model-rank00003-00001-of-00002.safetensors`. Files are hashed on their way (streams.py):
the safetensors library would write first and leave the file to be read again, and torch's
`HuggingFaceStorageWriter` holds two more copies of it in memory. Both read these files as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fourfold import storage
from fourfold.checkpoint.bounded import DTYPES, FileRecord, new_hasher
from fourfold.checkpoint.index import Cut, Part, StoredPiece, group_of
from fourfold.checkpoint.manifest import Manifest
from fourfold.checkpoint.rendezvous import Beat, silent
from fourfold.checkpoint.streams import (
    Incoming,
    Outgoing,
    in_threads,
    read_hashed,
    write_hashed,
)
from fourfold.errors import CheckpointError
from fourfold.shards import Box, Shard

SHARD_BYTES = 2 << 30

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
assert set(SAFETENSORS_NAMES) == set(DTYPES.values())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_writable(pieces: Mapping[str, Shard]) -> None:
    """Raise for what a checkpoint cannot hold: a mistake of the caller, before any byte."""
    first_at: dict[tuple[torch.device, int], str] = {}
    for name, piece in pieces.items():
        tensor = piece.local
        if not name or name == "__metadata__" or not name.isprintable():
            raise ValueError(f"{name!r} cannot name a tensor in a checkpoint")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{name}: only plain tensors are saved, not {type(tensor).__name__}")
        if dtype_name(tensor.dtype) not in DTYPES or tensor.layout != torch.strided:
            raise TypeError(f"{name}: {tensor.dtype} {tensor.layout} cannot be saved")
        if not piece.box.fits_in(piece.shape):
            raise ValueError(f"{name}: {piece.box} is no piece of a tensor of {piece.shape}")
        if tensor.numel() > 0:
            place = (tensor.device, tensor.data_ptr())
            other = first_at.setdefault(place, name)
            if other != name:
                raise ValueError(f"{name} and {other} are the same memory; give tied tensors once")


# --- writing ----------------------------------------------------------------------------------


def write_shards(
    directory: Path,
    pieces: Mapping[str, Shard],
    label: str = "",
    beat: Beat = silent,
    sources: Mapping[str, Outgoing] | None = None,
) -> Part:
    """Write every piece into `directory`, synced; returns what to record about it.

    `label` goes into the names of the files. A rank's empty share of a tensor is not written.
    `sources` are where the bytes of the pieces come from, if not from the pieces.
    """
    given = sources_of(pieces) if sources is None else sources
    stored = {
        name: piece for name, piece in pieces.items() if piece.local.numel() or 0 in piece.shape
    }
    shards = shard_names({name: piece.local.nbytes for name, piece in stored.items()}, label)

    def write(file: str, progress: Beat) -> FileRecord:
        tensors = {name: stored[name].local for name in shards[file]}
        return _write_file(directory / file, tensors, given, progress)

    records = in_threads(write, shards, beat)
    placed = {name: file for file, names in shards.items() for name in names}
    return Part.of(
        dict(zip(shards, records, strict=True)),
        {
            name: StoredPiece(piece.shape, dtype_name(piece.local.dtype), piece.box, placed[name])
            for name, piece in stored.items()
        },
    )


def sources_of(pieces: Mapping[str, Shard]) -> dict[str, Outgoing]:
    return {name: Outgoing(piece.local) for name, piece in pieces.items()}


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], beat: Beat = silent) -> FileRecord:
    """One safetensors file, hashed while it is written, and synced."""
    sources = {name: Outgoing(tensor) for name, tensor in tensors.items()}
    return _write_file(path, tensors, sources, beat)


def _write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], sources: Mapping[str, Outgoing], beat: Beat
) -> FileRecord:
    # As the library does it: the widest types first, so that all of them are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    return write_hashed(path, _header(ordered), [sources[name] for name in ordered], beat)


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The beginning of a safetensors file that holds these one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        table[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shard_names(sizes: Mapping[str, int], label: str = "") -> dict[str, list[str]]:
    """File name -> the names of its tensors, in their given order, at most `SHARD_BYTES` each.

    `sizes` are the tensors' bytes; one larger than `SHARD_BYTES` has a file to itself.
    """
    parts: dict[str, list[list[str]]] = {}
    room: dict[str, int] = {}
    for name, nbytes in sizes.items():
        group = group_of(name)
        if group not in parts or nbytes > room[group]:
            parts.setdefault(group, []).append([])
            room[group] = SHARD_BYTES
        parts[group][-1].append(name)
        room[group] -= nbytes
    return {
        f"{group}-{label}{number:05d}-of-{len(lists):05d}.safetensors": names
        for group, lists in parts.items()
        for number, names in enumerate(lists, start=1)
    }


# --- checking ---------------------------------------------------------------------------------


def file_problems(
    directory: Path,
    manifest: Manifest,
    files: Iterable[str],
    hashes: bool = True,
    beat: Beat = silent,
    targets: Callable[[str], Iterable[Incoming]] = lambda file: (),
) -> list[str]:
    """What is wrong with these files: missing, of another size or, by `hashes`, content.

    What is read to be hashed also goes to `targets` of the file.
    """

    def problem(file: str, progress: Beat) -> str | None:
        path, expected = directory / file, manifest.files[file]
        hasher = new_hasher(manifest.hash)
        try:
            with suppress(storage.NotThereError):
                storage.fetch(path)
            if not path.is_file():
                return f"{storage.name_of(path)} is missing"
            with path.open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != expected.bytes:
                    return (
                        f"{storage.name_of(path)} has {size} bytes and should have {expected.bytes}"
                    )
                if not hashes:
                    return None
                read_hashed(stream.fileno(), hasher, targets(file), progress)
        except OSError as error:
            return f"{storage.name_of(path)} cannot be read: {error.strerror}"
        if hasher.hexdigest() != expected.digest:
            return (
                f"{storage.name_of(path)} is corrupted: its {manifest.hash} digest is not the "
                "manifest's"
            )
        return None

    return [found for found in in_threads(problem, files, beat) if found]


def open_shard(path: Path) -> Any:
    """`safe_open`, which checks the whole header, with its three kinds of error made one."""
    try:
        return safe_open(storage.fetch(path), framework="pt")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error


def header_problems(directory: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Where a safetensors header and the manifest's table disagree."""
    contents = manifest.contents(files)
    problems = [_header_problem(directory / file, held) for file, held in contents.items()]
    return [found for found in problems if found]


def _header_problem(path: Path, held: Mapping[str, tuple[Cut, Box]]) -> str | None:
    expected = {
        name: (list(box.shape), SAFETENSORS_NAMES[cut.torch_dtype()])
        for name, (cut, box) in held.items()
    }
    try:
        with open_shard(path) as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
            found = {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
    except CheckpointError as error:
        return str(error)
    wrong = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    return f"{path} does not hold what the manifest says: {wrong[0]!r} differs" if wrong else None


# --- reading ----------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """What one stored piece has of one wanted piece."""

    name: str
    stored: Box
    common: Box


def parts_by_file(manifest: Manifest, wanted: Mapping[str, Shard]) -> dict[str, list[Overlap]]:
    """Which files hold something of the pieces wanted, and what."""
    parts: dict[str, list[Overlap]] = {}
    for name, piece in wanted.items():
        for stored, file in manifest.tensors[name].overlapping(piece.box):
            common = stored.overlap(piece.box)
            assert common is not None
            parts.setdefault(file, []).append(Overlap(name, stored, common))
    return parts


class Filling:
    """Pieces that are filled from the files of a checkpoint.

    What a file is hashed for goes straight to its piece where that is possible: where the stored
    piece is wanted as it is, and lies in one stretch of memory here. The rest is copied from the
    mapped files afterwards.
    """

    def __init__(self, directory: Path, manifest: Manifest, wanted: Mapping[str, Shard]) -> None:
        self.directory = directory
        self.wanted = wanted
        self.parts = parts_by_file(manifest, wanted)
        self.expected = manifest.contents(self.parts)
        self.filled: set[tuple[str, str]] = set()  # file and tensor

    def targets(self, file: str) -> list[Incoming]:
        """Where a file's bytes go while it is read; nowhere if its header is not as expected."""
        path = self.directory / file
        if _header_problem(path, self.expected.get(file, {})) is not None:
            return []
        places = _places(path)
        found = []
        for name, stored, common in self.parts.get(file, ()):
            piece = self.wanted[name]
            into = piece.local[common.within(piece.box)]
            if common == stored and into.is_cpu and into.is_contiguous():
                found.append(Incoming(places[name], into))
                self.filled.add((file, name))
        return found

    def fill_rest(self, beat: Beat = silent) -> None:
        """From files that are sound."""
        for file, parts in self.parts.items():
            left = [part for part in parts if (file, part.name) not in self.filled]
            beat()
            if left:
                self._copy(file, left, beat)

    def _copy(self, file: str, parts: list[Overlap], beat: Beat) -> None:
        with open_shard(self.directory / file) as shard, torch.no_grad():
            for name, stored, common in parts:
                piece = self.wanted[name]
                into = piece.local[common.within(piece.box)]
                into.copy_(shard.get_slice(name)[common.within(stored)])
                beat()


def _places(path: Path) -> dict[str, int]:
    """Where each tensor of a file, whose header is sound, begins."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        table = json.loads(stream.read(length))
    return {
        name: 8 + length + row["data_offsets"][0]
        for name, row in table.items()
        if name != "__metadata__"
    }


def read_shards(
    directory: Path, manifest: Manifest, wanted: Mapping[str, Shard], beat: Beat = silent
) -> None:
    """Fill every piece from (already verified) files, mapped rather than read whole."""
    Filling(directory, manifest, wanted).fill_rest(beat)
