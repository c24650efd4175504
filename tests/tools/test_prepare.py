"""Documents to Megatron files: the bytes, the manifest, and nothing half-written."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.token_files import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import DataError
from fourfold.tokenizer import Tokenizer, train
from fourfold.tools.prepare import work_shards, writers
from fourfold.tools.prepare.pipeline import prepare, read_jsonl, token_dtype


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["the cat sat on the mat, the rat sat on the cat. " * 3], 270)


def parse(prefix: Path) -> tuple[np.dtype, list[list[int]], list[int]]:
    """An independent reader of the format: dtype, documents, document index."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    dtype = {4: np.dtype("<i4"), 8: np.dtype("<u2")}[code]
    sizes = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * entries
    tokens = prefix.with_suffix(".bin").read_bytes()
    assert len(tokens) == sum(sizes) * dtype.itemsize
    texts = [np.frombuffer(tokens, dtype, size, at).tolist() for size, at in zip(sizes, pointers)]
    return dtype, texts, list(documents)


def test_golden_bytes(tmp_path: Path) -> None:
    prepare(["1 2 3", "4 5"], tmp_path / "golden", Numbers(), append_eod=False)
    assert (tmp_path / "golden.bin").read_bytes().hex() == "01000200030004000500"
    assert (tmp_path / "golden.idx").read_bytes() == bytes.fromhex(
        "4d4d49444944580000 0100000000000000 08 0200000000000000 0300000000000000"
        "03000000 02000000 0000000000000000 0600000000000000"
        "0000000000000000 0100000000000000 0200000000000000"
    )


def test_text_round_trip(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["the cat", "", "sat on\nthe mat\n", "Größe 北京 <|endoftext|>", " "]
    manifest = prepare(iter(texts), tmp_path / "data", tokenizer)
    dtype, documents, starts = parse(tmp_path / "data")
    assert dtype == np.uint16
    assert starts == [0, 1, 1, 2, 3, 4]  # the empty one is an entry without a sequence
    assert all(ids[-1] == tokenizer.eos_id for ids in documents)
    assert all(tokenizer.eos_id not in ids[:-1] for ids in documents)
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == [text for text in texts if text]
    assert (manifest["documents"], manifest["empty_documents"]) == (4, 1)
    assert manifest["tokens"] == sum(map(len, documents))


def test_end_of_document_is_optional(tmp_path: Path) -> None:
    manifest = prepare(["1 2"], tmp_path / "with", Numbers())
    assert (parse(tmp_path / "with")[1], manifest["append_eod"]) == ([[1, 2, 99]], True)
    manifest = prepare(["1 2"], tmp_path / "without", Numbers(), append_eod=False)
    assert (parse(tmp_path / "without")[1], manifest["append_eod"]) == ([[1, 2]], False)


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(50257, "uint16"), (65499, "uint16"), (65500, "int32")]
)
def test_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, name: str) -> None:
    largest = vocab_size - 1
    manifest = prepare([f"0 {largest}"], tmp_path / "data", Numbers(vocab_size), append_eod=False)
    dtype, documents, _ = parse(tmp_path / "data")
    assert dtype.name == manifest["dtype"] == token_dtype(vocab_size).name == name
    assert documents == [[0, largest]]


def test_ids_beyond_the_type_never_wrap(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        prepare(["70000"], tmp_path / "data", Numbers(vocab_size=100))
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 98), max_size=12), min_size=1, max_size=30),
    batch=st.integers(1, 40),
    append_eod=st.booleans(),
)
def test_batches_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    batch: int,
    append_eod: bool,
) -> None:
    """Against Megatron's rule written out: an end where there are ids, an entry for every one."""
    documents = [*documents, [7]]
    prefix = tmp_path_factory.mktemp("prepare") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_shards, "BATCH_CHARACTERS", batch)
        texts = (" ".join(map(str, ids)) for ids in documents)
        prepare(texts, prefix, Numbers(), append_eod)
    expected, entries = [], [0]
    for ids in documents:
        if ids:
            expected.append([*ids, 99] if append_eod else ids)
        entries.append(len(expected))
    _, parsed, starts = parse(prefix)
    assert parsed == expected
    assert starts == entries


