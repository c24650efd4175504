"""The built-in corpus: real text, the same every time, honest on a stripped Python."""

from __future__ import annotations

import json
import logging
import sys
import sysconfig
from pathlib import Path

import pytest

from fourfold.errors import DataError, UserError
from fourfold.tools.prepare.corpus import documented, write_corpus

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


def test_this_installation_capped_is_a_prefix_of_it(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a", max_bytes=CAP)
    texts = texts_of(path)
    assert 0.5 * CAP < sum(len(text.encode()) for text in texts) <= CAP
    assert len(set(texts)) == len(texts) > 50
    assert all(text.strip() for text in texts)
    assert [file.name for file in path.parent.iterdir()] == ["corpus.jsonl"]
    # Gathered anew, so the bytes are the same every time, too.
    shorter = write_corpus(tmp_path / "b", max_bytes=CAP // 2).read_bytes()
    assert path.read_bytes().startswith(shorter)
    assert 0 < len(shorter) < path.stat().st_size


def test_all_kinds_of_text_are_there(tmp_path: Path) -> None:
    texts = texts_of(write_corpus(tmp_path))
    source = (Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py").read_text()
    topics = pytest.importorskip("pydoc_data.topics").topics
    assert documented(source) in texts
    assert topics["lambda"] in texts
    assert any(text.startswith("builtins\n") and "\nabs\n\n" in text for text in texts)


def test_only_readable_sources_of_the_library(
    tmp_path: Path, use_library, without_topics: None, without_compiled_modules: None
) -> None:
    library = installation(
        tmp_path / "lib",
        {
            "one.py": "'The first.'\nfirst = 1\n",
            "package/two.py": "'Die zweite, ü.'\r\n",
            "package/copy_of_one.py": "'The first.'\n",
            "table.py": "table = [1, 2, 3]\n",
            "empty.py": "\n",
            "of_another_python.py": "print 'old'\n",
            "zeros.py": "'\0'",
            "odd_encoding.py": b"# \xe9\n",
            "notes.txt": "not a source",
            "site-packages/foreign.py": "'foreign'",
            "dist-packages/foreign.py": "'foreign'",
            "__pycache__/one.py": "'cached'",
            "package/tests/test_two.py": "'A test.'",
            "test/test_one.py": "'A test.'",
            "encodings/cp1.py": "'A table of characters.'",
        },
    )
    use_library(library)
    texts = texts_of(write_corpus(tmp_path / "out"))
    assert sorted(texts) == ["'Die zweite, ü.'\n", "'The first.'\n"]


MODULE = '''"""What the module is for.

More of it.
"""
import os
CONSTANT = {"a": 1}

def short(x):
    """Half of x."""
    return x / 2

def long(x):
    r"""Many lines follow."""
    x = 1
    x = 2
    x = 3
    x = 4
    x = 5
    x = 6
    x = 7
    x = 8
    x = 9
    x = 10
    x = 11
    x = 12
    return x

def silent(x):
    return x

if os.name == "posix":
    class Thing(Exception):
        """A thing."""

        attribute = 1

        def silent(self):
            def inner():
                """Nobody's business."""

        @property
        def part(self):
            """A part of it."""
            return self.attribute
else:
    async def other(): "One line."
'''

DOCUMENTED = '''"""What the module is for.

More of it.
"""

def short(x):
    """Half of x."""
    return x / 2

def long(x):
    r"""Many lines follow."""

    class Thing(Exception):
        """A thing."""

        @property
        def part(self):
            """A part of it."""
            return self.attribute

    async def other(): "One line."
'''


def test_of_a_module_what_is_documented(recwarn: pytest.WarningsRecorder) -> None:
    assert documented(MODULE) == DOCUMENTED
    assert documented('def odd():\n    "\\d"\n').startswith("def odd():")
    assert documented("nothing = 1\n") == "\n"
    assert not recwarn.list


@pytest.mark.parametrize("name", ["queue.py", "heapq.py", "json/encoder.py", "turtle.py"])
def test_lines_of_a_module_are_those_of_its_source(name: str) -> None:
    source = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
    of_source = iter(source.split("\n"))
    kept = [line for line in documented(source).split("\n") if line]
    assert all(line in of_source for line in kept), "each once, in their order"


def test_missing_topics_are_said(
    tmp_path: Path, use_library, without_topics: None, caplog: pytest.LogCaptureFixture
) -> None:
    use_library(installation(tmp_path / "lib", {"one.py": "'The first.'\n"}))
    with caplog.at_level(logging.WARNING):
        texts = texts_of(write_corpus(tmp_path / "out"))
    assert "'The first.'\n" in texts
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


def test_a_cap_below_the_first_document_is_refused(
    tmp_path: Path, use_library, without_compiled_modules: None
) -> None:
    use_library(installation(tmp_path / "library", {"a.py": '"""Some text."""'}))
    tmp_path /= "corpus"
    with pytest.raises(DataError, match="max_bytes=1 is smaller than the first document"):
        write_corpus(tmp_path, max_bytes=1)
    assert list(tmp_path.iterdir()) == []
