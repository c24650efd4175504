"""Small foreign files, read with a bound: JSON descriptions and where a tokenizer lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourfold.checkpoint.manifest import read_bounded
from fourfold.errors import CheckpointError

MAX_JSON_BYTES = 32 << 20


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(path, MAX_JSON_BYTES))
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
