"""What a checkpoint says it holds: `manifest.json`, and the bounded JSON it is written in.

The manifest names every file with its size and SHA-256, every tensor with its shape, dtype and
file, and carries a checksum of itself, so that any changed byte is either noticed or without
meaning. Its bytes are foreign: size, nesting and schema are checked before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fourfold.errors import CheckpointError

MANIFEST = "manifest.json"
STATE = "state.json"
VERSION: Final = 1

MAX_MANIFEST_BYTES = 32 << 20
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


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileRecord(_Record):
    bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TensorRecord(_Record):
    shape: tuple[Count, ...]
    dtype: DtypeName
    file: FileName

    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Manifest(_Record):
    format: Literal["fourfold-checkpoint"] = "fourfold-checkpoint"
    version: Literal[1] = VERSION
    step: Count
    # How many saves this output directory had seen. Orders checkpoints by when they were written,
    # which step numbers do not after a run has gone back to an earlier step.
    serial: Count
    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]
    checksum: str = ""

    def sealed(self) -> Manifest:
        return self.model_copy(update={"checksum": checksum_of(self.model_dump(mode="json"))})

    def is_sealed(self) -> bool:
        return self.checksum == checksum_of(self.model_dump(mode="json"))

    def to_bytes(self) -> bytes:
        return encode_json(self.model_dump(mode="json"), MAX_MANIFEST_BYTES, MANIFEST)

    def tensors_in(self, file: str) -> dict[str, TensorRecord]:
        return {name: record for name, record in self.tensors.items() if record.file == file}

    def shards(self) -> list[str]:
        return [file for file in self.files if file != STATE]


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
    try:
        version = _Version.model_validate_json(data).version
        if version != VERSION:
            raise CheckpointError(
                f"{path} has checkpoint format version {version}; this Fourfold reads "
                f"version {VERSION}: use the Fourfold that wrote it, or a newer one"
            )
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise CheckpointError(f"{path} is damaged: {where}: {first['msg']}") from None
    if not manifest.is_sealed():
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    _check_consistent(manifest, path)
    return manifest


def _check_consistent(manifest: Manifest, path: Path) -> None:
    if STATE not in manifest.files or MANIFEST in manifest.files:
        raise CheckpointError(f"{path} is damaged: it must list {STATE} and not itself")
    held = dict.fromkeys(manifest.shards(), 0)
    for name, record in manifest.tensors.items():
        if record.file not in held:
            raise CheckpointError(f"{path} is damaged: {name!r} is in no listed file")
        held[record.file] += record.nbytes()
    for file, nbytes in held.items():
        if nbytes > manifest.files[file].bytes:
            raise CheckpointError(f"{path} is damaged: {file} is too small for its tensors")


# --- bounded JSON -----------------------------------------------------------------------------

# The closing quote is optional so that an endless string is passed over once, not once per quote.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def encode_json(value: Any, max_bytes: int, what: str) -> bytes:
    """JSON that `decode_json` gives back unchanged; anything else is the caller's mistake."""
    data = json.dumps(value, indent=1, allow_nan=False).encode()
    if len(data) > max_bytes:
        raise CheckpointError(f"{what} would have {len(data)} bytes; at most {max_bytes} are read")
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


def check_nesting(data: bytes, path: Path) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        token = match.group()
        depth += (token in b"[{") - (token in b"]}")
        if depth > MAX_NESTING:
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
