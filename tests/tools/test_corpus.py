"""The built-in corpus: real text, the same every time, honest on a stripped Python."""

from __future__ import annotations

import json
import logging
import sys
import sysconfig
from pathlib import Path

import pytest

from fourfold.errors import DataError, UserError
from fourfold.tools.prepare.corpus import write_corpus

CAP = 2_000_000


def texts_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    records = [json.loads(line) for line in lines]
    assert all(record.keys() == {"text"} for record in records)
    return [record["text"] for record in records]


def installation(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture
def use_library(monkeypatch: pytest.MonkeyPatch):
    def use(library: Path) -> None:
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))

    return use


@pytest.fixture
def without_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data", None)


@pytest.fixture
def without_compiled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "builtin_module_names", ())


def test_this_installation_capped(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, max_bytes=CAP)
    texts = texts_of(path)
    assert 0.5 * CAP < sum(len(text.encode()) for text in texts) <= CAP
    assert len(set(texts)) == len(texts) > 50
    assert all(text.strip() for text in texts)
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_same_bytes_every_time_and_a_cap_takes_a_prefix(tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "a", max_bytes=CAP).read_bytes()
    assert write_corpus(tmp_path / "b", max_bytes=CAP).read_bytes() == first
    shorter = write_corpus(tmp_path / "c", max_bytes=CAP // 2).read_bytes()
    assert first.startswith(shorter)
    assert len(shorter) < len(first)


def test_all_kinds_of_text_are_there(tmp_path: Path) -> None:
    texts = texts_of(write_corpus(tmp_path))
    source = (Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py").read_text()
    topics = pytest.importorskip("pydoc_data.topics").topics
    assert source in texts
    assert topics["lambda"] in texts
    assert any(text.startswith("builtins\n") and "\nabs\n\n" in text for text in texts)


def test_only_readable_sources_of_the_library(
    tmp_path: Path, use_library, without_topics: None, without_compiled_modules: None
) -> None:
    library = installation(
        tmp_path / "lib",
        {
            "one.py": "first = 1\n",
            "package/two.py": "zweite = 'ü'\r\n",
            "package/copy_of_one.py": "first = 1\n",
            "empty.py": "\n",
            "odd_encoding.py": b"# \xe9\n",
            "notes.txt": "not a source",
            "site-packages/foreign.py": "foreign",
            "dist-packages/foreign.py": "foreign",
            "__pycache__/one.py": "cached",
            "pydoc_data/topics.py": "topics = {}",
        },
    )
    use_library(library)
    texts = texts_of(write_corpus(tmp_path / "out"))
    assert sorted(texts) == ["first = 1\n", "zweite = 'ü'\n"]


def test_missing_topics_are_said(
    tmp_path: Path, use_library, without_topics: None, caplog: pytest.LogCaptureFixture
) -> None:
    use_library(installation(tmp_path / "lib", {"one.py": "first = 1\n"}))
    with caplog.at_level(logging.WARNING):
        texts = texts_of(write_corpus(tmp_path / "out"))
    assert "first = 1\n" in texts
    assert "no help topics" in caplog.text


def test_a_zipped_library_is_said(
    tmp_path: Path, use_library, caplog: pytest.LogCaptureFixture
) -> None:
    use_library(tmp_path / "python311.zip")
    with caplog.at_level(logging.WARNING):
        assert texts_of(write_corpus(tmp_path / "out"))
    assert "no library sources" in caplog.text


def test_an_installation_without_any_text_is_refused(
    tmp_path: Path, use_library, without_topics: None
) -> None:
    use_library(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"neither help topics nor library sources under .*nothing"):
        write_corpus(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("cap", [0, -5])
def test_a_cap_without_room_is_refused(tmp_path: Path, cap: int) -> None:
    with pytest.raises(UserError, match=f"max_bytes={cap}"):
        write_corpus(tmp_path, max_bytes=cap)


def test_a_cap_below_the_first_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="max_bytes=1 is smaller than the first document"):
        write_corpus(tmp_path, max_bytes=1)
    assert list(tmp_path.iterdir()) == []
