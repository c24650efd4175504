"""The manifest of a checkpoint: `manifest.json` and `index-GROUP.json`, and how they are read.

`manifest.json` is small whatever the number of ranks: step, serial, and size and digest of
`state.json` and of every index. Which checkpoints an output directory has, and what state one of
them holds, is known from it alone. An index (see `index`) says where the tensors of one group are,
`model` or `optim`; whoever wants the weights alone reads no other.

The digest of an index and the checksum of the manifest are of their raw bytes, so any changed byte
is noticed. All of it is untrusted input all the same: size, nesting, schema and that the pieces
make up each tensor exactly once are checked before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from fourfold.checkpoint.bounded import (
    HASH,
    Count,
    Digest,
    DtypeName,
    FileName,
    FileRecord,
    HashName,
    StrictRecord,
    check_size,
    digest_of,
    parse_record,
    read_bounded,
    write_synced,
)
from fourfold.checkpoint.index import Cut, Index, check_room, index_name
from fourfold.errors import CheckpointError
from fourfold.shards import Box

MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
VERSION: Final = 3

MAX_MANIFEST_BYTES = 16 << 20
MAX_STATE_BYTES = 16 << 20
# The model of 175 billion parameters cut over 1024 ranks takes less than 1 MB.
MAX_INDEX_BYTES = 128 << 20

LEGACY_HEAD_BYTES = 4096

_CHECKSUM = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n}\n\Z')


class MismatchError(CheckpointError):
    """A sound checkpoint, but of another model than the tensors given."""


class MovedError(CheckpointError):
    """The checkpoint was replaced or removed while it was read."""


# --- manifest.json ----------------------------------------------------------------------------


class GroupRecord(StrictRecord):
    """An index, and what the files it lists hold together."""

    bytes: Count
    digest: Digest
    files: Count
    tensors: Count
    content_bytes: Count


class Root(StrictRecord):
    """`manifest.json` itself."""

    format: Literal["fourfold-checkpoint"] = "fourfold-checkpoint"
    version: Literal[3] = VERSION
    step: Count
    # How many saves this output directory had seen. Orders checkpoints by when they were written,
    # which step numbers do not after a run has gone back to an earlier step.
    serial: Count
    hash: HashName = HASH
    state: FileRecord
    groups: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,100}$")], GroupRecord]
    checksum: str = ""

    def to_bytes(self) -> bytes:
        """JSON whose last line is the digest of all before it."""
        content = self.model_dump(mode="json", exclude={"checksum"})
        body = json.dumps(content, indent=1).encode()[: -len("\n}")]
        data = body + f',\n "checksum": "{digest_of(body, self.hash)}"\n}}\n'.encode()
        check_size(data, MAX_MANIFEST_BYTES, MANIFEST)
        return data


class _Version(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    format: Literal["fourfold-checkpoint"]
    version: int


def _parse_root(data: bytes, path: Path) -> Root:
    root = parse_record(Root, data, path)
    sealed = _CHECKSUM.search(data)
    if sealed is None or digest_of(data[: sealed.start()], root.hash) != root.checksum:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    return root


def _version_of(data: bytes, path: Path) -> int:
    version = parse_record(_Version, data, path).version
    if version not in (LEGACY_VERSION, VERSION):
        raise CheckpointError(
            f"{path} has checkpoint format version {version}; this Fourfold reads versions "
            f"{LEGACY_VERSION} and {VERSION}: use the Fourfold that wrote it, or a newer one"
        )
    return version


# --- the whole --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, or the part of it that was requested."""

    version: int
    step: int
    serial: int
    hash: HashName
    checksum: str
    # Everything beside the manifest, by name.
    files: dict[str, FileRecord]
    tensors: dict[str, Cut]

    def shards(self) -> list[str]:
        return [file for file in self.files if file.endswith(".safetensors")]

    def size(self) -> int:
        return sum(record.bytes for record in self.files.values())

    @cached_property
    def _names(self) -> dict[Cut, list[str]]:
        names: dict[Cut, list[str]] = {}
        for name, cut in self.tensors.items():
            names.setdefault(cut, []).append(name)
        return names

    def contents(self, files: Iterable[str]) -> dict[str, dict[str, tuple[Cut, Box]]]:
        """What each of these files holds: name -> where that piece is in its tensor."""
        held: dict[str, dict[str, tuple[Cut, Box]]] = {file: {} for file in files}
        for cut, names in self._names.items():
            for box, file in cut.cells():
                if file in held:
                    held[file] |= dict.fromkeys(names, (cut, box))
        return held

    def shards_of(self, prefix: str) -> list[str]:
        """The files with tensors whose names begin with `prefix`."""
        cuts = [
            cut
            for cut, names in self._names.items()
            if any(name.startswith(prefix) for name in names)
        ]
        return sorted({file for cut in cuts for file in cut.files})


