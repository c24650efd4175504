"""`preprocess_data.py` by Megatron's flags: files as they should be, flags honoured or refused."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers.raw_text import (
    web_pages,
    wikipedia_articles,
    write_openwebtext,
    write_vocabulary,
    write_wikipedia,
)

from fourfold.compat.megatron_preprocess import main, preprocess
from fourfold.data import open_datasets
from fourfold.data.tokenizer_check import find_tokenizer
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture
def wikipedia(tmp_path: Path) -> Path:
    return write_wikipedia(tmp_path / "wikipedia.20220301.en.json", wikipedia_articles())


def flags(source: object, prefix: Path, vocabulary: tuple[Path, Path], *more: str) -> list[str]:
    given = (
        f"--input {source} --output-prefix {prefix} --tokenizer-type GPT2BPETokenizer "
        f"--vocab-file {vocabulary[0]} --merge-file {vocabulary[1]} --append-eod --workers 1"
    )
    return [*given.split(), *more]


def expected_ids(texts: list[str], vocabulary: tuple[Path, Path]) -> tuple[list[list[int]], int]:
    """By `transformers`, from the same two files."""
    transformers = pytest.importorskip("transformers")
    # Without its special token there, the text "<|endoftext|>" is text to it as well.
    theirs = transformers.GPT2Tokenizer(
        vocab=str(vocabulary[0]), merges=str(vocabulary[1]), split_special_tokens=True
    )
    end = json.loads(vocabulary[0].read_text())["<|endoftext|>"]
    return [theirs.encode(text, add_special_tokens=False) for text in texts], end


def read_index(prefix: Path) -> tuple[list[int], list[int], list[int]]:
    """Sizes, pointers and documents of an .idx, read here byte by byte."""
    content = Path(f"{prefix}.idx").read_bytes()
    assert content[:9] == b"MMIDIDX\x00\x00"
    version, dtype, num_sizes, num_documents = struct.unpack_from("<QBQQ", content, 9)
    assert (version, dtype) == (1, 8)  # uint16
    sizes = np.frombuffer(content, "<i4", num_sizes, 34)
    pointers = np.frombuffer(content, "<i8", num_sizes, 34 + 4 * num_sizes)
    documents = np.frombuffer(content, "<i8", num_documents, 34 + 12 * num_sizes)
    return sizes.tolist(), pointers.tolist(), documents.tolist()


@pytest.mark.parametrize("kind", ["wikipedia", "openwebtext"])
def test_an_export_of_datasets_becomes_the_ids_of_transformers(
    tmp_path: Path, vocabulary: tuple[Path, Path], kind: str
) -> None:
    texts = wikipedia_articles() if kind == "wikipedia" else web_pages()
    write = write_wikipedia if kind == "wikipedia" else write_openwebtext
    source = write(tmp_path / f"{kind}.json", texts)
    preprocess(flags(source, tmp_path / kind, vocabulary))
    ids, end = expected_ids(texts, vocabulary)
    wanted = [[*document, end] for document in ids]
    sizes, pointers, documents = read_index(tmp_path / f"{kind}_text_document")
    assert sizes == [len(document) for document in wanted]  # the end of each is counted
    assert documents == list(range(len(wanted) + 1))
    tokens = np.fromfile(tmp_path / f"{kind}_text_document.bin", "<u2")
    found = [tokens[at // 2 : at // 2 + size].tolist() for at, size in zip(pointers, sizes)]
    assert found == wanted and len(tokens) == sum(sizes)


def test_without_append_eod_nothing_ends_a_document(
    tmp_path: Path, vocabulary: tuple[Path, Path], wikipedia: Path
) -> None:
    words = flags(wikipedia, tmp_path / "out", vocabulary)
    words.remove("--append-eod")
    preprocess(words)
    ids, _ = expected_ids(wikipedia_articles(), vocabulary)
    (dataset,) = open_datasets(tmp_path / "out_text_document")
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == ids


def test_every_key_has_its_files(
    tmp_path: Path,
    vocabulary: tuple[Path, Path],
    wikipedia: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    preprocess(flags(wikipedia, tmp_path / "w", vocabulary, "--json-keys", "title", "text"))
    tokenizer = Tokenizer.load(vocabulary)
    (titles,) = open_datasets(tmp_path / "w_title_document")
    (texts,) = open_datasets(tmp_path / "w_text_document")
    assert tokenizer.decode(titles.tokens(2).tolist()) == "Größe 2<|endoftext|>"
    assert len(titles) == len(texts) == len(wikipedia_articles())
    shown = capsys.readouterr()
    assert f"{tmp_path}/w_title_document: {len(titles)} documents" in shown.out


def test_workers_and_partitions_change_nothing_but_the_time(
    tmp_path: Path,
    vocabulary: tuple[Path, Path],
    wikipedia: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    preprocess(flags(wikipedia, tmp_path / "one", vocabulary, "--log-interval", "50"))
    progress = capsys.readouterr().err
    assert progress.startswith(f"Processed {len(wikipedia_articles())} documents (")
    parallel = "--workers 4 --partitions 2 --keep-sequential-samples --dataset-impl mmap"
    preprocess(flags(wikipedia, tmp_path / "four", vocabulary, *parallel.split()))
    assert "--partitions 2 changes nothing" in capsys.readouterr().err
    for ending in (".bin", ".idx"):
        one, four = (Path(f"{tmp_path / name}_text_document{ending}") for name in ("one", "four"))
        assert one.read_bytes() == four.read_bytes()


def test_a_glob_and_compressed_files_of_any_name(
    tmp_path: Path, vocabulary: tuple[Path, Path]
) -> None:
    (tmp_path / "a.part1").write_text('{"text": "the cat"}\n')
    (tmp_path / "b.part1.json.gz").write_bytes(gzip.compress(b'{"text": "the dog"}\n'))
    preprocess(flags(tmp_path / "*.part1*", tmp_path / "out", vocabulary))
    (dataset,) = open_datasets(tmp_path / "out_text_document")
    told = [Tokenizer.load(vocabulary).decode(dataset.tokens(i).tolist()) for i in range(2)]
    assert told == ["the cat<|endoftext|>", "the dog<|endoftext|>"]


def test_a_tokenizer_json_gives_the_same_and_is_found_again(
    tmp_path: Path, vocabulary: tuple[Path, Path], wikipedia: Path
) -> None:
    Tokenizer.load(vocabulary).save(tmp_path)
    preprocess(flags(wikipedia, tmp_path / "pair", vocabulary))
    given = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --append-eod"
    names = f"--input {wikipedia} --output-prefix {tmp_path}/json --workers 1"
    preprocess([*given.split(), *names.split()])
    files = [tmp_path / f"{name}_text_document.bin" for name in ("pair", "json")]
    assert files[0].read_bytes() == files[1].read_bytes()
    (tmp_path / "tokenizer.json").unlink()
    tokenizer, reason = find_tokenizer(open_datasets(tmp_path / "pair_text_document")[0])
    assert reason is None and tokenizer is not None
    assert tokenizer.identity == Tokenizer.load(vocabulary).identity


def test_other_data_at_the_prefix_is_kept_until_told(
    tmp_path: Path, vocabulary: tuple[Path, Path], wikipedia: Path
) -> None:
    preprocess(flags(wikipedia, tmp_path / "out", vocabulary))
    other = write_openwebtext(tmp_path / "o.json", ["the cat"])
    with pytest.raises(UserError, match="--overwrite"):
        preprocess(flags(other, tmp_path / "out", vocabulary))
    preprocess(flags(other, tmp_path / "out", vocabulary, "--overwrite"))
    assert len(open_datasets(tmp_path / "out_text_document")[0]) == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--split-sentences", "--split-sentences is not supported: documents are stored whole"),
        ("--dataset-impl lazy", "--dataset-impl lazy is a format .* leave the flag out"),
        ("--workers 3 --partitions 2", "--partitions 2 does not divide --workers 3"),
        ("--workers 0", "--workers 0: choose 1 or more"),
        ("--workers many", "--workers: 'many' is not a whole number"),
        ("--json-key text", "--json-key: unknown flag; did you mean --json-keys?"),
        ("--append-eod yes", "'yes' belongs to no flag"),
        ("--tokenizer-type SentencePieceTokenizer", "SentencePieceTokenizer is not supported"),
        ("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model; add it"),
        ("--tokenizer-model x", "--tokenizer-model does not go with .* GPT2BPETokenizer"),
        ("--find-optimal-num-workers", "give --workers as many as there are processors"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, vocabulary: tuple[Path, Path], wikipedia: Path, more: str, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        preprocess(flags(wikipedia, tmp_path / "out", vocabulary, *more.split()))
    assert not list(tmp_path.glob("out*"))


def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vocabulary: tuple[Path, Path]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--input", "x.json"])
    assert ended.value.code == 2
    missing = "--output-prefix and --tokenizer-type and --workers missing"
    assert missing in capsys.readouterr().err
    with pytest.raises(DataError, match="no_such_file"):
        preprocess(flags(tmp_path / "no_such_file.json", tmp_path / "out", vocabulary))
