"""Small foreign files: JSON descriptions, read with a bound, and the files of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourfold.checkpoint.bounded import read_bounded
from fourfold.errors import CheckpointError
from fourfold.tokenizer import END_OF_TEXT, Tokenizer

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


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_pair(directory: Path, tokenizer: Tokenizer) -> tuple[Path, Path] | None:
    """`vocab.json` and `merges.txt`, if these two alone are the tokenizer, as they are GPT-2's."""
    if not tokenizer.is_gpt2_like:
        return None
    bpe = json.loads(tokenizer.to_json())["model"]
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    write_json(vocab, bpe["vocab"] | {END_OF_TEXT: tokenizer.eos_id})
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    merges.write_text("\n".join(["#version: 0.2", *pairs, ""]), encoding="utf-8")
    return vocab, merges
