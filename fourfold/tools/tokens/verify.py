"""Verification of token files: is a dataset what its manifest says, to the byte?

`verify` checks one dataset: every file against the sizes and hashes of the manifest, headers,
offsets and lengths by the readers' own validation, counts against the manifest, and every id
against the vocabulary. It does not stop at the first problem. What could not be checked, for want
of a manifest or a vocabulary size, is reported too. Files are read in blocks of a few megabytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.data.datasets import (
    TokenDataset,
    files_of,
    formats_at,
    manifest_file,
    manifest_section,
    passing_blocks,
    read_manifest,
)
from fourfold.data.readers import open_datasets
from fourfold.errors import DataError
from fourfold.tools.prepare.writers import (
    Advance,
    ByteProgress,
    RecordedFile,
    counting,
    records_of,
    silent,
)

READ_BYTES = 1 << 23


@dataclass
class VerifyResult:
    """What came of verifying one dataset; good if `problems` is empty."""

    prefix: Path
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def verify(
    prefix: Path, vocab_size: int | None = None, progress: ByteProgress = silent
) -> VerifyResult:
    """Check the dataset of this name; `vocab_size` replaces the manifest's."""
    result = VerifyResult(prefix)
    manifest = read_manifest(prefix)
    advance = counting(progress, _bytes_to_read(prefix, manifest))
    if manifest is not None:
        _check_files(prefix, manifest, result, advance)
    elif _is_torn_manifest(manifest_file(prefix)):
        result.problems.append(f"{manifest_file(prefix)}: the manifest is damaged")
    else:
        result.unchecked.append("sizes and hashes of the files: there is no manifest")
    dataset = _open(prefix, manifest, result)
    if dataset is None:
        return result
    result.checked.append("headers, offsets and lengths")
    if manifest is not None:
        _check_counts(dataset, manifest, result)
    vocab_size = vocab_size if vocab_size is not None else _recorded_vocabulary(manifest)
    if vocab_size is None:
        result.unchecked.append(
            "ids within the vocabulary: no manifest says its size; give --vocab-size"
        )
    _check_ids(dataset, vocab_size, result, advance)
    return result


def _is_torn_manifest(file: Path) -> bool:
    """Whether this was a manifest once; raw text may bear the name `x.json` too."""
    try:
        with file.open("rb") as stream:
            return b'"fourfold":' in stream.read(4096)
    except OSError:
        return False


def _bytes_to_read(prefix: Path, manifest: dict[str, Any] | None) -> int:
    """Every file once for its hash, and the ids once more for themselves."""
    files = [record.file for record in records_of(manifest, prefix)] if manifest else []
    files += [files_of(prefix, form)[0] for form in formats_at(prefix)[:1]]
    return sum(file.stat().st_size for file in files if file.is_file())


def _check_files(
    prefix: Path, manifest: dict[str, Any], result: VerifyResult, advance: Advance
) -> None:
    records = records_of(manifest, prefix)
    if not records:
        result.problems.append(
            f"{manifest_file(prefix)}: records no hashes; it is damaged or was written by hand"
        )
    before = len(result.problems)
    for record in records:
        _check_file(record, result, advance)
    if records and len(result.problems) == before:
        result.checked.append(f"every byte of {', '.join(record.file.name for record in records)}")


def _check_file(record: RecordedFile, result: VerifyResult, advance: Advance) -> None:
    try:
        size = record.file.stat().st_size
        digest = hashlib.sha256()
        with record.file.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                digest.update(block)
                advance(len(block))
    except FileNotFoundError:
        result.problems.append(f"{record.file}: missing, but the manifest describes it")
        return
    except OSError as error:
        result.problems.append(f"{record.file}: cannot be read ({error.strerror or error})")
        return
    if record.num_bytes is not None and size != record.num_bytes:
        result.problems.append(
            f"{record.file}: {size} bytes, the manifest says {record.num_bytes}; "
            f"it is {'truncated' if size < record.num_bytes else 'longer than it was'}"
        )
    elif record.sha256 is None:
        result.problems.append(
            f"{record.file}: the manifest records no hash of it; the manifest is damaged"
        )
    elif digest.hexdigest() != record.sha256:
        result.problems.append(
            f"{record.file}: sha256 is {digest.hexdigest()[:16]}..., the manifest says "
            f"{record.sha256[:16]}...; the content has changed since it was written"
        )


def _open(
    prefix: Path, manifest: dict[str, Any] | None, result: VerifyResult
) -> TokenDataset | None:
    """The dataset if its reader takes it; else the reader's complaint is a problem."""
    present = formats_at(prefix)
    recorded = (manifest or {}).get("format")
    if recorded in present:
        present = [recorded]
    if not present:
        return None  # its files are reported missing already
    if len(present) > 1:
        result.problems.append(
            f"{prefix}: exists in more than one format ({', '.join(present)}); move one away"
        )
        return None
    files = files_of(prefix, present[0])
    recorded_files = {record.file for record in records_of(manifest, prefix)} if manifest else set()
    if any(not file.exists() and file in recorded_files for file in files):
        return None  # reported missing already
    try:
        (dataset,) = open_datasets(next(file for file in files if file.exists()))
    except DataError as error:
        result.problems.append(str(error))
        return None
    return dataset


def _check_counts(dataset: TokenDataset, manifest: dict[str, Any], result: VerifyResult) -> None:
    held = {
        "documents": len(dataset),
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
    }
    wrong = False
    for key, value in held.items():
        if key not in manifest:
            result.unchecked.append(f"{key}: the manifest does not say")
        elif manifest[key] != value:
            wrong = True
            result.problems.append(
                f"{dataset.path}: {key} {value}, the manifest says {manifest[key]}"
            )
    if not wrong:
        result.checked.append(f"{len(dataset):,} documents and {dataset.num_tokens:,} tokens")


def _recorded_vocabulary(manifest: dict[str, Any] | None) -> int | None:
    size = manifest_section(manifest, "tokenizer").get("vocab_size")
    return size if isinstance(size, int) else None


def _check_ids(
    dataset: TokenDataset, vocab_size: int | None, result: VerifyResult, advance: Advance
) -> None:
    """Every id is at least 0 and, if the vocabulary is known, within it."""
    limit = vocab_size if vocab_size is not None else np.iinfo(dataset.dtype).max + 1
    wrong, first_wrong = 0, -1
    start = 0
    for block in passing_blocks(dataset.ids):
        if int(block.min()) < 0 or int(block.max()) >= limit:
            outside = np.flatnonzero((block < 0) | (block >= limit))
            wrong += len(outside)
            if first_wrong < 0:
                first_wrong = start + int(outside[0])
        start += len(block)
        advance(block.nbytes)
    if wrong:
        vocabulary = "negative" if vocab_size is None else f"outside the vocabulary of {vocab_size}"
        result.problems.append(
            f"{dataset.path}: {wrong:,} of {dataset.num_tokens:,} ids are {vocabulary}, the first "
            f"is {dataset.ids[first_wrong]} at token {first_wrong} (document "
            f"{_document_at(dataset, first_wrong)}); the data was made with another tokenizer or "
            "is damaged"
        )
    elif vocab_size is not None:
        result.checked.append(f"every id within the vocabulary of {vocab_size:,}")


def _document_at(dataset: TokenDataset, token: int) -> int:
    ends = np.cumsum(dataset.sizes, dtype=np.int64)
    return int(np.searchsorted(ends, token, side="right"))
