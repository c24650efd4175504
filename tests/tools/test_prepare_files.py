"""`prepare_files`: every kind of input, the same bytes with any workers, bad input, provenance."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from fourfold.data import open_datasets
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer, train
from fourfold.tools.prepare import manifest as manifest_records
from fourfold.tools.prepare import pipeline
from fourfold.tools.prepare.documents import ChunkReader
from fourfold.tools.prepare.input_files import find_inputs, spool_stdin
from fourfold.tools.prepare.manifest import PrepareSettings
from fourfold.tools.prepare.pipeline import (
    PrepareProgress,
    _PrepareRun,
    dataset_prefix,
    prepare_files,
)
from fourfold.tools.prepare.work_shards import ShardReport, TokenizeJob, WorkShard

TEXTS = [
    f"document {number} of the cat on the mat, été 北京\n" * (number % 7) for number in range(90)
]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return train(["the cat sat on the mat, the rat sat on the cat. " * 3], 270).save(path)


@pytest.fixture
def base(tokenizer_file: Path) -> PrepareSettings:
    return PrepareSettings(tokenizer=str(tokenizer_file), chunk_bytes=1000)


def json_lines(texts: Sequence[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, key: each}).encode() + b"\n" for each in texts)


def run(inputs: Sequence[Path], prefix: Path, settings: PrepareSettings) -> dict[str, Any]:
    return prepare_files(find_inputs(inputs), prefix, settings)


def content(prefix: Path) -> dict[str, bytes]:
    """The token files of a prefix, by their ending."""
    files = [file for file in prefix.parent.glob(f"{prefix.name}_*") if file.suffix != ".json"]
    return {file.name.removeprefix(prefix.name): file.read_bytes() for file in files}


def decoded(prefix: Path, tokenizer_file: Path) -> list[str]:
    """The documents as text, without their end."""
    tokenizer = Tokenizer.load(tokenizer_file)
    (dataset,) = open_datasets(prefix)
    documents = [dataset.tokens(number).tolist() for number in range(len(dataset))]
    assert all(ids[-1] == tokenizer.eos_id for ids in documents)
    return [tokenizer.decode(ids[:-1]) for ids in documents]


# Workers and kinds of input


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path, base: PrepareSettings) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_bytes(json_lines(TEXTS[:40]) + b"{bad\n" + json_lines(TEXTS[40:]))
    (source / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS) + b"[]\n"))
    (source / "c.txt.zst").write_bytes(
        zstandard.compress("\n".join(TEXTS).encode())  # blank lines between documents
    )
    for number in range(5):
        (source / f"d{number}.txt").write_text(f"small {number}\n\nfile\n")
    reports = {}
    for workers in (1, 2, 5):
        manifest = run([source], tmp_path / f"w{workers}", replace(base, workers=workers))
        reports[workers] = manifest
    assert content(tmp_path / "w1") == content(tmp_path / "w2") == content(tmp_path / "w5")
    assert reports[1] == reports[2] == reports[5]
    assert reports[1]["dropped"]["kinds"] == {"invalid JSON": 1, "not an object": 1}
    assert [at["line"] for at in reports[1]["dropped"]["first"]] == [41, 91]
    assert len(list(tmp_path.glob("*.parts"))) == 0


def test_every_kind_of_input_gives_the_same_documents(
    tmp_path: Path, base: PrepareSettings, tokenizer_file: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = json_lines(TEXTS)
    for name in ("a.jsonl", "b.json"):
        (tmp_path / name).write_bytes(lines)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(lines))
        (tmp_path / f"{name}.zst").write_bytes(zstandard.compress(lines))
    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=17)
    filled = [each for each in TEXTS if each]
    for source in sorted(tmp_path.iterdir()):
        prefix = tmp_path / f"out_{source.name}"
        manifest = run([source], prefix, replace(base, workers=1))
        assert decoded(Path(f"{prefix}_text_document"), tokenizer_file) == filled, source
        assert manifest["empty_documents"] == len(TEXTS) - len(filled)
        assert manifest["inputs"] == [
            {
                "path": str(source),
                "bytes": source.stat().st_size,
                "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            }
        ]


def test_wikipedia_lines(tmp_path: Path, base: PrepareSettings, tokenizer_file: Path) -> None:
    page = {
        "id": "12",
        "url": "https://a/wiki?curid=12",
        "title": "Cat",
        "text": "A cat.\n\nIt sat.",
    }
    (tmp_path / "wiki.json").write_text(json.dumps(page) + "\n")
    run([tmp_path / "wiki.json"], tmp_path / "out", base)
    assert decoded(tmp_path / "out_text_document", tokenizer_file) == [page["text"]]
    run([tmp_path / "wiki.json"], tmp_path / "out", replace(base, json_key="title"))
    assert decoded(tmp_path / "out_title_document", tokenizer_file) == ["Cat"]


def test_standard_input(tmp_path: Path, base: PrepareSettings, tokenizer_file: Path) -> None:
    work = tmp_path / "out_text_document.parts"
    file = spool_stdin(io.BytesIO(json_lines(TEXTS)), work, "jsonl")
    again = spool_stdin(io.BytesIO(json_lines(TEXTS)), work, "jsonl")
    other = spool_stdin(io.BytesIO(b"{}\n"), work, "jsonl")
    assert file == again != other
    prepare_files([file], tmp_path / "out", base)
    assert decoded(tmp_path / "out_text_document", tokenizer_file) == [
        each for each in TEXTS if each
    ]
    assert not work.exists()
    with pytest.raises(UserError, match="--stdin-format csv: choose jsonl or txt"):
        spool_stdin(io.BytesIO(b""), work, "csv")


def test_minimum_length_is_fleetxs(
    tmp_path: Path, base: PrepareSettings, tokenizer_file: Path
) -> None:
    (tmp_path / "in.txt").write_text("123456789\n\n1234567890\n\n")
    manifest = run([tmp_path / "in.txt"], tmp_path / "out", replace(base, min_length=10))
    assert decoded(tmp_path / "out_text_document", tokenizer_file) == ["1234567890\n"]
    assert manifest["short_documents"] == 1


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, base: PrepareSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install 'fourfold\[parquet\]'"):
        run([tmp_path / "in.parquet"], tmp_path / "out", base)


class RecordedParts:
    """`make_shards` in this process, remembering what the workers would have been given."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(
        self, job: TokenizeJob, parts: Iterable[WorkShard], workers: int, idle: object
    ) -> Iterator[tuple[WorkShard, ShardReport]]:
        maker = job.maker()
        for part in parts:
            self.names.append(part.name)
            yield part, maker.make(part)
        maker.close()


