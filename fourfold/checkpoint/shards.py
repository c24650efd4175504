"""The safetensors files of a checkpoint: pieces of tensors to files, and back into pieces.

Files are named after the first part of the tensors' names, `model-00001-of-00002.safetensors`,
so that whoever wants only the model reads and hashes only the model; one of many ranks adds its
number, `model-rank00003-00001-of-00002.safetensors`. They are written by the
safetensors library itself, because torch's `HuggingFaceStorageWriter` holds two more copies of a
file in memory and is slower. Its reader, which cuts tensors for any layout, takes these files as
they are.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fourfold.checkpoint.manifest import (
    DTYPES,
    FileRecord,
    Manifest,
    PieceRecord,
    TensorRecord,
)
from fourfold.checkpoint.pieces import Box, Piece
from fourfold.errors import CheckpointError

# Also the most that is held twice while tensors on a device are brought to the host.
SHARD_BYTES = 2 << 30

HASH_THREADS = 4

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


def check_writable(pieces: Mapping[str, Piece]) -> None:
    """Raise for what a checkpoint cannot hold: a mistake of the caller, before any byte."""
    first_at: dict[tuple[torch.device, int], str] = {}
    for name, piece in pieces.items():
        tensor = piece.tensor
        if not name or name == "__metadata__" or not name.isprintable():
            raise ValueError(f"{name!r} cannot name a tensor in a checkpoint")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{name}: only plain tensors are saved, not {type(tensor).__name__}")
        if dtype_name(tensor.dtype) not in DTYPES or tensor.layout != torch.strided:
            raise TypeError(f"{name}: {tensor.dtype} {tensor.layout} cannot be saved")
        if not piece.box().fits_in(piece.shape):
            raise ValueError(f"{name}: {piece.box()} is no piece of a tensor of {piece.shape}")
        if tensor.numel() > 0:
            place = (tensor.device, tensor.data_ptr())
            other = first_at.setdefault(place, name)
            if other != name:
                raise ValueError(f"{name} and {other} are the same memory; give tied tensors once")


Tables = tuple[dict[str, FileRecord], dict[str, TensorRecord]]


def write_shards(directory: Path, pieces: Mapping[str, Piece], label: str = "") -> Tables:
    """Write every piece into `directory`, synced; return the manifest's two tables.

    `label` goes into the names of the files. A rank's empty share of a tensor is not written.
    """
    files: dict[str, FileRecord] = {}
    records: dict[str, TensorRecord] = {}
    stored = {
        name: piece for name, piece in pieces.items() if piece.tensor.numel() or 0 in piece.shape
    }
    sizes = {name: piece.tensor.nbytes for name, piece in stored.items()}
    for file, names in shard_names(sizes, label).items():
        on_host = {name: stored[name].tensor.detach().cpu().contiguous() for name in names}
        files[file] = write_shard(directory / file, on_host)
        for name in names:
            records[name] = record_of(stored[name], file)
    return files, records


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> FileRecord:
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors makes files private; they should be as readable as their directory.
    path.chmod(path.parent.stat().st_mode & 0o666)
    return synced_record(path)


def record_of(piece: Piece, file: str) -> TensorRecord:
    box = piece.box()
    return TensorRecord(
        shape=piece.shape,
        dtype=dtype_name(piece.tensor.dtype),
        pieces=(PieceRecord(file=file, offsets=box.offsets, shape=box.shape),),
    )


def shard_names(sizes: Mapping[str, int], label: str = "") -> dict[str, list[str]]:
    """File name -> the names of its tensors, in their given order, at most `SHARD_BYTES` each.

    `sizes` are the tensors' bytes; one larger than `SHARD_BYTES` has a file to itself.
    """
    parts: dict[str, list[list[str]]] = {}
    room: dict[str, int] = {}
    for name, nbytes in sizes.items():
        group = name.partition(".")[0] if re.match(r"[A-Za-z0-9_]{1,100}\.", name) else "tensors"
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


def synced_record(path: Path) -> FileRecord:
    """Push a written file to the disk and note its size and hash."""
    with path.open("rb", buffering=0) as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(bytes=os.fstat(stream.fileno()).st_size, sha256=digest)


def file_problems(directory: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """What is wrong with these files: missing, of another size, of another content."""

    def problem(file: str) -> str | None:
        path, expected = directory / file, manifest.files[file]
        try:
            if not path.is_file():
                return f"{path} is missing"
            with path.open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != expected.bytes:
                    return f"{path} has {size} bytes and should have {expected.bytes}"
                digest = hashlib.file_digest(stream, "sha256")
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if digest.hexdigest() != expected.sha256:
            return f"{path} is corrupted: its SHA-256 is not the manifest's"
        return None

    # Hashing runs outside the interpreter lock, one file per thread, a small buffer each.
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return [found for found in pool.map(problem, files) if found]


def open_shard(path: Path) -> Any:
    """`safe_open`, which checks the whole header, with its three kinds of error made one."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error


def header_problems(directory: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Where a safetensors header and the manifest's table disagree."""
    problems = []
    contents = manifest.contents()
    for file in files:
        path = directory / file
        expected = {
            name: (list(piece.shape), SAFETENSORS_NAMES[manifest.tensors[name].torch_dtype()])
            for name, piece in contents.get(file, {}).items()
        }
        try:
            with open_shard(path) as shard:
                slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
                found = {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
        except CheckpointError as error:
            problems.append(str(error))
            continue
        wrong = sorted(
            name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
        )
        if wrong:
            problems.append(f"{path} does not hold what the manifest says: {wrong[0]!r} differs")
    return problems


class Part(NamedTuple):
    """What one stored piece has of one wanted piece."""

    name: str
    stored: Box
    common: Box


def parts_by_file(manifest: Manifest, wanted: Mapping[str, Piece]) -> dict[str, list[Part]]:
    """Which files hold something of the pieces wanted, and what."""
    parts: dict[str, list[Part]] = {}
    for name, piece in wanted.items():
        for record in manifest.tensors[name].pieces:
            common = record.box().overlap(piece.box())
            if common is not None:
                parts.setdefault(record.file, []).append(Part(name, record.box(), common))
    return parts


def read_shards(directory: Path, manifest: Manifest, wanted: Mapping[str, Piece]) -> None:
    """Fill every piece from (already verified) files, mapped rather than read whole."""
    for file, parts in parts_by_file(manifest, wanted).items():
        with open_shard(directory / file) as shard, torch.no_grad():
            for name, stored, common in parts:
                piece = wanted[name]
                into = piece.tensor[common.within(piece.box())]
                into.copy_(shard.get_slice(name)[common.within(stored)])
