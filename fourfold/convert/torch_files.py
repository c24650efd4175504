"""Files of `torch.save`, read without `torch.load`: containers, and tensors as `LazyTensor`.

Two layouts: a zip archive with `data.pkl` and one uncompressed entry per storage (since torch
1.6), and before that five pickles and the storages one after the other. Both are mapped; a tensor
is copied out of the file when it is read.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.convert.arrays import NUMPY, Inert
from fourfold.convert.imported import LazyTensor
from fourfold.convert.pickles import Constructor, Globals, PickleMachine, Record, only
from fourfold.errors import CheckpointError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
ZIP_MAGIC = b"PK\x03\x04"
MAX_DIMENSIONS = 8

_STORAGE_TYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


class Namespace(Record):
    """`argparse.Namespace` as what it is, names and values."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}

    def set_state(self, state: Any) -> None:
        if isinstance(state, dict):
            self.values = state


class StorageType(Record):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@dataclass(eq=False)
class Storage(Record):
    """A run of numbers of one type; where its bytes are may become known after its tensors."""

    dtype: torch.dtype
    count: int
    data: memoryview | None = None


@dataclass
class Storages:
    """The storages of a file by key, made when a tensor first refers to them."""

    place: Callable[[str], memoryview] | None
    by_key: dict[str, Storage] = field(default_factory=dict)

    def find(self, reference: Any) -> Storage:
        word, kind, key, _, count, *views = reference
        if word != "storage" or not isinstance(kind, StorageType) or any(views):
            raise CheckpointError("it refers to something that is no storage of numbers")
        if not isinstance(key, str) or not isinstance(count, int) or count < 0:
            raise TypeError
        if key not in self.by_key:
            storage = Storage(kind.dtype, count)
            if self.place is not None:
                bind(storage, self.place(key))
            self.by_key[key] = storage
        return self.by_key[key]


def bind(storage: Storage, data: memoryview) -> None:
    if len(data) < storage.count * storage.dtype.itemsize:
        raise CheckpointError(
            f"a storage of {storage.count} numbers has only {len(data)} bytes; it is cut off"
        )
    storage.data = data


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> LazyTensor:
    """`torch._utils._rebuild_tensor_v2`, with everything checked that it takes on trust."""
    numbers = (offset, *size, *stride)
    if (
        not isinstance(storage, Storage)
        or len(size) != len(stride)
        or len(size) > MAX_DIMENSIONS
        or not all(isinstance(n, int) and 0 <= n < 2**48 for n in numbers)
    ):
        raise TypeError
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if math.prod(size) else 0
    # One number shown in many places would make a huge tensor of a small file.
    if offset + extent > storage.count or math.prod(size) > extent:
        raise CheckpointError("a tensor reaches beyond its storage")

    def read() -> Tensor:
        if extent == 0:
            return torch.empty(size, dtype=storage.dtype)
        assert storage.data is not None
        width = storage.dtype.itemsize
        copied = bytearray(storage.data[offset * width : (offset + extent) * width])
        return torch.frombuffer(copied, dtype=storage.dtype).as_strided(size, stride).contiguous()

    return LazyTensor(tuple(size), storage.dtype, read)


def _ordered(*pairs: Any) -> dict[Any, Any]:
    """`collections.OrderedDict`, of which all but the very oldest pickles make an empty one."""
    if pairs:
        raise TypeError
    return {}


_INERT = Constructor(Inert)

_KNOWN: dict[str, Any] = {
    **NUMPY,
    **{
        f"{module}.{name}Storage": StorageType(dtype)
        for name, dtype in _STORAGE_TYPES.items()
        for module in ("torch", "torch.cuda")
    },
    **{str(dtype): Inert() for dtype in _STORAGE_TYPES.values()},
    "torch._utils._rebuild_tensor_v2": Constructor(_tensor),
    "torch._utils._rebuild_tensor": Constructor(_tensor),
    "torch._utils._rebuild_parameter": Constructor(lambda data, *_: data),
    "torch.Size": Constructor(lambda sizes=(): sizes),
    "torch.device": _INERT,
    "collections.OrderedDict": Constructor(_ordered),
    "argparse.Namespace": Constructor(Namespace),
    "_io.BytesIO": _INERT,
    "pathlib.PosixPath": _INERT,
    "signal.Signals": _INERT,
}


