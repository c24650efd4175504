"""Text to token files in Megatron's format.

`prepare` streams documents through a tokenizer into `<prefix>.bin` (ids, nothing else) and
`<prefix>.idx` (where each document lies), byte for byte what Megatron writes for the same ids, and
describes them in `<prefix>.json`. Everything is written under temporary names and renamed when
complete, the manifest last: files under their final names are finished.

Memory is bounded by one batch of text plus four bytes per document.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fourfold import __version__
from fourfold.data.dataset import read_manifest
from fourfold.errors import DataError
from fourfold.tokenizer import Tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_FORMAT_VERSION = 1
_MANIFEST_VERSION = 1
_DTYPE_CODES = {"int32": 4, "uint16": 8}

# Enough text to keep every processor busy, little enough to hold several times over.
_BATCH_CHARACTERS = 4_000_000
_BATCH_DOCUMENTS = 4096
_INDEX_CHUNK = 1_000_000


def prepare(
    documents: Iterable[str], prefix: str | Path, tokenizer: Tokenizer, append_eod: bool = True
) -> dict[str, Any]:
    """Write `<prefix>.bin`, `.idx` and `.json`; returns the manifest (the `.json`).

    With `append_eod` each document ends with the tokenizer's end-of-text id. Documents without
    any token are left out, as Megatron and FleetX do.
    """
    prefix = str(prefix)
    _refuse_foreign_manifest(prefix)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(tokenizer.vocab_size)
    ending = [tokenizer.eos_id] if append_eod else []
    lengths = array("i")
    with ExitStack() as stack:
        tokens_file = stack.enter_context(_HashedFile(f"{prefix}.bin"))
        for batch in _batches(documents):
            encoded = [ids + ending for ids in tokenizer.encode_batch(batch) if ids]
            lengths.extend(map(len, encoded))
            for ids in encoded:
                tokens_file.write(np.array(ids, dtype=dtype).tobytes())
        if not lengths:
            raise DataError(f"{prefix}: no document with any text was given; nothing to prepare")
        index_file = stack.enter_context(_HashedFile(f"{prefix}.idx"))
        _write_index(index_file, lengths, dtype)
        manifest = {
            "version": _MANIFEST_VERSION,
            "fourfold": __version__,
            "tokenizer": {
                "identity": tokenizer.identity,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
            },
            "append_eod": append_eod,
            "documents": len(lengths),
            "tokens": int(np.frombuffer(lengths, np.int32).sum(dtype=np.int64)),
            "dtype": dtype.name,
            "sha256": {"bin": tokens_file.hexdigest(), "idx": index_file.hexdigest()},
        }
        manifest_file = stack.enter_context(_HashedFile(f"{prefix}.json"))
        manifest_file.write(json.dumps(manifest, indent=2).encode() + b"\n")
        _commit(tokens_file, index_file, manifest_file)
    return manifest


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type Megatron stores ids of such a vocabulary in."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def read_jsonl(path: str | Path, key: str = "text") -> Iterator[str]:
    """The string under `key` of each line; blank lines are passed over."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the `with` below
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark
            if line.strip():
                yield _text_of(line, key, f"{path}:{number}")


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: not a line of JSON in UTF-8 ({error}); mend or remove the line"
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f'{place}: of type {type(record).__name__}, not an object like {{"{key}": ...}}'
        )
    if key not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(
            f"{place}: no key {key!r} (keys: {found}); name the key that holds the text"
        )
    if not isinstance(record[key], str):
        raise DataError(f"{place}: {key!r} is of type {type(record[key]).__name__}, not a string")
    return record[key]


def _refuse_foreign_manifest(prefix: str) -> None:
    """Text named `x.json`, prepared as `x`, must not be replaced by its own manifest."""
    manifest = Path(f"{prefix}.json")
    if manifest.exists() and read_manifest(Path(f"{prefix}.bin")) is None:
        raise DataError(
            f"{manifest}: exists and is not a manifest of prepared data, but the manifest of "
            f"{prefix} would replace it; choose another prefix"
        )


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_index(file: _HashedFile, lengths: array[int], dtype: np.dtype[Any]) -> None:
    """Header, tokens per document, byte offset of each, and documents as runs of one sequence."""
    count = len(lengths)
    file.write(_MAGIC)
    file.write(struct.pack("<QBQQ", _FORMAT_VERSION, _DTYPE_CODES[dtype.name], count, count + 1))
    sizes = np.frombuffer(lengths, dtype=np.int32)
    file.write(sizes.astype("<i4").tobytes())
    offset = 0
    for start in range(0, count, _INDEX_CHUNK):
        ends = offset + np.cumsum(sizes[start : start + _INDEX_CHUNK], dtype="<i8") * dtype.itemsize
        file.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
        offset = int(ends[-1])
    for start in range(0, count + 1, _INDEX_CHUNK):
        file.write(np.arange(start, min(start + _INDEX_CHUNK, count + 1), dtype="<i8").tobytes())


class _HashedFile:
    """A file under a temporary name, hashed as it is written; gone unless committed."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._hash = hashlib.sha256()

    def __enter__(self) -> _HashedFile:
        self._file = self._unfinished.open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def rename(self) -> None:
        self._unfinished.replace(self.path)


def _commit(tokens: _HashedFile, index: _HashedFile, manifest: _HashedFile) -> None:
    for file in (tokens, index, manifest):
        file.sync()
    # Old files of this name go first, the reader's entry points before what they point to: a
    # crash in between leaves a data set that is missing, never one that mixes old and new.
    for file in (manifest, index):
        file.path.unlink(missing_ok=True)
    for file in (tokens, index, manifest):
        file.rename()
