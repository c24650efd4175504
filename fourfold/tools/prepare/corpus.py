"""A corpus from the text that ships with Python; nothing is downloaded.

`write_corpus` gathers the topics of `help()`, the docstrings of the modules compiled into the
interpreter and the sources of the standard library, one document each, into `corpus.jsonl`: one
`{"text": ...}` per line, about 30 MB on a full installation and less where tests or sources were
stripped. The same installation always gives the same bytes.

Documents are in the order of a hash of their names, so that any prefix of the file, and any
split of it into ranges, has the same mixture of kinds and subjects.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from fourfold.atomic_files import replacing
from fourfold.errors import DataError, UserError

CORPUS_FILE = "corpus.jsonl"

# Installed packages are not the standard library, and differ from machine to machine.
_FOREIGN_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__"}

_log = logging.getLogger(__name__)


def write_corpus(directory: str | Path, max_bytes: int | None = None) -> Path:
    """Write `corpus.jsonl` into `directory` and return its path.

    With `max_bytes`, documents are taken in order until the next one would carry their text
    (as UTF-8) beyond that many bytes.
    """
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"max_bytes={max_bytes}: a corpus needs at least one byte; choose more")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / CORPUS_FILE
    with replacing(path) as aside:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            written = 0
            for text in _capped(_documents(), max_bytes):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += 1
        if written == 0:
            raise DataError(
                f"max_bytes={max_bytes} is smaller than the first document of the corpus; "
                "choose 100000 or more"
            )
    return path


def _documents() -> list[str]:
    """All documents, each text once, in the order of their names' hashes."""
    topics = dict(_topics())
    sources = dict(_sources(Path(sysconfig.get_path("stdlib"))))
    if not topics and not sources:
        raise DataError(
            f"this Python ({sys.executable}) carries neither help topics nor library sources under "
            f"{sysconfig.get_path('stdlib')}, so there is no built-in corpus; use a full "
            "installation of Python, or prepare text of your own"
        )
    for kind, found in (("help topics", topics), ("library sources", sources)):
        if not found:
            _log.warning("this Python carries no %s; the built-in corpus is without them", kind)
    named = topics | sources | dict(_compiled_module_docs())
    in_order = sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest())
    return list({named[name]: None for name in in_order if named[name].strip()})


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data import topics
    except ImportError:
        return
    for name, text in topics.topics.items():
        yield f"topic:{name}", text


def _compiled_module_docs() -> Iterator[tuple[str, str]]:
    """The docstrings of modules written in C, which have no source to read them from."""
    for name in sys.builtin_module_names:
        module = importlib.import_module(name)
        sections = [f"{name}\n\n{inspect.getdoc(module) or ''}"]
        for member_name, member in sorted(vars(module).items()):
            doc = getattr(member, "__doc__", None)
            is_documented = inspect.isroutine(member) or inspect.isclass(member)
            if is_documented and isinstance(doc, str) and not member_name.startswith("_"):
                sections.append(f"{member_name}\n\n{inspect.cleandoc(doc)}")
        yield f"module:{name}", "\n\n\n".join(sections) + "\n"


def _sources(library: Path) -> Iterator[tuple[str, str]]:
    for parent, directories, files in os.walk(library):
        directories[:] = [name for name in directories if name not in _FOREIGN_DIRECTORIES]
        for file_name in files:
            path = Path(parent, file_name)
            name = path.relative_to(library).as_posix()
            # The topics are documents of their own; their source would repeat them.
            if path.suffix != ".py" or name == "pydoc_data/topics.py":
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # fixtures in odd encodings; files this user may not read
            yield f"source:{name}", text


def _capped(documents: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    total = 0
    for text in documents:
        total += len(text.encode())
        if max_bytes is not None and total > max_bytes:
            return
        yield text