def read_manifest(directory: Path, prefix: str = "") -> Manifest:
    """What `directory` holds of the tensors named `prefix...`; the files are not looked at.

    An index that can have no such tensor is not read. Those that are read are consistent in
    themselves.
    """
    path = directory / MANIFEST
    data = read_bounded(path, MAX_INDEX_BYTES)
    version = _version_of(data, path)
    if version != VERSION:
        old = read_legacy(data, path)
        return Manifest(version, old.step, old.serial, "sha256", *old[2:])
    root = _parse_root(data, path)
    files = {STATE: root.state}
    tensors: dict[str, Cut] = {}
    for group, record in root.groups.items():
        if _may_hold(group, prefix):
            index = _read_index(directory, group, record, root.hash)
            files[index_name(group)] = FileRecord(bytes=record.bytes, digest=record.digest)
            files |= index.files
            tensors |= index.tensors
    return Manifest(version, root.step, root.serial, root.hash, root.checksum, files, tensors)


def _may_hold(group: str, prefix: str) -> bool:
    # Names without a group of their own are kept together under another word.
    return "." not in prefix or f"{group}.".startswith(prefix) or prefix.startswith(f"{group}.")


def _read_index(directory: Path, group: str, record: GroupRecord, algorithm: HashName) -> Index:
    path = directory / index_name(group)
    data = read_bounded(path, min(record.bytes, MAX_INDEX_BYTES))
    if len(data) != record.bytes or digest_of(data, algorithm) != record.digest:
        raise CheckpointError(f"{path} is corrupted: it is not what the manifest says")
    return Index.from_bytes(data, group, path)


def _read_root(directory: Path) -> Root | None:
    """`manifest.json`; None if it is of a version that had everything in there."""
    path = directory / MANIFEST
    if legacy_head(read_bounded(path, LEGACY_HEAD_BYTES, beginning=True)):
        return None
    data = read_bounded(path, MAX_MANIFEST_BYTES)
    return _parse_root(data, path) if _version_of(data, path) == VERSION else None


class ManifestHead(NamedTuple):
    """The few fields by which checkpoints are listed and ordered."""

    version: int
    step: int
    serial: int


def read_head(directory: Path) -> ManifestHead:
    """What can be known of a checkpoint at once, however many ranks wrote it."""
    path = directory / MANIFEST
    if old := legacy_head(read_bounded(path, LEGACY_HEAD_BYTES, beginning=True)):
        return ManifestHead(*old)
    root = _read_root(directory)
    if root is None:
        manifest = read_manifest(directory)
        return ManifestHead(manifest.version, manifest.step, manifest.serial)
    for group, record in root.groups.items():
        index = directory / index_name(group)
        try:
            size = index.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
        if size != record.bytes:
            raise CheckpointError(f"{index} has {size} bytes and should have {record.bytes}")
    return ManifestHead(root.version, root.step, root.serial)


def state_record(directory: Path) -> tuple[FileRecord, HashName]:
    """Size and digest of `state.json`, without a look at any tensor."""
    if root := _read_root(directory):
        return root.state, root.hash
    manifest = read_manifest(directory)
    return manifest.files[STATE], manifest.hash


