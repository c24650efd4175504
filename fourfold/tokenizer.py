"""Byte-level BPE: text to ids and back.

A `Tokenizer` is loaded from a `tokenizer.json` or from GPT-2's `vocab.json` + `merges.txt`, or
trained from text with `train`. Two libraries stand behind it: `tokenizers` reads, trains and
writes the files; `tiktoken`, built from the same merge ranks, encodes about five times faster with
identical ids. A tokenizer that is not plain GPT-2-style byte-level BPE is encoded by `tokenizers`.

Text is always data: "<|endoftext|>" written in a document encodes as ordinary characters and never
as the end-of-document id. A lone surrogate (which UTF-8 cannot express) encodes as U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as TokenizerFile

from fourfold.errors import DataError, UserError

END_OF_TEXT = "<|endoftext|>"

# GPT-2's split rule as it was published, and in the possessive form that spares tiktoken's regex
# engine most of the backtracking.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FAST_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# What is left of it aborts on a run of a million white-space characters.
_SAFE_BLANK_RUN = 500_000
_LONG_BLANK_RUN = re.compile(rf"\s{{{_SAFE_BLANK_RUN}}}")


class Tokenizer:
    """One vocabulary. Built by `Tokenizer.load` or `train`."""

    def __init__(self, file: TokenizerFile) -> None:
        # Training text is never cut or padded, whatever the file's own defaults say.
        file.no_truncation()
        file.no_padding()
        file.encode_special_tokens = True
        self._file = file
        self._specials = {
            str(token.content): token_id
            for token_id, token in file.get_added_tokens_decoder().items()
            if token.special
        }
        if END_OF_TEXT not in self._specials:
            raise UserError(
                f"the tokenizer has no special token {END_OF_TEXT}, which ends every document; "
                "add it, or train a tokenizer with `fourfold data train-tokenizer`"
            )
        self.eos_id: int = self._specials[END_OF_TEXT]
        self.vocab_size: int = max(file.get_vocab(with_added_tokens=True).values()) + 1
        ranks = _merge_ranks(file, self._specials)
        self._fast = None if ranks is None else _fast_encoding(ranks, self._specials)
        self.identity: str = _identity(file, ranks, self._specials)

    @classmethod
    def load(cls, path: str | Path | tuple[str | Path, str | Path]) -> Tokenizer:
        """Read a `tokenizer.json`, a directory, or the pair (`vocab.json`, `merges.txt`).

        A directory holds `tokenizer.json` or, failing that, `vocab.json` and `merges.txt`.
        """
        if isinstance(path, tuple):
            return _load_pair(Path(path[0]), Path(path[1]))
        path = Path(path)
        if not path.is_dir():
            return _load_json(path)
        if (path / "tokenizer.json").exists():
            return _load_json(path / "tokenizer.json")
        if (path / "vocab.json").exists() and (path / "merges.txt").exists():
            return _load_pair(path / "vocab.json", path / "merges.txt")
        raise DataError(
            f"{path}: holds neither tokenizer.json nor vocab.json with merges.txt; "
            "give the directory or the file of a tokenizer"
        )

    def save(self, path: str | Path) -> Path:
        """Write `tokenizer.json` (into `path` if that is a directory); returns the file."""
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        unfinished.write_text(self._file.to_str(pretty=True), encoding="utf-8")
        unfinished.replace(path)
        return path

    def encode(self, text: str) -> list[int]:
        if self._fast is None or _has_endless_blanks(text):
            return self._file.encode(_without_surrogates(text), add_special_tokens=False).ids
        return self._fast.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, on all processors."""
        if self._fast is None:
            clean = [_without_surrogates(text) for text in texts]
            encodings = self._file.encode_batch_fast(clean, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        if any(map(_has_endless_blanks, texts)):
            return [self.encode(text) for text in texts]
        return self._fast.encode_ordinary_batch(list(texts), num_threads=_processors())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        for token_id in ids:
            if token_id < 0 or self._file.id_to_token(token_id) is None:
                raise UserError(
                    f"token id {token_id} is not in the tokenizer's vocabulary of "
                    f"{self.vocab_size}; the ids come from another tokenizer or from the padding "
                    "of a model's vocabulary"
                )
        if self._fast is None:
            return self._file.decode(list(ids), skip_special_tokens=False)
        return self._fast.decode(list(ids), errors="replace")


def train(
    texts: Iterable[str], vocab_size: int, progress: bool = False, every: int = 1
) -> Tokenizer:
    """Byte-level BPE with GPT-2's split rule, from every `every`-th text.

    The vocabulary has exactly `vocab_size` ids: 256 bytes, the merges in the order they were
    learned, and `<|endoftext|>` last. The same texts give the same tokenizer.
    """
    smallest = 256 + 1
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size={vocab_size} leaves no room for the 256 bytes and {END_OF_TEXT}; "
            f"choose {smallest} or more"
        )
    if every < 1:
        raise UserError(f"every={every}: every n-th text is used; choose 1 or more")
    file = _plain_byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    # The trainer numbers special tokens first; added afterwards, this one gets the last id.
    file.train_from_iterator(islice(map(_without_surrogates, texts), 0, None, every), trainer)
    file.add_special_tokens([_end_of_text()])
    learned = file.get_vocab_size(with_added_tokens=True)
    if learned != vocab_size:
        raise DataError(
            f"the text holds only enough distinct words for a vocabulary of {learned}, "
            f"not vocab_size={vocab_size}; give more text or ask for at most {learned}"
        )
    return Tokenizer(file)


