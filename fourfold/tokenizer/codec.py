"""A `Tokenizer`: text to ids and back, whatever kind of tokenizer it is.

It is loaded from any of the files `files` knows, or trained from text with `train`. `tokenizers`
reads, trains and writes the files and can encode with all of them. Byte-level BPE with a known
split rule and SentencePiece's BPE are encoded several times faster with identical ids (`fast`).

Text is always data: "<|endoftext|>" written in a document encodes as ordinary characters and never
as the end-of-document id. A lone surrogate (which UTF-8 cannot express) encodes as U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as TokenizerFile

from fourfold.atomic_files import replace_text
from fourfold.errors import DataError, UserError
from fourfold.processors import num_processors
from fourfold.tokenizer import rules
from fourfold.tokenizer.facts import (
    END_OF_TEXT,
    SpecialNames,
    added_around,
    canonical_identity,
    config_beside,
    find_end,
)
from fourfold.tokenizer.fast import (
    BLANK_SIGN,
    LITTLE_CHARACTERS,
    ByteBpe,
    Encoded,
    FastEncoder,
    SentenceWords,
    byte_bpe,
    joined_ids,
    without_surrogates,
)
from fourfold.tokenizer.ranks import begin_with, file_of

_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # as SentencePiece's vocabularies name them
# Encoded in both ways when a tokenizer is loaded: words, signs, blanks and line ends next to each
# other, numbers, several scripts, and letters that versions 15 to 17 of Unicode brought.
_PROBE = (
    "It's we'LL o'clock (see x[1:2345678]) - \t naïve Straße\n\n\n  def f(x):\r\n\t\treturn -x;\n"
    "北京は日本語・カタカナ が 한국어 नमस्ते עברית العربية e\u0301 ½²Ⅷ٣ 🏳️‍🌈 \u3000\xa0 \x02"
    "\ue000!!\n \n   $x=='a'\"'sſ'ſt  "
    "\U00011f04\U0001e030\U00010d4a\U000105c9\U0001cd00\U00016ea0 <|endoftext|></s>    \n  "
)


class Tokenizer:
    """One vocabulary. Built by `Tokenizer.load` or `train`."""

    def __init__(
        self,
        file: TokenizerFile | None,
        names: SpecialNames | None = None,
        bpe: ByteBpe | None = None,
    ) -> None:
        """Of a tokenizer.json as `tokenizers` holds it, or of merge ranks alone."""
        state = None
        if file is not None:
            self._file = _as_data(file)
            state = json.loads(file.to_str())
            bpe = byte_bpe(file, state)
            vocab = file.get_vocab(with_added_tokens=True)
            self._specials = {
                str(token.content): token_id
                for token_id, token in file.get_added_tokens_decoder().items()
                if token.special
            }
        else:
            assert bpe is not None
            self._specials = dict(bpe.specials)
            vocab = bpe.specials | bpe.added
        self._bpe = bpe
        self._words = SentenceWords.of(state) if state is not None and bpe is None else None
        self._is_of_ranks = file is None
        self.names = (names or SpecialNames()).known_to(vocab)
        self.eos_token: str = find_end(self.names, vocab, self._specials)
        self.eos_id: int = vocab[self.eos_token]
        self.begin_ids: tuple[int, ...] = self._find_begin(file, vocab)
        largest = [*vocab.values(), *(bpe.ranks.values() if bpe is not None else ())]
        self.vocab_size: int = max(largest) + 1
        self._is_fast = (self._bpe or self._words) is not None and self._agrees()

    def _find_begin(self, file: TokenizerFile | None, vocab: dict[str, int]) -> tuple[int, ...]:
        if self.names.adds_bos is False:
            return ()
        if self.names.adds_bos and self.names.bos is not None:
            return (vocab[self.names.bos],)
        return tuple(added_around(file)[0]) if file is not None else ()

    def _agrees(self) -> bool:
        """Whether the fast path says what the library says of a text that is hard to split."""
        if self._is_of_ranks or (self._bpe is not None and self._bpe.is_plain):
            return True
        text = _PROBE * (2 + LITTLE_CHARACTERS // len(_PROBE))  # as much as the fast path is for
        fast, _ = self._fast.encode_joined([text])
        return bool(np.array_equal(fast, self._encode_slowly(text)))

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what was found out about the file, which is read again if needed."""
        here = ("_file", "_fast", "_data_file", "_pieces_of_text")
        state = {name: value for name, value in vars(self).items() if name not in here}
        return state if self._is_of_ranks else state | {"_text": self._file.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @cached_property
    def _file(self) -> TokenizerFile:
        if self._is_of_ranks:
            assert self._bpe is not None
            return _as_data(file_of(self._bpe, self.names))
        return _as_data(TokenizerFile.from_str(vars(self)["_text"]))

    @cached_property
    def _fast(self) -> FastEncoder:
        parts = self._bpe or self._words
        assert parts is not None
        return FastEncoder(parts, self._encode_slowly, self._encode_words)

    @property
    def path(self) -> str:
        """What encodes much text: "vectors", "tiktoken" or "tokenizers"."""
        if not self._is_fast:
            return "tokenizers"
        is_vector = self._bpe is None or self._bpe.rule.begins is not None
        return "vectors" if is_vector else "tiktoken"

    @property
    def kind(self) -> str:
        """In words, for a reader."""
        if self._bpe is not None:
            return "byte-level BPE"
        model = str(json.loads(self._file.to_str())["model"]["type"])
        return f"SentencePiece {model}" if self._pieces_of_text is not None else model

    @cached_property
    def identity(self) -> str:
        """A hash equal for two tokenizers exactly when they are the same one, however stored."""
        if self._bpe is None:
            return canonical_identity(self._file.to_str())
        bpe = self._bpe
        tokens = sorted((token_id, token.hex()) for token, token_id in bpe.ranks.items())
        said: list[Any] = [rules.GPT2_SPLIT, tokens, sorted(bpe.specials.items())]
        if not bpe.is_plain:
            said = [bpe.rule.steps, bpe.composes, *said[1:], sorted(bpe.added.items())]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    @cached_property
    def older_identity(self) -> str | None:
        """What it was to older versions: a hash of the file's words, or of the library's, which
        change with its version."""
        if self._is_of_ranks or (self._bpe is not None and self._bpe.is_plain):
            return None
        text = self._file.to_str()
        if self._bpe is not None:
            return canonical_identity(text)
        return hashlib.sha256(text.encode()).hexdigest()

    def is_known_as(self, identity: object) -> bool:
        """Whether data or a checkpoint that names this identity means this tokenizer."""
        if identity is None or identity == self.identity:
            return identity is not None
        return identity == self.older_identity

    @staticmethod
    def load(path: str | Path | tuple[str | Path, str | Path]) -> Tokenizer:
        """Read any file, directory or name that `fourfold.tokenizer.files` knows."""
        from fourfold.tokenizer.files import load

        return load(path)

    # -- writing ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write `tokenizer.json` (into `path` if that is a directory); returns the file.

        What it does not say of special tokens is written to `tokenizer_config.json` beside it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, self.to_json())
        if self._says_less():
            content = json.dumps(self.names.to_config(), indent=2, ensure_ascii=False)
            replace_text(config_beside(path), content + "\n")
        return path

    def _says_less(self) -> bool:
        """Whether tokenizer.json alone does not say how documents end and texts begin."""
        vocab = self._file.get_vocab(with_added_tokens=True)
        try:
            end = find_end(SpecialNames(), vocab, self._specials)
        except UserError:
            return True
        return end != self.eos_token or tuple(added_around(self._file)[0]) != self.begin_ids

    def to_json(self) -> str:
        """What `tokenizer.json` holds."""
        return self._file.to_str(pretty=True)

    def for_transformers(self) -> tuple[str, dict[str, Any]]:
        """`tokenizer.json` and the special tokens of `tokenizer_config.json` from which
        `transformers` makes a tokenizer with the same ids, what a text begins with included."""
        file = TokenizerFile.from_str(self._file.to_str())
        if tuple(added_around(file)[0]) != self.begin_ids:
            plain = processors.ByteLevel(trim_offsets=False)
            begin = [str(self._file.id_to_token(one)) for one in self.begin_ids]
            file.post_processor = begin_with(begin[0], self.begin_ids[0]) if begin else plain
        names = self.names.to_config() | {"eos_token": self.eos_token}
        names.pop("add_bos_token", None)
        if not self.begin_ids:
            names.setdefault("bos_token", self.eos_token)
        elif len(self.begin_ids) == 1:
            names.setdefault("bos_token", self._file.id_to_token(self.begin_ids[0]))
        # Many have no padding of their own; whatever follows the end is masked.
        return file.to_str(pretty=True), names | {
            key: names.get(key, self.eos_token) for key in ("unk_token", "pad_token")
        }

    def special_ids(self) -> dict[str, int]:
        """The ids a model's description names: what begins and ends a text, and what fills up."""
        begin, pad = self._id_of(self.names.bos), self._id_of(self.names.pad)
        if self.begin_ids or begin is None:
            begin = (*self.begin_ids, self.eos_id)[0]
        ids = {"bos_token_id": begin, "eos_token_id": self.eos_id}
        return ids if pad is None else ids | {"pad_token_id": pad}

    def _id_of(self, name: str | None) -> int | None:
        if name is None or name in self._specials:
            return self._specials.get(name or "")
        return self._file.token_to_id(name)

    @property
    def is_gpt2_like(self) -> bool:
        """Whether `vocab.json` and `merges.txt` alone say everything, as GPT-2's do."""
        return self._bpe is not None and self._bpe.is_plain and self.eos_token == END_OF_TEXT

    # -- encoding --------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        ids, _ = self.encode_joined([text])
        return ids.tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that begins, with what the tokenizer's family puts before it."""
        return [*self.begin_ids, *self.encode(text)]

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that follows another, before which nothing belongs."""
        if self._words is None or not self._is_fast:
            return self.encode(text)
        return self._fast.encode_within(text).tolist()

    def beginning(self, wanted: bool | None) -> tuple[int, ...]:
        """The ids before every document: none, those of the family's rule (None), or at least
        the token for it."""
        if wanted is False or (wanted is None and not self.begin_ids):
            return ()
        if self.begin_ids:
            return self.begin_ids
        number = self._id_of(self.names.bos)
        if number is None:
            raise UserError(
                "the tokenizer names no token that begins a text, so none can be put before "
                "documents; name it as bos_token in the tokenizer_config.json beside it, or leave "
                "--prepend-bos out"
            )
        return (number,)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, on all processors."""
        with ThreadPoolExecutor(num_processors()) as threads:
            return list(threads.map(self.encode, texts))

    def encode_joined(self, texts: Sequence[str]) -> Encoded:
        """The ids of all texts one after the other, and how many each has; on one processor."""
        if self._is_fast:
            return self._fast.encode_joined(texts)
        return joined_ids([self._encode_slowly(text) for text in texts])

    def _encode_slowly(self, text: str) -> np.ndarray:
        """With the library the tokenizer is of, without special tokens."""
        if self._is_of_ranks and "_file" not in vars(self):
            return self._fast.by_expression(text)
        encoding = self._data_file.encode(without_surrogates(text), add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)

    def _encode_words(self, words: Sequence[str]) -> Encoded:
        model = self._file.model
        return joined_ids(
            [np.array([token.id for token in model.tokenize(word)], np.uint32) for word in words]
        )

    @cached_property
    def _data_file(self) -> TokenizerFile:
        """Where a word may be any entry of the vocabulary, special tokens are none of them."""
        state = json.loads(self._file.to_str())
        model = state["model"]
        if model["type"] == "BPE":
            return self._file
        hidden = {name: f"\U0010fffe{number}" for name, number in self._specials.items()}
        hidden.pop(model.get("unk_token") or "", None)
        if model["type"] == "Unigram":
            model["vocab"] = [[hidden.get(text, text), score] for text, score in model["vocab"]]
        else:
            model["vocab"] = {hidden.get(text, text): one for text, one in model["vocab"].items()}
        state["added_tokens"] = [one for one in state["added_tokens"] if not one["special"]]
        state["post_processor"] = None
        return _as_data(TokenizerFile.from_str(json.dumps(state)))

    # -- decoding --------------------------------------------------------------------------------

    def decode(
        self, ids: Sequence[int], *, skip_special: bool = False, continues: bool = False
    ) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a character cut in two) become U+FFFD.

        Some tokenizers drop the blank a text begins with; not if it `continues` another.
        """
        ids = list(ids)
        for token_id in ids:
            if not self._has(token_id):
                raise UserError(
                    f"token id {token_id} is not in the tokenizer's vocabulary of "
                    f"{self.vocab_size}; the ids come from another tokenizer or from the padding "
                    "of a model's vocabulary"
                )
        if skip_special:
            special = set(self._specials.values())
            ids = [token_id for token_id in ids if token_id not in special]
        if self._bpe is not None:
            return self._fast.decode_bytes(ids).decode(errors="replace")
        if not continues:
            return self._file.decode(ids, skip_special_tokens=False)
        if self._pieces_of_text is not None:
            content = b"".join(map(self._pieces_of_text.__getitem__, ids))
            return content.decode(errors="replace")
        before = self._file.decode([self._ordinary])
        return self._file.decode([self._ordinary, *ids], skip_special_tokens=False)[len(before) :]

    def _has(self, token_id: int) -> bool:
        if self._bpe is not None:
            return token_id in self._known_ids
        return token_id >= 0 and self._file.id_to_token(token_id) is not None

    @cached_property
    def _known_ids(self) -> frozenset[int]:
        assert self._bpe is not None
        others = self._bpe.specials | self._bpe.added
        return frozenset([*self._bpe.ranks.values(), *others.values()])

    @cached_property
    def _pieces_of_text(self) -> dict[int, bytes] | None:
        """The bytes of each token of a tokenizer like SentencePiece's, None for other kinds."""
        decoder = json.loads(self._file.to_str())["decoder"]
        steps = (decoder or {}).get("decoders", [])
        replaces = {"type": "Replace", "pattern": {"String": BLANK_SIGN}, "content": " "}
        if len(steps) < 3 or steps[0] != replaces or steps[1]["type"] != "ByteFallback":
            return None
        pieces = {}
        for token, number in self._file.get_vocab(with_added_tokens=True).items():
            byte = _ONE_BYTE.fullmatch(token)
            text = token.replace(BLANK_SIGN, " ").encode()
            pieces[number] = bytes([int(byte[1], 16)]) if byte else text
        return pieces

    @cached_property
    def _ordinary(self) -> int:
        """A token of plain text, to decode others next to."""
        added = {str(one.content) for one in self._file.get_added_tokens_decoder().values()}
        vocab = self._file.get_vocab(with_added_tokens=True).items()
        return min(
            number
            for token, number in vocab
            if token not in added and not _ONE_BYTE.fullmatch(token)
        )

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for: none for a special token or an unused id."""
        lengths = np.zeros(self.vocab_size, np.int64)
        if self._bpe is not None:
            for content, number in self._bpe.ranks.items():
                lengths[number] = len(content)
            for token, number in self._bpe.added.items():
                lengths[number] = len(token.encode())
            return lengths
        decoder = json.loads(self._file.to_str())["decoder"]
        is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        added = {str(one.content) for one in self._file.get_added_tokens_decoder().values()}
        around = self._ordinary
        without = len(self._file.decode([around, around]).encode())
        for token, token_id in self._file.get_vocab(with_added_tokens=True).items():
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
        if self._bpe is None or self._bpe.composes:
            return None
        return int(self.token_bytes.max())


# -- training -------------------------------------------------------------------------------------


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
    file = plain_byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    # The trainer numbers special tokens first; added afterwards, this one gets the last id.
    file.train_from_iterator(islice(map(without_surrogates, texts), 0, None, every), trainer)
    file.add_special_tokens([end_of_text()])
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


def plain_byte_level(model: models.BPE) -> TokenizerFile:
    """GPT-2's kind."""
    file = TokenizerFile(model)
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.post_processor = processors.ByteLevel(trim_offsets=False)
    return file


def end_of_text() -> AddedToken:
    return AddedToken(END_OF_TEXT, special=True, normalized=False)