def write_manifest(
    directory: Path, step: int, serial: int, indices: Mapping[str, Index], state_bytes: bytes
) -> None:
    """Complete a directory of shards to a checkpoint whose files are all synced."""
    groups = {}
    for group, index in indices.items():
        data = index.to_bytes()
        check_size(data, MAX_INDEX_BYTES, index_name(group))
        record = write_synced(directory / index_name(group), data)
        groups[group] = GroupRecord(
            bytes=record.bytes,
            digest=record.digest,
            files=len(index.files),
            tensors=len(index.tensors),
            content_bytes=index.content_bytes(),
        )
    state = write_synced(directory / STATE, state_bytes)
    root = Root(step=step, serial=serial, state=state, groups=groups)
    write_synced(directory / MANIFEST, root.to_bytes())


# --- version 2 --------------------------------------------------------------------------------

# It had everything in `manifest.json`: every shard of every tensor with its file, offsets and
# shape. Its digests are SHA-256, and its checksum is of the meaning: white space and the order of
# keys did not count.

LEGACY_VERSION = 2

# It was written with these in the first lines.
_HEAD = re.compile(
    rb'\{\s*"format": "fourfold-checkpoint",\s*"version": (2),\s*'
    rb'"step": ([0-9]{1,19}),\s*"serial": ([0-9]{1,19}),'
)


class _FileRecord(StrictRecord):
    bytes: Count
    sha256: Digest


class _PieceRecord(StrictRecord):
    file: FileName
    offsets: tuple[Count, ...]
    shape: tuple[Count, ...]

    def cell(self) -> tuple[Box, str]:
        return Box(self.offsets, self.shape), self.file


class _TensorRecord(StrictRecord):
    shape: tuple[Count, ...]
    dtype: DtypeName
    pieces: tuple[_PieceRecord, ...] = Field(min_length=1)

    def cells(self) -> list[tuple[Box, str]]:
        return [piece.cell() for piece in self.pieces]


class _Manifest(StrictRecord):
    format: Literal["fourfold-checkpoint"]
    version: Literal[2]
    step: Count
    serial: Count
    files: dict[FileName, _FileRecord]
    tensors: dict[str, _TensorRecord]
    checksum: str


class LegacyManifest(NamedTuple):
    """What an older manifest says, in today's terms."""

    step: int
    serial: int
    checksum: str
    files: dict[str, FileRecord]
    tensors: dict[str, Cut]


def legacy_head(beginning: bytes) -> tuple[int, int, int] | None:
    """Version, step and serial from the first bytes of an older manifest; None if it is none."""
    found = _HEAD.match(beginning)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def read_legacy(data: bytes, path: Path) -> LegacyManifest:
    """An older manifest, sound in itself."""
    manifest = parse_record(_Manifest, data, path)
    if manifest.checksum != checksum_of(manifest.model_dump(mode="json")):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    return _converted(manifest, path)


def checksum_of(content: dict[str, Any]) -> str:
    """The hash of an older manifest's meaning."""
    sealed = {key: value for key, value in content.items() if key != "checksum"}
    canonical = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _converted(manifest: _Manifest, path: Path) -> LegacyManifest:
    if STATE not in manifest.files or path.name in manifest.files:
        raise CheckpointError(f"{path} is damaged: it must list {STATE} and not itself")
    tensors = {}
    for name, record in manifest.tensors.items():
        cells = record.cells()
        if any(file == STATE or file not in manifest.files for _, file in cells):
            raise CheckpointError(f"{path} is damaged: {name!r} is in no listed file")
        try:
            tensors[name] = Cut.of(record.shape, record.dtype, cells)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {name!r}: {error}") from None
    files = {
        file: FileRecord(bytes=record.bytes, digest=record.sha256)
        for file, record in manifest.files.items()
    }
    check_room(files, tensors, path)
    return LegacyManifest(manifest.step, manifest.serial, manifest.checksum, files, tensors)
