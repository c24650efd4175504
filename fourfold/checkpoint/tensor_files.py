"""The safetensors files of a checkpoint: pieces of tensors to files, and back into pieces.

Files are named after the first part of the tensors' names, `model-00001-of-00002.safetensors`,
so that a reader of the model alone reads and hashes nothing else; one of many ranks adds its
number, `model-rank00003-00001-of-00002.safetensors`. Several are written at once, each tensor
hashed on its way to the disk: the safetensors library would write first and leave the file to be
read again, and torch's `HuggingFaceStorageWriter` holds two more copies of it in memory. Both read
these files as they are.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from fourfold.checkpoint.bounded import DTYPES, HASH, FileRecord, new_hasher
from fourfold.checkpoint.index import Part, StoredPiece, group_of
from fourfold.checkpoint.manifest import Manifest
from fourfold.checkpoint.rendezvous import silent
from fourfold.errors import CheckpointError
from fourfold.shards import Box, Shard

SHARD_BYTES = 2 << 30

# Of one rank. What they do leaves the interpreter lock free: hashing, writing, reading.
THREADS = 4
CHUNK_BYTES = 4 << 20
BEAT_SECONDS = 0.5

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


# --- several files at once --------------------------------------------------------------------

Beat = Callable[[], None]


Item = TypeVar("Item")
Result = TypeVar("Result")


class Abandoned(Exception):
    """Another thread failed, so this one need not finish."""


def in_threads(
    work: Callable[[Item, Beat], Result], items: Iterable[Item], beat: Beat
) -> list[Result]:
    """`work(item, progress)` of every item, on a few threads; the first error ends them all.

    The work calls `progress` every few megabytes, and this thread then beats. The threads do not
    keep the process alive.
    """
    waiting = list(enumerate(items))[::-1]
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    abandoned, moved = threading.Event(), threading.Event()

    def progress() -> None:
        if abandoned.is_set():
            raise Abandoned
        moved.set()

    def run() -> None:
        try:
            while True:
                try:
                    number, item = waiting.pop()
                except IndexError:
                    return
                progress()
                results[number] = work(item, progress)
        except Abandoned:
            return
        except BaseException as error:
            errors.append(error)
            abandoned.set()

    threads = [
        threading.Thread(target=run, name=f"checkpoint-{number}", daemon=True)
        for number in range(min(THREADS, len(waiting)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(BEAT_SECONDS)
                if moved.is_set():
                    moved.clear()
                    beat()
    except BaseException:
        abandoned.set()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(results))]


# --- writing ----------------------------------------------------------------------------------


def write_shards(
    directory: Path, pieces: Mapping[str, Shard], label: str = "", beat: Beat = silent
) -> Part:
    """Write every piece into `directory`, synced; returns what to record about it.

    `label` goes into the names of the files. A rank's empty share of a tensor is not written.
    """
    stored = {
        name: piece for name, piece in pieces.items() if piece.local.numel() or 0 in piece.shape
    }
    shards = shard_names({name: piece.local.nbytes for name, piece in stored.items()}, label)

    def write(file: str, progress: Beat) -> FileRecord:
        tensors = {name: stored[name].local for name in shards[file]}
        return write_shard(directory / file, tensors, progress)

    records = in_threads(write, shards, beat)
    placed = {name: file for file, names in shards.items() for name in names}
    return Part.of(
        dict(zip(shards, records, strict=True)),
        {
            name: StoredPiece(piece.shape, dtype_name(piece.local.dtype), piece.box, placed[name])
            for name, piece in stored.items()
        },
    )


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], beat: Beat = silent) -> FileRecord:
    """One safetensors file, hashed while it is written, and synced.

    Of tensors on a device one at a time is brought to the host.
    """
    # As the library does it: the widest types first, so that all of them are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    contents = itertools.chain([_header(ordered)], map(_bytes_of, ordered.values()))
    hasher, size = new_hasher(HASH), 0
    with path.open("wb") as stream:
        for content in contents:
            for start in range(0, len(content), CHUNK_BYTES):
                chunk = content[start : start + CHUNK_BYTES]
                hasher.update(chunk)
                stream.write(chunk)
                beat()
            size += len(content)
        stream.flush()
        os.fsync(stream.fileno())
    beat()
    return FileRecord(bytes=size, digest=hasher.hexdigest())


def _header(tensors: Mapping[str, torch.Tensor]) -> memoryview:
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
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
) -> list[str]:
    """What is wrong with these files: missing, of another size or, by `hashes`, content."""

    def problem(file: str, progress: Beat) -> str | None:
        path, expected = directory / file, manifest.files[file]
        hasher = new_hasher(manifest.hash)
        try:
            if not path.is_file():
                return f"{path} is missing"
            with path.open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != expected.bytes:
                    return f"{path} has {size} bytes and should have {expected.bytes}"
                if not hashes:
                    return None
                buffer = memoryview(bytearray(min(CHUNK_BYTES, size)))
                while count := stream.readinto(buffer):
                    hasher.update(buffer[:count])
                    progress()
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if hasher.hexdigest() != expected.digest:
            return f"{path} is corrupted: its {manifest.hash} digest is not the manifest's"
        return None

    return [found for found in in_threads(problem, files, beat) if found]


def open_shard(path: Path) -> Any:
    """`safe_open`, which checks the whole header, with its three kinds of error made one."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error


def header_problems(directory: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Where a safetensors header and the manifest's table disagree."""
    problems = []
    for file, held in manifest.contents(files).items():
        path = directory / file
        expected = {
            name: (list(box.shape), SAFETENSORS_NAMES[cut.torch_dtype()])
            for name, (cut, box) in held.items()
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


def read_shards(
    directory: Path, manifest: Manifest, wanted: Mapping[str, Shard], beat: Beat = silent
) -> None:
    """Fill every piece from (already verified) files, mapped rather than read whole."""
    for file, parts in parts_by_file(manifest, wanted).items():
        beat()
        with open_shard(directory / file) as shard, torch.no_grad():
            for name, stored, common in parts:
                piece = wanted[name]
                into = piece.local[common.within(piece.box)]
                into.copy_(shard.get_slice(name)[common.within(stored)])
                beat()
