"""A corpus from the text that ships with Python; nothing is downloaded.

`write_corpus` gathers the topics of `help()`, the docstrings of the modules compiled into the
interpreter and what is documented of each module of the standard library, one document each, into
`corpus.jsonl`: one `{"text": ...}` per line, about 4 MB, less where sources were stripped. The same
installation always gives the same bytes.

Of a module that is its docstring, and every class and function that has one: the line that defines
it, the docstring, and the code of functions that are short. Tables, tests and long code teach a
model that trains for minutes little but their own kind, and there is ten times as much of them.

Documents are in the order of a hash of their names, so that any prefix of the file, and any
split of it into ranges, has the same mixture of kinds and subjects.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from fourfold.atomic_files import replacing
from fourfold.errors import DataError, UserError

CORPUS_FILE = "corpus.jsonl"

# Installed packages are not the standard library, and differ from machine to machine.
_FOREIGN_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__"}
# Tests are missing from many installations; the docstrings of encodings name a table each.
_SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "encodings"}
_SHORT_BODY = 12  # lines of a function after its docstring

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
        skipped = _FOREIGN_DIRECTORIES | _SKIPPED_DIRECTORIES
        directories[:] = [name for name in directories if name not in skipped]
        for file_name in files:
            path = Path(parent, file_name)
            name = path.relative_to(library).as_posix()
            if path.suffix != ".py":
                continue
            try:
                yield f"source:{name}", documented(path.read_text(encoding="utf-8"))
            except (UnicodeDecodeError, OSError, SyntaxError, ValueError, RecursionError):
                continue  # odd encodings, other Pythons; files this user may not read


def documented(source: str) -> str:
    """What is documented of a module, in the order and with the indentation of its source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in old docstrings
        tree = ast.parse(source)
    lines = source.split("\n")
    parts = ["\n".join(lines[first - 1 : last]) for first, last in _documented_lines(tree)]
    return "\n\n".join(parts) + "\n"


def _documented_lines(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last line of each part, counted from 1."""
    if ast.get_docstring(tree, clean=False) is not None:
        yield tree.body[0].lineno, tree.body[0].end_lineno or 0
    pending = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                last, end = node.body[0].end_lineno or 0, node.end_lineno or 0
                is_whole = not isinstance(node, ast.ClassDef) and end - last <= _SHORT_BODY
                yield first, end if is_whole else last
            if not isinstance(node, ast.ClassDef):
                continue
        # Classes, and what is defined under a condition.
        inner = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)]
        pending += reversed(inner)


def _capped(documents: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    total = 0
    for text in documents:
        total += len(text.encode())
        if max_bytes is not None and total > max_bytes:
            return
        yield text