def test_archives_are_left_whole_where_there_are_enough(
    tmp_path: Path, base: PrepareSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is cut is decompressed by one process, those left whole by several."""
    for number in range(4):
        texts = [f"{number} {hashlib.sha256(bytes([i])).hexdigest()}" for i in range(60)]
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(json_lines(texts)))
    large = [hashlib.sha256(bytes([i, i])).hexdigest() for i in range(250)]
    (tmp_path / "5.jsonl.zst").write_bytes(zstandard.compress(json_lines(large)))
    few, all_ = sorted(tmp_path.glob("*.gz")), sorted(tmp_path.glob("*.jsonl.*"))
    parts = RecordedParts()
    monkeypatch.setattr(pipeline, "make_shards", parts)
    run(few, tmp_path / "w4", replace(base, workers=4))
    assert parts.names == [f"file-{number:06d}-000000" for number in range(4)]
    parts.names.clear()
    run(few, tmp_path / "w8", replace(base, workers=8))
    assert all(name.startswith("part-") for name in parts.names) and len(parts.names) > 8
    parts.names.clear()
    run(all_, tmp_path / "a4", replace(base, workers=4))
    assert [name for name in parts.names if name.startswith("file-")] == [
        f"file-{number:06d}-000000" for number in range(4)
    ]
    assert len([name for name in parts.names if name.startswith("part-000004")]) > 8
    monkeypatch.undo()
    for files, name in ((few, "w4"), (few, "w8"), (all_, "a4")):
        run(files, tmp_path / f"one_{name}", base)
        assert content(tmp_path / name) == content(tmp_path / f"one_{name}")


@pytest.mark.parametrize(("chunk_bytes", "lost"), [(150, 0), (150, 300), (999, 1), (1, 10**6)])
def test_one_archive_decompressed_for_all_is_read_as_by_one(
    tmp_path: Path,
    base: PrepareSettings,
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
    lost: int,
) -> None:
    """Whole and broken off, whatever the chunks: a shard beyond the end leaves no trace."""
    texts = [hashlib.sha256(bytes([number])).hexdigest() for number in range(80)]
    archive = gzip.compress(json_lines(texts))
    (tmp_path / "in.jsonl.gz").write_bytes(archive[: max(len(archive) - lost, 12)])
    (tmp_path / "in.jsonl").write_bytes(json_lines(["a"]))
    files = [tmp_path / "in.jsonl.gz", tmp_path / "in.jsonl"]
    settings = replace(base, chunk_bytes=chunk_bytes, allow_damaged_files=True)
    run(files, tmp_path / "one", settings)
    parts = RecordedParts()
    monkeypatch.setattr(pipeline, "make_shards", parts)
    monkeypatch.setattr(pipeline, "EVEN_SHARES", 0)
    run(files, tmp_path / "two", replace(settings, workers=2))
    assert parts.names[0] == "part-000000-000000"
    assert content(tmp_path / "one") == content(tmp_path / "two")


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_what_was_begun_whole_or_cut_ends_that_way(
    tmp_path: Path,
    base: PrepareSettings,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    after: int,
) -> None:
    texts = [hashlib.sha256(bytes([number])).hexdigest() for number in range(250)]
    for number in range(4):
        lines = json_lines(texts) + (b"bad\n" if number == 2 else b"")
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines))
    files = sorted(tmp_path.glob("*.gz"))
    parts = RecordedParts()
    monkeypatch.setattr(pipeline, "make_shards", parts)
    with pytest.raises(DataError, match="not a line of JSON"):
        run(files, tmp_path / "out", replace(base, workers=before, max_bad_lines=0))
    begun = sorted((tmp_path / "out_text_document.parts").glob("*/*.json"))
    assert any(path.name.startswith("file-000000") for path in begun) == (before == 4)
    unread: list[PrepareProgress] = []
    prepare_files(find_inputs(files), tmp_path / "out", replace(base, workers=after), unread.append)
    assert unread[-1].resumed_bytes >= sum(file.stat().st_size for file in files[:3])
    run(files, tmp_path / "fresh", base)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


# Output formats


def test_fleetx_files(tmp_path: Path, base: PrepareSettings, tokenizer_file: Path) -> None:
    """As the original writes them: blanks around a document stripped, empty ones left out."""
    (tmp_path / "in.jsonl").write_bytes(json_lines([" the cat\n", "  ", "", "sat"]))
    run([tmp_path / "in.jsonl"], tmp_path / "out", replace(base, format="fleetx"))
    tokenizer = Tokenizer.load(tokenizer_file)
    documents = [[*tokenizer.encode(each), tokenizer.eos_id] for each in ("the cat", "sat")]
    ids = np.load(tmp_path / "out_ids.npy", allow_pickle=False)
    assert (ids.dtype, ids.tolist()) == (np.uint16, documents[0] + documents[1])
    index = np.load(tmp_path / "out_idx.npz", allow_pickle=False)
    assert (index["lens"].dtype, index["lens"].tolist()) == (np.int32, list(map(len, documents)))
    assert (index["docs"].dtype, index["docs"].tolist()) == (np.int64, [0, 1, 2])
    assert decoded(tmp_path / "out", tokenizer_file) == ["the cat", "sat"]
    saved = io.BytesIO()
    np.save(saved, ids)
    assert (tmp_path / "out_ids.npy").read_bytes() == saved.getvalue()


def test_names_are_megatrons() -> None:
    assert dataset_prefix("d/x", "megatron", "body") == Path("d/x_body_document")
    assert dataset_prefix("d/x", "fleetx", "body") == Path("d/x")


# Bad input

BAD = {
    "invalid JSON": (b'{"text": "cut', "in.jsonl:3: not a line of JSON"),
    "missing key": (b'{"title": "x"}', "in.jsonl:3: no key 'text' (keys: 'title')"),
    "not a string": (b'{"text": 5}', "in.jsonl:3: 'text' is of type int, not a string"),
    "undecodable": (b'{"text": "\xff"}', "in.jsonl:3: not UTF-8"),
    "not an object": (b'"text"', "in.jsonl:3: of type str, not an object"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_lines(tmp_path: Path, base: PrepareSettings, tokenizer_file: Path, kind: str) -> None:
    line, message = BAD[kind]
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines(["one", "two"]) + line + b"\n" + json_lines(["three"]))
    manifest = run([source], tmp_path / "out", base)
    assert decoded(tmp_path / "out_text_document", tokenizer_file) == ["one", "two", "three"]
    dropped = manifest["dropped"]
    assert (dropped["count"], dropped["kinds"]) == (1, {kind: 1})
    (first,) = dropped["first"]
    assert f"{first['path']}:{first['line']}: {first['reason']}".startswith(f"{tmp_path}/{message}")
    with pytest.raises(DataError) as caught:  # --strict
        run([source], tmp_path / "strict", replace(base, max_bad_lines=0))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    assert not list(tmp_path.glob("strict*.bin"))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_truncated_archives(
    tmp_path: Path, base: PrepareSettings, tokenizer_file: Path, ending: str
) -> None:
    compress = gzip.compress if ending == ".gz" else zstandard.compress
    texts = [f"{hashlib.sha256(bytes([number])).hexdigest()}" for number in range(200)]
    source = tmp_path / f"in.jsonl{ending}"
    # Two members: the first is whole, and so is what it holds.
    whole = compress(json_lines(texts[:150]))
    source.write_bytes(whole + compress(json_lines(texts[150:]))[:-40])
    manifests = {}
    for workers in (1, 2):
        settings = replace(base, workers=workers, chunk_bytes=8 * 1000)
        with pytest.raises(DataError, match=r"breaks off\), so the rest.*--allow-damaged-files"):
            run([source], tmp_path / f"w{workers}", settings)
        settings = replace(settings, allow_damaged_files=True)
        manifests[workers] = run([source], tmp_path / f"w{workers}", settings)
    assert manifests[1] == manifests[2]
    found = decoded(tmp_path / "w1_text_document", tokenizer_file)
    assert found == texts[: len(found)]
    assert len(found) >= 150
    (first,) = manifests[1]["dropped"]["first"]
    assert first["line"] == len(found) + 1
    assert first["reason"].startswith("the archive is damaged (it breaks off")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.jsonl.zst", b"not an archive", "the archive is damaged"),
        ("b.txt", "caf\u00e9, na\u00efve\n".encode("latin-1"), "not UTF-8"),
        ("b.txt", b"the cat\n" * 100, "longer than --max-document-mb"),
    ],
)
def test_a_file_nothing_can_be_read_of_is_more_than_a_bad_line(
    tmp_path: Path, base: PrepareSettings, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "a.txt").write_text("the cat\n\nthe rat\n")
    (tmp_path / name).write_bytes(content)
    inputs, settings = [tmp_path / "a.txt", tmp_path / name], replace(base, max_document_bytes=500)
    with pytest.raises(DataError, match=rf"{name}:\d+: .*{message}.*, so .* --allow-damaged-files"):
        run(inputs, tmp_path / "out", settings)
    assert not list(tmp_path.glob("*.bin"))
    manifest = run(inputs, tmp_path / "out", replace(settings, allow_damaged_files=True))
    assert (manifest["documents"], manifest["dropped"]["count"]) == (2, 1)


def test_archives_other_tools_make(
    tmp_path: Path, base: PrepareSettings, tokenizer_file: Path
) -> None:
    """`zstd --long=31`, and gzip members that were padded to whole blocks."""
    texts = [each for each in TEXTS if each]
    half = len(texts) // 2
    long = zstandard.ZstdCompressionParameters(window_log=31)
    # A frame that tells its size shrinks its window to it; one that does not asks for all of it.
    compressor = zstandard.ZstdCompressor(compression_params=long).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(
        compressor.compress(json_lines(texts[:half])) + compressor.flush()
    )
    members = [gzip.compress(json_lines([each])) for each in texts[half:]]
    padded = [member + bytes(-len(member) % 512) + bytes(512 * 9) for member in members]
    (tmp_path / "b.jsonl.gz").write_bytes(b"".join(padded))
    run([tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl.gz"], tmp_path / "out", base)
    assert decoded(tmp_path / "out_text_document", tokenizer_file) == texts


def test_damaged_and_strange_parquet(tmp_path: Path, base: PrepareSettings) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good, bad, values = (tmp_path / f"{name}.parquet" for name in ("good", "bad", "values"))
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"]}), good)
    parquet.write_table(pyarrow.table({"title": ["one"]}), values)
    bad.write_bytes(good.read_bytes()[:-20])
    empty, binary = tmp_path / "empty.parquet", tmp_path / "binary.parquet"
    parquet.ParquetWriter(empty, pyarrow.schema({"text": pyarrow.string()})).close()
    assert parquet.ParquetFile(empty).num_row_groups == 0
    parquet.write_table(pyarrow.table({"text": ["é".encode(), b"\xff"]}), binary)
    strict = replace(base, max_bad_lines=0)
    assert run([good, empty], tmp_path / "some", base)["documents"] == 2
    assert run([empty, binary], tmp_path / "bytes", base)["dropped"]["kinds"] == {"undecodable": 1}
    with pytest.raises(DataError, match=r"binary\.parquet:2: not UTF-8"):
        run([empty, binary], tmp_path / "strict", strict)
    with pytest.raises(DataError, match=r"bad\.parquet:1: the parquet file is damaged"):
        run([good, bad], tmp_path / "out", base)
    manifest = run([good, bad], tmp_path / "out", replace(base, allow_damaged_files=True))
    assert manifest["dropped"]["kinds"] == {"not a string": 1, "damaged file": 1}
    assert manifest["dropped"]["first"][0]["line"] == 2
    with pytest.raises(DataError, match=r"values\.parquet: no column 'text' \(columns: 'title'\)"):
        run([values], tmp_path / "none", base)


@pytest.mark.parametrize("workers", [1, 2])
def test_too_many_bad_lines_stop_at_the_same_place_and_can_be_allowed(
    tmp_path: Path, base: PrepareSettings, workers: int
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes((json_lines(["good text " * 9]) + b"bad\n" + b"{}\n") * 30)
    settings = replace(base, workers=workers, max_bad_lines=30)
    with pytest.raises(DataError) as caught:
        run([source], tmp_path / "out", settings)
    message = str(caught.value)
    # 1000 bytes to a part: the second takes the count beyond the limit.
    assert message.startswith("32 bad lines were skipped (16 invalid JSON, 16 missing key):")
    assert f"{source}:2: not a line of JSON" in message
    assert "--max-bad-lines 30" in message
    assert list((tmp_path / "out_text_document.parts").glob("*/part-*.json"))
    manifest = run([source], tmp_path / "out", replace(settings, max_bad_lines=60))
    assert manifest["dropped"]["count"] == 60
    assert manifest["documents"] == 30


def test_nothing_in_the_input(tmp_path: Path, base: PrepareSettings) -> None:
    (tmp_path / "in.jsonl").write_bytes(json_lines(["", ""]) + b"{}\n")
    with pytest.raises(DataError, match=r"no document with any text[^$]*in\.jsonl:3: no key"):
        run([tmp_path / "in.jsonl"], tmp_path / "out", base)


# Plans and outputs that are there already


def test_the_same_again_is_not_done_again(tmp_path: Path, base: PrepareSettings) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines(TEXTS))
    manifest = run([source], tmp_path / "out", base)
    before = (tmp_path / "out_text_document.bin").stat().st_mtime_ns
    assert run([source], tmp_path / "out", replace(base, workers=2)) == manifest
    assert (tmp_path / "out_text_document.bin").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"exists already.*--overwrite"):
        run([source], tmp_path / "out", replace(base, append_eod=False))
    changed = replace(base, append_eod=False, overwrite=True)
    assert run([source], tmp_path / "out", changed)["tokens"] < manifest["tokens"]


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_result_that_was_damaged_is_not_finished(
    tmp_path: Path, base: PrepareSettings, ending: str, damage: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    manifest = run([tmp_path / "in.jsonl"], tmp_path / "out", base)
    file = tmp_path / f"out_text_document{ending}"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:4])
    found = "is missing" if damage == "missing" else "has 4 bytes"
    with pytest.raises(DataError, match=f"{file.name}: {found}, {len(content)} were.*--overwrite"):
        run([tmp_path / "in.jsonl"], tmp_path / "out", base)
    assert run([tmp_path / "in.jsonl"], tmp_path / "out", replace(base, overwrite=True)) == manifest
    assert file.read_bytes() == content


def begun(tmp_path: Path, base: PrepareSettings) -> Path:
    """A run that stopped half-way, at a bad line."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines(TEXTS) + b"bad\n")
    with pytest.raises(DataError, match="not a line of JSON"):
        run([source], tmp_path / "out", replace(base, max_bad_lines=0))
    return source


def test_unfinished_work_is_gone_on_with(
    tmp_path: Path, base: PrepareSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = begun(tmp_path, base)

    def unread(*_: object) -> None:
        raise AssertionError("a finished part was read again")

    seen: list[PrepareProgress] = []
    with monkeypatch.context() as patch:
        patch.setattr(ChunkReader, "documents", unread)
        prepare_files(find_inputs([source]), tmp_path / "out", base, seen.append)
    assert seen[-1].resumed_bytes == seen[-1].source_total == source.stat().st_size
    run([source], tmp_path / "fresh", base)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"append_eod": False}, "append_eod True instead of False"),
        ({"min_length": 3}, "min_length 0 instead of 3"),
        ({"tokenizer": "other"}, "another tokenizer"),
        ({}, r"in\.jsonl changed since"),
    ],
)
def test_unfinished_work_of_another_plan_is_refused(
    tmp_path: Path, base: PrepareSettings, change: dict[str, Any], message: str
) -> None:
    source = begun(tmp_path, base)
    if "tokenizer" in change:
        change = {"tokenizer": str(train(["other text " * 9], 260).save(tmp_path))}
    if not change:
        source.write_bytes(json_lines(TEXTS[:50]))
    with pytest.raises(UserError, match=f"out_text_document.parts: holds unfinished.*{message}"):
        run([source], tmp_path / "out", replace(base, **change))
    manifest = run([source], tmp_path / "out", replace(base, overwrite=True, **change))
    assert manifest == run([source], tmp_path / "fresh", replace(base, **change))