def test_documents_are_consumed_a_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_shards, "BATCH_CHARACTERS", 160)
    taken = 0
    waiting: list[int] = []

    class Counting(Numbers):
        def encode_joined(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            nonlocal taken
            waiting.append(taken)
            taken = 0
            return super().encode_joined(texts)

    def documents() -> Iterator[str]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield "1 2 3"

    prepare(documents(), tmp_path / "data", Counting())
    assert waiting == [10] * 10


def test_manifest_describes_the_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    manifest = prepare(["the cat", "sat"], tmp_path / "deep" / "data", tokenizer)
    directory = tmp_path / "deep"
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["data.bin", "data.idx", "data.json"]
    assert json.loads((directory / "data.json").read_text()) == manifest
    assert manifest["version"] == 1
    assert manifest["tokenizer"] == {
        "identity": tokenizer.identity,
        "vocab_size": 270,
        "eos_id": 269,
    }
    for suffix, digest in manifest["sha256"].items():
        content = (directory / f"data.{suffix}").read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert manifest["bytes"][suffix] == len(content)


def test_a_prefix_with_a_dot_keeps_it(tmp_path: Path) -> None:
    prepare(["1"], tmp_path / "wiki.v1", Numbers())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["wiki.v1.bin", "wiki.v1.idx", "wiki.v1.json"]


def test_an_interrupted_run_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    def failing() -> Iterator[str]:
        yield "1 2"
        raise DataError("broken input")

    with pytest.raises(DataError, match="broken input"):
        prepare(failing(), tmp_path / "data", Numbers())
    assert list(tmp_path.iterdir()) == []

    prepare(["5"], tmp_path / "data", Numbers())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match="broken input"):
        prepare(failing(), tmp_path / "data", Numbers())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    prepare(["1 2 3", "4"], tmp_path / "data", Numbers())
    prepare(["5"], tmp_path / "data", Numbers())
    assert parse(tmp_path / "data")[1] == [[5, 99]]


@pytest.mark.parametrize(
    "content", [b'{"text": "mine"}\n{"text": "too"}\n', b'{"text": "mine"}', b""]
)
def test_text_under_the_manifests_name_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    text = tmp_path / "wiki.json"
    text.write_bytes(content)
    with pytest.raises(DataError, match=r"wiki\.json: exists and is not a manifest"):
        prepare(["1"], tmp_path / "wiki", Numbers())
    assert text.read_bytes() == content
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize("crash_at", [0, 1, 2])
def test_a_crash_while_renaming_never_mixes_old_and_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    prepare(["1 2 3"], tmp_path / "data", Numbers())
    renames = 0
    rename = writers.UnfinishedFile.rename

    def crashing(file: writers.UnfinishedFile) -> None:
        nonlocal renames
        if renames == crash_at:
            raise OSError("power cut")
        renames += 1
        rename(file)

    monkeypatch.setattr(writers.UnfinishedFile, "rename", crashing)
    with pytest.raises(DataError, match="power cut"):
        prepare(["5"], tmp_path / "data", Numbers())
    assert not (tmp_path / "data.json").exists()
    if (tmp_path / "data.idx").exists():
        assert parse(tmp_path / "data")[1] == [[5, 99]]


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_nothing_to_prepare_is_refused(tmp_path: Path, documents: list[str]) -> None:
    with pytest.raises(DataError, match="no document with any text"):
        prepare(documents, tmp_path / "data", Numbers())
    assert list(tmp_path.iterdir()) == []


# Reading JSON lines


def test_lines_are_read_with_their_characters(tmp_path: Path) -> None:
    texts = ["plain", 'quote " and \n newline', "北京 \u2028 \x85", ""]
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n  \n".join(lines).encode())
    assert list(read_jsonl(path)) == texts
    path.write_bytes("\r\n".join(lines).encode() + b"\r\n")
    assert list(read_jsonl(path)) == texts


def test_another_key(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"body": "here", "text": "not here"}\n')
    assert list(read_jsonl(tmp_path / "in.jsonl", key="body")) == ["here"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not a line of JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not a line of JSON"),
        (b'["text"]', "of type list, not an object"),
        (b'{"title": "x"}', r"no key 'text' \(keys: 'title'\)"),
        (b"{}", r"keys: none"),
        (b'{"text": 5}', "'text' is of type int, not a string"),
        (b'{"text": null}', "'text' is of type NoneType, not a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    reader = read_jsonl(path)
    assert next(reader) == "good"
    with pytest.raises(DataError, match=message) as caught:
        next(reader)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read"):
        list(read_jsonl(tmp_path / "absent.jsonl"))


@settings(deadline=None, max_examples=200)
@given(content=st.binary(max_size=80) | st.text('{}[]",:tex \n\\u0d8', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "in.jsonl"
    path.write_bytes(content)
    try:
        assert all(isinstance(text, str) for text in read_jsonl(path))
    except DataError as error:
        assert str(error).startswith(f"{path}:")


def test_a_document_longer_than_its_length_can_tell(tmp_path: Path) -> None:
    class Endless(Numbers):
        def encode_joined(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            return np.empty(0, np.uint32), np.array([2**31] * len(texts))

    with pytest.raises(DataError, match=r"a document has 2147483648 tokens.*--max-document-mb"):
        prepare(["x"], tmp_path / "data", Endless(), append_eod=False)
    assert not list(tmp_path.iterdir())
