"""What a checkpoint says it holds: `manifest.json`, and the bounded JSON it is written in.

The manifest names every file with its size and SHA-256, every tensor with its shape, dtype and
the files that hold its pieces, and carries a checksum of itself, so that any changed byte is
either noticed or without meaning. Its bytes are foreign: size, nesting, schema and that the pieces
make up each tensor exactly once are checked before anything is believed.

Version 1, of the time when every tensor lay whole in one file, is read as the special case it is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fourfold.checkpoint.pieces import Box, tiling_problem
from fourfold.errors import CheckpointError

MANIFEST = "manifest.json"
STATE = "state.json"
VERSION: Final = 2

# A model of 1200 tensors with two moments each, every one cut over 128 ranks, takes 49 MB.
MAX_MANIFEST_BYTES = 128 << 20
MAX_STATE_BYTES = 16 << 20
MAX_NESTING = 64

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class MismatchError(CheckpointError):
    """A sound checkpoint, but of another model than the tensors given."""


class MovedError(CheckpointError):
    """The checkpoint was replaced or removed while it was read."""


# --- the manifest -----------------------------------------------------------------------------

# A name that stays inside its directory, and is never one of our own temporaries.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,200}$")]
DtypeName = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
Count = Annotated[int, Field(ge=0, le=2**62)]


class StrictRecord(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileRecord(StrictRecord):
    bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class PieceRecord(StrictRecord):
    file: FileName
    offsets: tuple[Count, ...]
    shape: tuple[Count, ...]

    def box(self) -> Box:
        return Box(self.offsets, self.shape)


class TensorRecord(StrictRecord):
    shape: tuple[Count, ...]
    dtype: DtypeName
    pieces: tuple[PieceRecord, ...] = Field(min_length=1)

    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Manifest(StrictRecord):
    format: Literal["fourfold-checkpoint"] = "fourfold-checkpoint"
    version: Literal[1, 2] = VERSION
    step: Count
    # How many saves this output directory had seen. Orders checkpoints by when they were written,
    # which step numbers do not after a run has gone back to an earlier step.
    serial: Count
    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]
    checksum: str = ""

    def sealed(self) -> Manifest:
        return self.model_copy(update={"checksum": checksum_of(self.model_dump(mode="json"))})

    def to_bytes(self) -> bytes:
        """JSON with a line for each file and each tensor, so that it can be read and searched."""
        content = self.model_dump(mode="json")
        for table in ("files", "tensors"):
            lines = (f"  {json.dumps(key)}: {json.dumps(v)}" for key, v in content[table].items())
            content[table] = "{\n" + ",\n".join(lines) + "\n }"
        rest = content.keys() - {"files", "tensors"}
        content |= {key: json.dumps(content[key]) for key in rest}
        entries = (f' "{key}": {value}' for key, value in content.items())
        data = ("{\n" + ",\n".join(entries) + "\n}").encode()
        check_size(data, MAX_MANIFEST_BYTES, MANIFEST)
        return data

    def shards(self) -> list[str]:
        return [file for file in self.files if file != STATE]

    def contents(self, prefix: str = "") -> dict[str, dict[str, PieceRecord]]:
        """File -> name -> piece, of the tensors whose names begin with `prefix`."""
        held: dict[str, dict[str, PieceRecord]] = {}
        for name, record in self.tensors.items():
            if name.startswith(prefix):
                for piece in record.pieces:
                    held.setdefault(piece.file, {})[name] = piece
        return held


class _WholeTensorRecord(StrictRecord):
    shape: tuple[Count, ...]
    dtype: DtypeName
    file: FileName

    def as_pieces(self) -> TensorRecord:
        piece = PieceRecord(file=self.file, offsets=(0,) * len(self.shape), shape=self.shape)
        return TensorRecord(shape=self.shape, dtype=self.dtype, pieces=(piece,))


class _ManifestVersion1(StrictRecord):
    format: Literal["fourfold-checkpoint"]
    version: Literal[1]
    step: Count
    serial: Count
    files: dict[FileName, FileRecord]
    tensors: dict[str, _WholeTensorRecord]
    checksum: str

    def as_pieces(self) -> Manifest:
        tensors = {name: record.as_pieces() for name, record in self.tensors.items()}
        return Manifest(**dict(self) | {"tensors": tensors})


def checksum_of(content: dict[str, Any]) -> str:
    """The hash of a manifest's meaning: white space and the order of keys do not count."""
    sealed = {key: value for key, value in content.items() if key != "checksum"}
    canonical = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class _Version(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    format: Literal["fourfold-checkpoint"]
    version: int


def read_manifest(directory: Path) -> Manifest:
    """The manifest of `directory`, sound in itself; its files are not looked at."""
    path = directory / MANIFEST
    data = read_bounded(path, MAX_MANIFEST_BYTES)
    check_nesting(data, path)
    version = parse_record(_Version, data, path).version
    if version == 1:
        manifest = _sealed(_ManifestVersion1, data, path).as_pieces()
    elif version == VERSION:
        manifest = _sealed(Manifest, data, path)
    else:
        raise CheckpointError(
            f"{path} has checkpoint format version {version}; this Fourfold reads versions "
            f"1 to {VERSION}: use the Fourfold that wrote it, or a newer one"
        )
    _check_consistent(manifest, path)
    return manifest


Record = TypeVar("Record", bound=BaseModel)


def parse_record(kind: type[Record], data: bytes, path: Path) -> Record:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise CheckpointError(f"{path} is damaged: {where}: {first['msg']}") from None


Sealed = TypeVar("Sealed", Manifest, _ManifestVersion1)


def _sealed(kind: type[Sealed], data: bytes, path: Path) -> Sealed:
    manifest = parse_record(kind, data, path)
    if manifest.checksum != checksum_of(manifest.model_dump(mode="json")):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    return manifest


def _check_consistent(manifest: Manifest, path: Path) -> None:
    if STATE not in manifest.files or MANIFEST in manifest.files:
        raise CheckpointError(f"{path} is damaged: it must list {STATE} and not itself")
    held = dict.fromkeys(manifest.shards(), 0)
    for name, record in manifest.tensors.items():
        files = {piece.file for piece in record.pieces}
        if not files <= held.keys():
            raise CheckpointError(f"{path} is damaged: {name!r} is in no listed file")
        if len(files) < len(record.pieces):
            raise CheckpointError(f"{path} is damaged: {name!r} is twice in one file")
        boxes = [piece.box() for piece in record.pieces]
        if problem := tiling_problem(record.shape, boxes):
            raise CheckpointError(f"{path} is damaged: {name!r}: {problem}")
        for piece, box in zip(record.pieces, boxes, strict=True):
            held[piece.file] += box.volume() * record.torch_dtype().itemsize
    for file, nbytes in held.items():
        if nbytes > manifest.files[file].bytes:
            raise CheckpointError(f"{path} is damaged: {file} is too small for its tensors")


# --- bounded JSON -----------------------------------------------------------------------------

# The closing quote is optional so that an endless string is passed over once, not once per quote.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")


def encode_json(value: Any, max_bytes: int, what: str) -> bytes:
    """JSON that `decode_json` gives back unchanged; anything else is the caller's mistake."""
    data = json.dumps(value, indent=1, allow_nan=False).encode()
    check_size(data, max_bytes, what)
    check_nesting(data, Path(what))
    if json.loads(data) != value:
        raise TypeError(f"{what} must be plain JSON: dicts with string keys, lists, no tuples")
    return data


def decode_json(data: bytes, path: Path) -> Any:
    check_nesting(data, path)
    try:
        return json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def check_size(data: bytes, max_bytes: int, what: str) -> None:
    if len(data) > max_bytes:
        raise CheckpointError(f"{what} would have {len(data)} bytes; at most {max_bytes} are read")


def check_nesting(data: bytes, path: Path) -> None:
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKET)
    steps = (1 if bracket in b"[{" else -1 for bracket in brackets)
    if max(itertools.accumulate(steps), default=0) > MAX_NESTING:
        raise CheckpointError(f"{path} is nested deeper than {MAX_NESTING} levels")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """A regular file's bytes, of which there may be at most `max_bytes`."""
    try:
        # A pipe or device under this name would block or never end.
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than the {max_bytes} bytes it may have")
    return data