def test_two_runs_at_once_are_noticed(tmp_path: Path, base: PrepareSettings) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines(TEXTS))

    def second(_: PrepareProgress) -> None:
        with pytest.raises(
            UserError, match=r"another `fourfold data prepare` is already running there"
        ):
            run([source], tmp_path / "out", base)

    prepare_files(find_inputs([source]), tmp_path / "out", base, second)


def unlinked_as_on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is removed while this process has it open lives on under another name."""
    unlink = os.unlink

    def renamed(path: str | Path, *, dir_fd: int | None = None) -> None:
        inode = os.stat(path, dir_fd=dir_fd).st_ino
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.fstat(int(descriptor)).st_ino == inode:
                    name = Path(path).with_name(f".nfs{inode}")
                    os.rename(path, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                    return
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", renamed)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="tells open files by /proc")
def test_the_work_directory_can_be_removed_from_nfs(
    tmp_path: Path, base: PrepareSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    with monkeypatch.context() as patch:
        unlinked_as_on_nfs(patch)
        run([tmp_path / "in.jsonl"], tmp_path / "out", base)
    assert sorted(path.name for path in tmp_path.iterdir() if ".nfs" not in path.name) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
        "out_text_document.json",
    ]


def test_a_work_directory_that_stays_is_no_failure(
    tmp_path: Path,
    base: PrepareSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def busy(path: Path, **_: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    monkeypatch.setattr(pipeline.shutil, "rmtree", busy)
    assert run([tmp_path / "in.jsonl"], tmp_path / "out", base)["documents"] > 0
    assert "out_text_document.parts: no longer needed, but cannot be removed" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    tmp_path: Path,
    base: PrepareSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    monkeypatch.setattr("fcntl.flock", refused)
    assert run([tmp_path / "in.jsonl"], tmp_path / "out", base)["documents"] > 0
    assert "this file system has no locks" in caplog.text


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "fix that")]
)
@pytest.mark.parametrize("where", ["mkdir", "lock", "plan"])
def test_a_disk_that_cannot_be_written_from_the_start(
    tmp_path: Path,
    base: PrepareSettings,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    remedy: str,
    where: str,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    files = find_inputs([tmp_path / "in.jsonl"])
    at = {
        "mkdir": (Path, "mkdir"),
        "lock": (manifest_records, "_hold"),
        "plan": (manifest_records, "write_json"),
    }
    monkeypatch.setattr(*at[where], failing)
    with pytest.raises(DataError, match=f"out_text_document: cannot be written .*; {remedy}"):
        prepare_files(files, tmp_path / "out", base)


def test_hashes_of_the_input_are_kept(
    tmp_path: Path, base: PrepareSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(json_lines(TEXTS))
    second.write_bytes(json_lines(TEXTS) + b"bad\n")
    monkeypatch.setattr(manifest_records, "KEEP_SECONDS", 0.0)
    make_shards = _PrepareRun.make_shards

    def after_hashing(self: _PrepareRun) -> None:
        hashes = self.directory / "hashes.json"
        while not hashes.exists() or len(json.loads(hashes.read_bytes())) < 2:
            time.sleep(0.01)
        make_shards(self)

    with monkeypatch.context() as patch:
        patch.setattr(_PrepareRun, "make_shards", after_hashing)
        with pytest.raises(DataError, match="not a line of JSON"):
            run([first, second], tmp_path / "out", replace(base, max_bad_lines=0))
    monkeypatch.setattr(
        manifest_records.InputHashes, "_hash", lambda *_: pytest.fail("hashed again")
    )
    manifest = run([first, second], tmp_path / "out", base)
    assert [entry["sha256"] for entry in manifest["inputs"]] == [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)
    ]


def test_an_input_changed_meanwhile_is_noticed(tmp_path: Path, base: PrepareSettings) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines(TEXTS))
    files = find_inputs([source])
    source.write_bytes(json_lines(TEXTS[:50]))
    with pytest.raises(DataError, match=r"in\.jsonl: changed while it was being prepared"):
        prepare_files(files, tmp_path / "out", base)
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "--workers 0: choose 1 or more"),
        ({"format": "arrow"}, "--format arrow: choose megatron or fleetx"),
        ({"document_separator": "page"}, "--document-separator page"),
        ({"max_document_bytes": 0}, "--max-document-mb 0"),
        ({"json_key": "a/b"}, "--json-key 'a/b'"),
    ],
)
def test_impossible_settings(
    tmp_path: Path, base: PrepareSettings, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "in.txt").write_text("x")
    with pytest.raises(UserError, match=message):
        run([tmp_path / "in.txt"], tmp_path / "out", replace(base, **change))
