"""Facts about a tokenizer: what its special tokens are for, and which tokenizer it is.

A tokenizer.json lists special tokens and not what they are for. That is in the files beside it
(`tokenizer_config.json`, or `special_tokens_map.json`), and, for what a text begins with, in its
post-processor. Where no file names the token that ends a document, the one with a well-known name
is taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizerFile

from fourfold.errors import DataError, UserError

END_OF_TEXT = "<|endoftext|>"
# GPT-2, Qwen and many; Llama 3; Llama 2 and Mistral; DeepSeek; Gemma.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>", "<eos>")
_MOST_CONFIG_BYTES = 32 << 20
_CONFIG_KEYS = {"eos": "eos_token", "bos": "bos_token", "pad": "pad_token", "unk": "unk_token"}


@dataclass(frozen=True)
class SpecialNames:
    """What the files of a tokenizer say; None where they say nothing."""

    eos: str | None = None
    bos: str | None = None
    pad: str | None = None
    unk: str | None = None
    adds_bos: bool | None = None  # at the beginning of every text

    def over(self, other: SpecialNames) -> SpecialNames:
        """These, and where they say nothing those."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(other, **said)

    def known_to(self, vocab: Mapping[str, int]) -> SpecialNames:
        """Without names that are not in the vocabulary, as of a file that belongs to another."""
        unknown = {
            name: None
            for name in _CONFIG_KEYS
            if (token := getattr(self, name)) is not None and token not in vocab
        }
        return replace(self, **unknown)

    def to_config(self) -> dict[str, Any]:
        """In the words of `tokenizer_config.json`."""
        named = {key: getattr(self, name) for name, key in _CONFIG_KEYS.items()}
        named |= {"add_bos_token": self.adds_bos}
        return {key: value for key, value in named.items() if value is not None}


def config_beside(path: Path) -> Path:
    """`tokenizer_config.json` for a `tokenizer.json`, and so for other names."""
    return path.with_name(f"{path.stem}_config.json")


def read_names(path: Path) -> SpecialNames:
    """What the files beside the file `path` of a tokenizer say."""
    names = _from_config(config_beside(path))
    if path.stem == "tokenizer":
        names = names.over(_from_config(path.with_name("special_tokens_map.json")))
    return names


def _from_config(path: Path) -> SpecialNames:
    if not path.is_file():
        return SpecialNames()
    if path.stat().st_size > _MOST_CONFIG_BYTES:
        raise DataError(f"{path}: too large for what it should be; remove it, or mend it")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON ({error}); mend it, or remove it") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no JSON object; mend it, or remove it")
    named: dict[str, Any] = {}
    for name, key in _CONFIG_KEYS.items():
        value = content.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        named[name] = value if isinstance(value, str) else None
    adds = content.get("add_bos_token")
    return SpecialNames(**named, adds_bos=adds if isinstance(adds, bool) else None)


def find_end(names: SpecialNames, vocab: Mapping[str, int], specials: Mapping[str, int]) -> str:
    """The token that ends a document."""
    if names.eos is not None:
        return names.eos
    found = next((token for token in KNOWN_ENDS if token in specials), None)
    if found is None:
        raise UserError(
            f"the tokenizer has no special token {END_OF_TEXT}, nor another known to end a "
            f"document ({', '.join(KNOWN_ENDS[1:])}); name it as eos_token in the "
            "tokenizer_config.json beside it, or train a tokenizer with `fourfold data "
            "train-tokenizer`"
        )
    return found


def added_around(file: TokenizerFile) -> tuple[list[int], list[int]]:
    """The ids that the file's own post-processor puts before and after a text."""
    if file.num_special_tokens_to_add(False) == 0:
        return [], []
    for text in ("a", "0", " "):
        plain = file.encode(text, add_special_tokens=False).ids
        full = file.encode(text, add_special_tokens=True).ids
        if plain and len(full) > len(plain):
            starts = range(len(full) - len(plain) + 1)
            at = next((at for at in starts if full[at : at + len(plain)] == plain), 0)
            return full[:at], full[at + len(plain) :]
    return [], []


# -- identity -------------------------------------------------------------------------------------


# Where `tokenizers` gave a part of a tokenizer a new option, older files mean this value by leaving
# it out. Every other option is off unless it is mentioned.
_ON_UNLESS_MENTIONED = {"use_regex", "split"}


def canonical_identity(text: str) -> str:
    """A hash of what a tokenizer.json says, whichever version of `tokenizers` wrote it."""
    content = json.dumps(_canonical(json.loads(text)), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _canonical(state: Any) -> Any:
    if isinstance(state, list):
        return [_canonical(each) for each in state]
    if not isinstance(state, dict):
        return state
    said: dict[str, Any] = {}
    for key, value in state.items():
        unless_mentioned = (True,) if key in _ON_UNLESS_MENTIONED else (None, False)
        if key == "vocab":
            said[key] = value
        elif key == "merges":
            said[key] = _pairs(value)
        elif not any(value is each for each in unless_mentioned):
            said[key] = _canonical(value)
    return said


def _pairs(merges: list[Any]) -> list[list[str]]:
    """Merges are written as pairs, or joined by a blank, which no token of such a file holds."""
    return [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in merges]
