"""Small foreign files, read with a bound: JSON descriptions and where a tokenizer lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourfold.errors import CheckpointError

MAX_JSON_BYTES = 32 << 20


def read_small(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than the {max_bytes} bytes it may have")
    return data


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object")
    return content


def find_tokenizer(*directories: Path) -> Path | None:
    """The first of these directories that holds a tokenizer's files."""
    for directory in directories:
        pair = directory / "vocab.json", directory / "merges.txt"
        if (directory / "tokenizer.json").is_file() or all(file.is_file() for file in pair):
            return directory
    return None
