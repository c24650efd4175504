"""Reading raw text: whatever the chunks, the same documents, each once and in order."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import DataError, UserError
from fourfold.tools.prepare.documents import BadLine, ChunkReader, TextRule, text_stretches
from fourfold.tools.prepare.input_files import InputFile, describe_input, find_inputs

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def place(number: int, document: str | BadLine) -> object:
    return document if isinstance(document, str) else (number + document.line, document.kind)


def read_whole(file: InputFile, rule: TextRule) -> list[object]:
    return [place(0, each) for each in ChunkReader(rule).documents(file, 0, None)]


def read_chunks(file: InputFile, rule: TextRule, size: int, readers: int = 1) -> list[object]:
    """In chunks of `size`, shared out to several readers in turn, as to several workers.

    With 0 readers a compressed file is decompressed once for all, as for several workers too.
    """
    if readers == 0 and file.compression:
        return read_stretches(file, rule, size)
    readers = max(readers, 1)
    ranks = [ChunkReader(rule) for _ in range(readers)]
    found: list[object] = []
    lines = chunk = 0
    while True:
        reader = ranks[chunk % readers]
        found += [place(lines, each) for each in reader.documents(file, chunk, size)]
        lines += reader.num_lines
        chunk += 1
        if reader.ended or (not file.compression and chunk * size >= file.num_bytes):
            return found


def read_stretches(file: InputFile, rule: TextRule, size: int) -> list[object]:
    found: list[object] = []
    lines, reader = 0, ChunkReader(rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.tools.prepare.documents._BLOCK_BYTES", 3)
        for chunk, stretch in text_stretches(file, rule, size, lambda chunk: True):
            assert stretch is not None and not reader.ended
            found += [place(lines, each) for each in reader.documents(file, chunk, size, stretch)]
            lines += reader.num_lines
    return found


# The rule for .txt files written out on whole text, with Python's own idea of a line.
def blank_line_documents(content: bytes) -> list[str]:
    documents, lines = [], ""
    for line in io.TextIOWrapper(io.BytesIO(content), "utf-8"):
        if line.strip():
            lines += line
        elif lines:
            documents.append(lines)
            lines = ""
    return [*documents, lines] if lines else documents


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


SIZES = st.integers(1, 40)
ENDINGS = st.sampled_from(sorted(COMPRESSORS))


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("ab é\u3000\x1c\r\n\n\n", max_size=60),
    size=SIZES,
    ending=ENDINGS,
    readers=st.integers(0, 3),
)
def test_blank_line_documents(
    directory: Path, text: str, size: int, ending: str, readers: int
) -> None:
    path = directory / f"in.txt{ending}"
    path.write_bytes(COMPRESSORS[ending](text.encode()))
    file, rule = describe_input(path), TextRule()
    expected = blank_line_documents(text.encode())
    assert read_whole(file, rule) == expected
    assert read_chunks(file, rule, size, readers) == expected


@settings(deadline=None, max_examples=200)
@given(
    text=st.text("ab é\u3000\x1c\r\n\n", max_size=60),
    size=SIZES,
    ending=ENDINGS,
    readers=st.integers(0, 3),
)
def test_line_documents(directory: Path, text: str, size: int, ending: str, readers: int) -> None:
    path = directory / f"lines.txt{ending}"
    path.write_bytes(COMPRESSORS[ending](text.encode()))
    file, rule = describe_input(path), TextRule(document_separator="line")
    lines = io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8")
    expected = [line.removesuffix("\n") for line in lines if line.strip()]
    assert read_whole(file, rule) == expected
    assert read_chunks(file, rule, size, readers) == expected


@settings(deadline=None, max_examples=300)
@given(
    lines=st.lists(
        st.text("xy\n", max_size=8).map(lambda text: json.dumps({"text": text}).encode())
        | st.sampled_from([b"", b"  ", b"{", b'{"other": 1}', b'{"text": 1}', b"\xff", b"x" * 99]),
        max_size=12,
    ),
    last=st.sampled_from([b"", b"\n"]),
    size=SIZES,
    ending=ENDINGS,
    readers=st.integers(0, 3),
)
def test_json_lines(
    directory: Path, lines: list[bytes], last: bytes, size: int, ending: str, readers: int
) -> None:
    path = directory / f"in.jsonl{ending}"
    path.write_bytes(COMPRESSORS[ending](b"\n".join(lines) + last))
    file, rule = describe_input(path), TextRule(max_document_bytes=50)
    whole = read_whole(file, rule)
    assert read_chunks(file, rule, size, readers) == whole
    assert [text for text in whole if isinstance(text, str)] == [
        json.loads(line)["text"] for line in lines if line.startswith(b'{"text": "')
    ]
    assert [entry for entry in whole if not isinstance(entry, str)] == [
        (number, kind)
        for number, line in enumerate(lines, start=1)
        if (
            kind := {
                b"{": "invalid JSON",
                b'{"other": 1}': "missing key",
                b'{"text": 1}': "not a string",
                b"\xff": "undecodable",
                b"x" * 99: "too long",
            }.get(line)
        )
    ]


@settings(deadline=None, max_examples=300)
@given(
    rows=st.lists(st.sampled_from(["one", "two words", "", "long " * 30]), max_size=12),
    kind=st.sampled_from(["txt", "jsonl"]),
    ending=st.sampled_from([".gz", ".zst"]),
    size=SIZES,
    readers=st.integers(0, 3),
    data=st.data(),
)
def test_a_broken_archive_is_said_once_whatever_the_chunks(
    directory: Path,
    rows: list[str],
    kind: str,
    ending: str,
    size: int,
    readers: int,
    data: st.DataObject,
) -> None:
    lines = rows if kind == "txt" else [json.dumps({"text": row}) for row in rows]
    whole = "".join(line + "\n" for line in lines)
    archive = COMPRESSORS[ending](whole.encode())
    path = directory / f"broken.{kind}{ending}"
    path.write_bytes(archive[: data.draw(st.integers(1, len(archive) - 1))])
    file, rule = describe_input(path), TextRule(max_document_bytes=100)
    found = read_whole(file, rule)
    assert read_chunks(file, rule, size, readers) == found
    damage = [entry for entry in found if isinstance(entry, tuple) and entry[1] == "damaged file"]
    too_long = [entry for entry in found if isinstance(entry, tuple) and entry[1] == "too long"]
    assert len(damage) == 1 or too_long
    assert not damage or found[-1] == damage[0]


@settings(deadline=None, max_examples=200)
@given(content=st.binary(max_size=120), ending=ENDINGS, kind=st.sampled_from(["txt", "jsonl"]))
def test_any_bytes_are_read_or_reported(
    directory: Path, content: bytes, ending: str, kind: str
) -> None:
    path = directory / f"any.{kind}{ending}"
    path.write_bytes(content)
    file, rule = describe_input(path), TextRule()
    whole = read_whole(file, rule)
    assert all(isinstance(entry, (str, tuple)) for entry in whole)
    assert read_chunks(file, rule, 7, 2) == whole


def test_members_and_frames_in_one_file(tmp_path: Path) -> None:
    for ending in (".gz", ".zst"):
        path = tmp_path / f"two.txt{ending}"
        path.write_bytes(COMPRESSORS[ending](b"one\n\ntw") + COMPRESSORS[ending](b"o\n"))
        assert read_whole(describe_input(path), TextRule()) == ["one\n", "two\n"]


def test_one_document_per_file(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo é".encode())
    rule = TextRule(document_separator="file")
    assert read_whole(describe_input(path), rule) == ["one\n\ntwo é"]
    path.write_bytes(b"")
    assert read_whole(describe_input(path), rule) == []
    path.write_bytes(b"fine\n\xff\n")
    assert read_whole(describe_input(path), rule) == [(2, "undecodable")]


def test_a_document_longer_than_allowed_is_bad_and_the_next_is_not(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("a line\n" * 20 + "\nshort\n")
    rule = TextRule(max_document_bytes=50)
    assert read_whole(describe_input(path), rule) == [(8, "too long"), "short\n"]
    assert read_chunks(describe_input(path), rule, 10) == [(8, "too long"), "short\n"]


@pytest.mark.parametrize("ending", COMPRESSORS)
@pytest.mark.parametrize("limit", [1 << 18, 16 << 20])
def test_a_file_without_blank_lines_takes_little_memory(
    tmp_path: Path, ending: str, limit: int
) -> None:
    """A sentence to a line: a document too long is not kept, one that is not is kept once."""
    path = tmp_path / f"in.txt{ending}"
    content = b"".join(b"%x on the mat\n" % (number * 7919) for number in range(50_000))
    path.write_bytes(COMPRESSORS[ending](content))
    file, reader = describe_input(path), ChunkReader(TextRule(max_document_bytes=limit))
    tracemalloc.start()
    (document,) = reader.documents(file, 0, 50_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(document, str) == (limit > len(content))
    held = len(content) if isinstance(document, str) else limit
    assert peak < 4 * held + (4 << 20)


def test_a_separator_nobody_knows() -> None:
    with pytest.raises(UserError, match="--document-separator page: choose one of blank-line, "):
        TextRule(document_separator="page")


# Which files


def test_directories_and_globs_in_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.jsonl.gz", "a.json", "c.parquet", "notes.md", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    names = ["a.json", "b/1.jsonl.gz", "b/2.txt", "c.parquet"]
    found = [str(file.path.relative_to(tmp_path)) for file in find_inputs([tmp_path])]
    assert found == names
    found = [file.path.name for file in find_inputs([tmp_path / "b" / "*", tmp_path / "a.json"])]
    assert found == ["1.jsonl.gz", "2.txt", "a.json"]


def test_what_prepare_left_in_the_directory_is_not_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = json.dumps({"version": 1, "fourfold": "1", "tokens": 3, "sha256": {}})
    kept = {
        # Raw text beside a dataset of the same name, and what only looks like our own.
        "wiki.jsonl": "{}",
        "wiki.txt": "text",
        "other.json": '{"fourfold": "is the name of a program"}',
        "cut.parts/text.jsonl": "{}",
    }
    left_out = {
        "wiki.json": manifest,
        "unfinished.parts/plan.json": "{}",
        "unfinished.parts/0123456789abcdef/part-000000-000000.json": "{}",
        "spool.parts/stdin-0123456789abcdef0123456789abcdef.jsonl": "{}",
        ".fourfold_cache/0123.json": "{}",
        ".cache/deeper/text.jsonl": "{}",
        ".hidden.txt": "text",
    }
    for name, content in {**kept, **left_out, "wiki_ids.npy": "", "wiki.bin": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "linked").symlink_to(tmp_path / "cut.parts")
    found = [str(file.path.relative_to(tmp_path)) for file in find_inputs([tmp_path])]
    assert found == sorted(kept)
    for reason in (
        f"left out 1 manifests of token files: {tmp_path}/wiki.json",
        "left out 3 files of unfinished work: ",
        f"left out 1 hidden files: {tmp_path}/.hidden.txt",
        f"left out 2 files in hidden directories: {tmp_path}/.cache/deeper/text.jsonl, ",
        f"left out 1 links to directories: {tmp_path}/linked",
    ):
        assert any(message.startswith(f"{tmp_path}: {reason}") for message in caplog.messages)
    assert len(caplog.messages) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.txt", r"absent\.txt: cannot be read \(No such file"),
        ("*.txt", r"\*\.txt: no file matches"),
        ("empty", "empty: the directory holds no text"),
        ("empty/../notes.md", r"notes\.md: not a known kind of text"),
    ],
)
def test_inputs_that_are_none(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError, match=message):
        find_inputs([tmp_path / name])
