"""The small files of a checkpoint: JSON within limits, and digests of bytes.

These files are untrusted input: size, nesting depth and fields are checked before anything is made
of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fourfold.errors import CheckpointError

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

# --- digests ----------------------------------------------------------------------------------

HashName = Literal["blake3", "sha256"]

# As strong as SHA-256 and three times as fast on one core with SHA instructions, more without.
HASH: Final[HashName] = "blake3"


class Hasher(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_hasher(algorithm: HashName) -> Hasher:
    return blake3() if algorithm == "blake3" else hashlib.sha256()


def digest_of(data: bytes, algorithm: HashName) -> str:
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()


# --- records ----------------------------------------------------------------------------------

# A name that stays inside its directory, and is never one of our own temporaries.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,200}$")]
DtypeName = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
Count = Annotated[int, Field(ge=0, le=2**62)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StrictRecord(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileRecord(StrictRecord):
    bytes: Count
    digest: Digest


Record = TypeVar("Record", bound=BaseModel)


def parse_record(kind: type[Record], data: bytes, path: Path) -> Record:
    check_nesting(data, path)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise CheckpointError(f"{path} is damaged: {where}: {first['msg']}") from None


# --- JSON -------------------------------------------------------------------------------------

# The closing quote is optional so that an endless string is passed over once, not once per quote.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")


def encode_json(value: Any, max_bytes: int, what: str) -> bytes:
    """JSON that `decode_json` returns unchanged; anything else is the caller's mistake."""
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


# --- files ------------------------------------------------------------------------------------


def read_bounded(path: Path, max_bytes: int, beginning: bool = False) -> bytes:
    """The bytes of a regular file, at most `max_bytes` of them, or only the first ones."""
    try:
        # A pipe or device under this name would block or never end.
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        with path.open("rb") as stream:
            data = stream.read(max_bytes if beginning else max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than the {max_bytes} bytes it may have")
    return data


def write_synced(path: Path, data: bytes) -> FileRecord:
    """Write a small file and flush it to disk; returns its size and digest."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return FileRecord(bytes=len(data), digest=digest_of(data, HASH))