def torch_names(name: str) -> Any:
    """The names a torch file may use. Megatron's own (its arguments hold enumerations of it) are
    placeholders: they are not imported and run no code."""
    return _INERT if name.startswith("megatron.") else only(_KNOWN)(name)


def read_torch_file(path: Path, names: Globals = torch_names) -> Any:
    """The object in a file of `torch.save`: dicts, lists, values, `Namespace` and `LazyTensor`."""
    return read_torch_bytes(map_file(path), path, names)


def read_torch_bytes(data: memoryview, path: Path, names: Globals = torch_names) -> Any:
    """The same for bytes that are, or are in, the file `path`."""
    if bytes(data[:4]) == ZIP_MAGIC:
        return _read_zip(path, data, names)
    return _read_legacy(path, data, names)


def map_file(path: Path) -> memoryview:
    """The bytes of a file, memory-mapped."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        with path.open("rb") as stream:
            return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise CheckpointError(f"{path} is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


# --- the zip layout ---------------------------------------------------------------------------


def _read_zip(path: Path, data: memoryview, names: Globals) -> Any:
    entries = _entries(path, data)
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{path} is a zip archive, but not one that torch.save wrote")
    root = pickles[0].removesuffix("data.pkl")

    def content(name: str) -> memoryview:
        if root + name not in entries:
            raise CheckpointError(f"its entry {name!r} is missing")
        return _content(data, entries[root + name])

    try:
        if root + "byteorder" in entries and bytes(content("byteorder")) != b"little":
            raise CheckpointError("its numbers are big-endian, which is not supported")
        program = content("data.pkl")
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None
    storages = Storages(lambda key: content(f"data/{key}"))
    return PickleMachine(program, path, names, storages.find).load()


class _Window(io.RawIOBase):
    """Bytes as a file to read, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self.at, len(self.data))[whence]
        if at < 0:
            raise ValueError(f"byte {at}")
        self.at = at
        return at

    def read(self, size: int = -1) -> bytes:
        stop = len(self.data) if size < 0 else self.at + size
        found = bytes(self.data[self.at : stop])
        self.at += len(found)
        return found


def _entries(path: Path, data: memoryview) -> dict[str, zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(_Window(data)) as archive:
            return {info.filename: info for info in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise CheckpointError(f"{path} is a damaged or cut off zip archive: {error}") from None


def _content(data: memoryview, info: zipfile.ZipInfo) -> memoryview:
    """The bytes of an entry, which torch never compresses."""
    start = info.header_offset
    header = bytes(data[start : start + 30]) if start >= 0 else b""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise CheckpointError(f"its entry {info.filename!r} is compressed")
    if len(header) < 30 or header[:4] != ZIP_MAGIC:
        raise CheckpointError(f"its entry {info.filename!r} is not where the archive says")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    start += 30 + name_length + extra_length
    if start + info.file_size > len(data):
        raise CheckpointError(f"its entry {info.filename!r} is cut off")
    return data[start : start + info.file_size]


# --- the layout before it ---------------------------------------------------------------------


def _read_legacy(path: Path, data: memoryview, names: Globals) -> Any:
    storages, position, found = Storages(place=None), 0, []
    for _ in range(5):
        machine = PickleMachine(data, path, names, storages.find, position)
        found.append(machine.load())
        position = machine.position
        if found[0] != LEGACY_MAGIC:
            raise CheckpointError(f"{path} is not a file of torch.save")
    _, protocol, system, content, keys = found
    if protocol != LEGACY_PROTOCOL or not isinstance(system, dict) or not isinstance(keys, list):
        raise CheckpointError(f"{path} is damaged: its header is not that of torch.save")
    if system.get("little_endian") is not True:
        raise CheckpointError(f"{path}: its numbers are big-endian, which is not supported")
    for key in keys:
        storage = storages.by_key.get(key) if isinstance(key, str) else None
        if storage is None or position + 8 > len(data):
            raise CheckpointError(f"{path} is damaged or cut off in its list of storages")
        (count,) = struct.unpack("<q", data[position : position + 8])
        end = position + 8 + count * storage.dtype.itemsize
        if count != storage.count or end > len(data):
            raise CheckpointError(f"{path} is cut off: storage {key} is not complete")
        bind(storage, data[position + 8 : end])
        position = end
    if any(storage.data is None for storage in storages.by_key.values()):
        raise CheckpointError(f"{path} is cut off: some of its storages are missing")
    return content