def _plain_byte_level(model: models.BPE) -> TokenizerFile:
    file = TokenizerFile(model)
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.post_processor = processors.ByteLevel(trim_offsets=False)
    return file


def _end_of_text() -> AddedToken:
    return AddedToken(END_OF_TEXT, special=True, normalized=False)


def _load_json(path: Path) -> Tokenizer:
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a tokenizer.json or a tokenizer's directory")
    with _naming(str(path), "tokenizer.json"):
        return Tokenizer(TokenizerFile.from_file(str(path)))


def _load_pair(vocab: Path, merges: Path) -> Tokenizer:
    for path in (vocab, merges):
        if not path.is_file():
            raise DataError(f"{path}: no such file; vocab.json and merges.txt belong together")
    with _naming(f"{vocab}, {merges}", "BPE vocabulary"):
        file = _plain_byte_level(models.BPE.from_file(str(vocab), str(merges)))
        if file.token_to_id(END_OF_TEXT) is not None:
            file.add_special_tokens([_end_of_text()])
        return Tokenizer(file)


@contextmanager
def _naming(source: str, kind: str) -> Iterator[None]:
    """Whatever goes wrong while reading becomes an error that names the source."""
    try:
        yield
    except UserError as error:
        raise DataError(f"{source}: {error}") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The library raises bare Exception for most damage; for the rest its Rust code panics,
        # which arrives as a BaseException without a name to import.
        raise DataError(
            f"{source}: not a readable {kind} ({error}); the file is damaged or of another kind"
        ) from error


def _merge_ranks(file: TokenizerFile, specials: dict[str, int]) -> dict[bytes, int] | None:
    """Token bytes -> id, or None where ids alone do not determine the merges.

    tiktoken joins any two neighbours whose bytes together are a token, lowest id first;
    `tokenizers` joins listed pairs, first listed first. They agree when the file is GPT-2's plain
    form, ids rise along the list of merges, and each token, encoded alone, gives itself: then the
    inside of a token is always in the state its one merge expects.
    """
    state: dict[str, Any] = json.loads(file.to_str())
    if not _is_plain_gpt2(state):
        return None
    vocab: dict[str, int] = state["model"]["vocab"]
    vocab = {token: token_id for token, token_id in vocab.items() if token not in specials}
    byte_of = _byte_of_character()
    merged = ["".join(pair) for pair in state["model"]["merges"]]
    if sorted([*byte_of, *merged]) != sorted(vocab):
        return None
    if any(vocab[later] <= vocab[earlier] for earlier, later in pairwise(merged)):
        return None
    for token, token_id in vocab.items():
        parts = file.model.tokenize(token)
        if len(parts) != 1 or parts[0].id != token_id:
            return None
    return {bytes(map(byte_of.__getitem__, token)): token_id for token, token_id in vocab.items()}


def _is_plain_gpt2(state: dict[str, Any]) -> bool:
    model, splitter, decoder = state["model"], state["pre_tokenizer"], state["decoder"]
    altering = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model["type"] == "BPE"
        and not any(model.get(option) for option in (*altering, "fuse_unk", "byte_fallback"))
        and state["normalizer"] is None
        and splitter is not None
        and splitter["type"] == "ByteLevel"
        and splitter["add_prefix_space"] is False
        and splitter.get("use_regex", True)
        and decoder is not None
        and decoder["type"] == "ByteLevel"
        and all(token["special"] for token in state["added_tokens"])
    )


def _byte_of_character() -> dict[str, int]:
    """The printable stand-in of each byte in GPT-2's files.

    Printable Latin-1 stands for itself; the rest is numbered from U+0100 in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + position): byte for position, byte in enumerate(others)
    }


def _fast_encoding(ranks: dict[bytes, int], specials: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "fourfold", pat_str=_FAST_SPLIT, mergeable_ranks=ranks, special_tokens=specials
    )


def _identity(file: TokenizerFile, ranks: dict[bytes, int] | None, specials: dict[str, int]) -> str:
    """A hash equal for two tokenizers exactly when they are the same one, however stored."""
    if ranks is None:
        return hashlib.sha256(file.to_str().encode()).hexdigest()
    tokens = sorted((token_id, token.hex()) for token, token_id in ranks.items())
    content = json.dumps([GPT2_SPLIT, tokens, sorted(specials.items())])
    return hashlib.sha256(content.encode()).hexdigest()


def _has_endless_blanks(text: str) -> bool:
    return len(text) >= _SAFE_BLANK_RUN and _LONG_BLANK_RUN.search(text) is not None


def _without_surrogates(text: str) -> str:
    """Surrogate pairs joined, lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
