"""Atomic writes: at any moment a file is the old one or the new one, never a part of either.

The content is written under another name in the same directory, flushed to disk (fsync) and moved
into place by one atomic rename.

    with replacing(path) as aside:
        figure.savefig(aside)

    replace_text(path, "the whole content\\n")
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, aside: Path | None = None) -> Iterator[Path]:
    """A temporary name to write to: renamed to `path` if the block succeeds, else removed.

    `aside` sets that name, for callers whose clean-up must recognise what a crash left behind.
    """
    if aside is None:
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield aside
        sync_file(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def replace_bytes(path: Path, content: bytes, aside: Path | None = None) -> None:
    with replacing(path, aside) as written:
        written.write_bytes(content)


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode())


def sync_file(path: Path) -> None:
    """Flush a file to disk (fsync)."""
    _sync(path, os.O_RDONLY)


def sync_directory(directory: Path) -> None:
    """Flush the entries of a directory: a new name survives a crash only after that."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
