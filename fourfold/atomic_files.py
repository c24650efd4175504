"""Atomic writes: at any moment a file is the old one or the new one, and never a part of either.

What is written goes to another name in the same directory, reaches the disk (fsync) and then takes
the name it is meant for, in one rename.

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
    """A name to write to, which becomes `path` where the block ends well and is gone otherwise.

    `aside` is that name, where what a crash leaves behind must be told apart by whoever tidies up.
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
    """Wait until what was written to a file is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(directory: Path) -> None:
    """The same of the names in a directory: a new name is safe only once that is done."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
