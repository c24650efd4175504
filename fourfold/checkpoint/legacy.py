"""Manifests of version 2, which had everything in `manifest.json`.

Every shard of every tensor was listed with its file, offsets and shape. Digests are SHA-256, and
the checksum is of the meaning: white space and the order of keys did not count.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from fourfold.checkpoint.bounded import (
    Count,
    Digest,
    DtypeName,
    FileName,
    FileRecord,
    StrictRecord,
    parse_record,
)
from fourfold.checkpoint.index import Cut, check_room
from fourfold.errors import CheckpointError
from fourfold.shards import Box

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


class Old(NamedTuple):
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


def read_legacy(data: bytes, path: Path, state: str) -> Old:
    """An older manifest, sound in itself."""
    manifest = parse_record(_Manifest, data, path)
    if manifest.checksum != checksum_of(manifest.model_dump(mode="json")):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    return _converted(manifest, path, state)


def checksum_of(content: dict[str, Any]) -> str:
    """The hash of an older manifest's meaning."""
    sealed = {key: value for key, value in content.items() if key != "checksum"}
    canonical = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _converted(manifest: _Manifest, path: Path, state: str) -> Old:
    if state not in manifest.files or path.name in manifest.files:
        raise CheckpointError(f"{path} is damaged: it must list {state} and not itself")
    tensors = {}
    for name, record in manifest.tensors.items():
        cells = record.cells()
        if any(file == state or file not in manifest.files for _, file in cells):
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
    return Old(manifest.step, manifest.serial, manifest.checksum, files, tensors)
