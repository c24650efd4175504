"""YAML nodes: the key tree as written, before types are known, with the line of each value.

An `Entry` keeps where a value was written ("gpt.yaml:12" or "-o Engine.max_steps=10") and in
which layer: base files (`_base_`) come first, then the file, then each `-o`; a later layer wins.
Sections are dictionaries of entries, everything else is a plain Python value.

Only plain data is read: no tags, no objects. It is read from the parser's events, not from composed
nodes, so that nesting, size and aliases are bounded before anything is built. Scalars mean what the
originals' files mean by them: `1e-5` is a number and `None` is null, which YAML 1.1 would take for
strings; dates and sexagesimal numbers are strings. A `ConfigError` names file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fourfold import storage
from fourfold.errors import ConfigError


@dataclass
class Entry:
    """A value, or a section of entries, and where it was written."""

    value: Any
    source: str
    layer: int = 0

    @property
    def is_section(self) -> bool:
        return isinstance(self.value, dict)


Tree = dict[str, Entry]


def find(tree: Tree, path: str) -> Entry | None:
    """The entry at "Engine.save_load.ckpt_dir", or None."""
    entry: Entry | None = None
    for name in path.split("."):
        entry = tree.get(name)
        if entry is None:
            return None
        tree = entry.value if entry.is_section else {}
    return entry


def value_of(tree: Tree, path: str, default: Any = None) -> Any:
    """The plain value at `path`; null and absent are `default`."""
    entry = find(tree, path)
    return default if entry is None or entry.value is None else entry.value


def take(tree: Tree, path: str) -> Entry | None:
    """Remove and return the entry at `path`, with the sections that this leaves empty."""
    name, _, rest = path.partition(".")
    entry = tree.get(name)
    if entry is None or not rest:
        return tree.pop(name, None)
    if not entry.is_section:
        return None
    taken = take(entry.value, rest)
    if taken is not None and not entry.value:
        del tree[name]
    return taken


def walk(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """Every entry that is no section, with its path."""
    for name, entry in tree.items():
        if entry.is_section:
            yield from walk(entry.value, f"{prefix}{name}.")
        else:
            yield prefix + name, entry


def put(tree: Tree, path: str, entry: Entry) -> Entry | None:
    """Store `entry` at `path` unless something there takes precedence.

    A later layer takes precedence and, within a layer, what is not null. Returns the entry that
    contradicts this one in the same layer, if there is one.
    """
    *parents, name = path.split(".")
    for parent in parents:
        inner = tree.setdefault(parent, Entry({}, entry.source, entry.layer))
        if not inner.is_section:
            if inner.value is not None and inner.layer >= entry.layer:
                return inner
            inner.value, inner.source, inner.layer = {}, entry.source, entry.layer
        tree = inner.value
    there = tree.get(name)
    if there is not None and there.is_section and entry.value is None:
        return None
    if there is None or there.layer < entry.layer:
        tree[name] = entry
        return None
    if there.layer > entry.layer or entry.value is None or same_value(there, entry):
        return None
    if there.value is None:
        tree[name] = entry
        return None
    return there


def same_value(one: Entry, other: Entry) -> bool:
    return type(one.value) is type(other.value) and bool(one.value == other.value)


def merge(base: Tree, over: Tree) -> Tree:
    """`base` with the values of `over` in it; `_inherited_: False` in a section starts afresh."""
    merged = {} if _starts_afresh(over) else dict(base)
    for name, entry in over.items():
        if name == "_inherited_":
            continue
        if entry.is_section:
            below = merged.get(name)
            inherited = below.value if below is not None and below.is_section else {}
            merged[name] = Entry(merge(inherited, entry.value), entry.source, entry.layer)
        elif not (entry.value is None and _is_section(merged.get(name))):
            # An empty `Fused:` says nothing about the keys below it.
            merged[name] = entry
    return merged


def _starts_afresh(tree: Tree) -> bool:
    inherited = tree.get("_inherited_")
    return inherited is not None and inherited.value is False


def _is_section(entry: Entry | None) -> bool:
    return entry is not None and entry.is_section


# -- reading YAML -------------------------------------------------------------------------------

LARGEST_FILE_BYTES = 1_000_000
LARGEST_NODES = 100_000  # after aliases are expanded, so that a small file cannot fill the memory
DEEPEST_NESTING = 50

_NULL = {"", "~", "null", "Null", "NULL", "None"}
_TRUE = {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"}
_FALSE = {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]{0,39})")
_FLOAT = re.compile(r"[-+]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][-+]?[0-9]{1,5})?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF|nan|NaN|NAN)")


def parse_scalar(text: str) -> Any:
    """The value of an unquoted word, in YAML and after `-o`."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))  # YAML lets them stand anywhere, Python does not
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Reader:
    """Builds entries from the event stream of one document."""

    def __init__(self, text: str, name: str, layer: int) -> None:
        self.events = yaml.parse(text, Loader=yaml.SafeLoader)
        self.name = name
        self.layer = layer
        self.anchors: dict[str, Entry] = {}
        self.nodes = 0

    def document(self) -> Entry:
        root = Entry(None, f"{self.name}:1", self.layer)
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.error(event, "a second document starts; keep one per file")
                root = self.node(next(self.events), 0)
        return root

    def node(self, event: yaml.Event, depth: int) -> Entry:
        self.count(event)
        if depth > DEEPEST_NESTING:
            raise self.error(event, f"nested deeper than {DEEPEST_NESTING} levels")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self.error(event, f"*{event.anchor} refers to no finished &{event.anchor}")
            return self.copy(self.anchors[event.anchor], event)
        assert isinstance(event, yaml.NodeEvent)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self.error(event, f"tag {tag!r} is not allowed; write plain values")
        entry = Entry(self.content(event, depth), self.source(event), self.layer)
        if event.anchor is not None:
            self.anchors[event.anchor] = entry
        return entry

    def content(self, event: yaml.Event, depth: int) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                items.append(plain(self.node(item, depth + 1)))
            return items
        assert isinstance(event, yaml.ScalarEvent)
        return parse_scalar(event.value) if event.style is None else event.value

    def mapping(self, depth: int) -> Tree:
        tree: Tree = {}
        merged: Tree = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self.error(event, "a key must be a plain word")
            name, plain_key = event.value, event.style is None
            if "." in name:
                raise self.error(event, f"{name}: a dot in a key; write one key below the other")
            entry = self.node(next(self.events), depth + 1)
            entry.source = self.source(event)
            if name == "<<" and plain_key and entry.is_section:
                merged |= entry.value
            elif name in tree:
                raise self.error(event, f"{name} is given twice; first at {tree[name].source}")
            else:
                tree[name] = entry
        return merged | tree

    def copy(self, entry: Entry, event: yaml.Event) -> Entry:
        """An alias stands for its own copy, so that an override of one leaves the other alone."""
        self.count(event)
        value = entry.value
        if entry.is_section:
            value = {name: self.copy(inner, event) for name, inner in value.items()}
        elif isinstance(value, list):
            self.nodes += len(repr(value))  # at least the number of items, however nested
            value = list(value)
        return Entry(value, self.source(event), self.layer)

    def count(self, event: yaml.Event) -> None:
        self.nodes += 1
        if self.nodes > LARGEST_NODES:
            raise self.error(event, f"more than {LARGEST_NODES} values; is this a configuration?")

    def source(self, event: yaml.Event) -> str:
        assert event.start_mark is not None
        return f"{self.name}:{event.start_mark.line + 1}"

    def error(self, event: yaml.Event, text: str) -> ConfigError:
        return ConfigError([f"{self.source(event)}: {text}"])


def plain(entry: Entry) -> Any:
    """The entry's value without sources."""
    if entry.is_section:
        return {name: plain(inner) for name, inner in entry.value.items()}
    return entry.value


def parse_document(text: str, name: str, layer: int = 0) -> Entry:
    """The root entry of YAML `text`; `name` is what errors call it."""
    try:
        return _Reader(text, name, layer).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        cause = ", ".join(part for part in (error.context, error.problem) if part)
        hint = _indentation_hint(text, line)
        raise ConfigError([f"{name}:{line}: not valid YAML: {cause}{hint}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: not valid YAML: {str(error).splitlines()[0]}"]) from None


def _indentation_hint(text: str, line: int) -> str:
    """Snippets of the documents are printed at two indentations; pasted together they clash."""
    lines = text.splitlines()
    content = [row for row in lines if row.strip() and not row.lstrip().startswith("#")]
    if not content or line > len(lines):
        return ""
    first, here = content[0], lines[line - 1]
    outdented = len(first) - len(first.lstrip()) > len(here) - len(here.lstrip())
    return f"; start it at the column of {first.strip().split(':')[0]!r}" if outdented else ""


def read_tree(path: str | Path) -> Tree:
    """The entries of a file, here or at an address, on top of those of its `_base_`."""
    file = storage.local_path(path)
    name = str(path) if storage.address_of(file) is None else storage.name_of(file)
    return _read_inherited(file, name, ())


def _read_inherited(path: Path, name: str, followed: tuple[Path, ...]) -> Tree:
    text = _read_text(path, name)
    identity = path.resolve()
    if identity in followed:
        raise ConfigError(
            [f"{name}: _base_ leads back to this file; remove one of the _base_ keys"]
        )
    # A base's layer is below this file's; the number of `_base_` steps bounds how far below.
    root = parse_document(text, name, layer=-len(followed))
    if root.value is None:
        return {}
    if not root.is_section:
        raise ConfigError([f"{root.source}: the file must hold sections such as `Model:`"])
    tree: Tree = root.value
    base = tree.pop("_base_", None)
    if base is None or base.value is None:
        return merge({}, tree)
    if not isinstance(base.value, str):
        raise ConfigError([f"{base.source}: _base_={base.value!r}: give the path of one file"])
    is_address = storage.is_address(base.value)
    base_path = storage.local_path(base.value) if is_address else path.parent / base.value
    name = storage.name_of(base_path)
    if not base_path.is_file() and name == str(base_path):
        raise ConfigError([f"{base.source}: _base_={base.value!r}: no file {base_path}"])
    return merge(_read_inherited(base_path, name, (*followed, identity)), tree)


def _read_text(path: Path, name: str) -> str:
    address = storage.address_of(path)
    try:
        if address is not None:
            # Small, and asked for once: always as it is now.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(storage.read(address, 0, LARGEST_FILE_BYTES + 1))
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"{name}: cannot be read: {reason}"]) from None
    if len(content) > LARGEST_FILE_BYTES:
        raise ConfigError([f"{name}: larger than {LARGEST_FILE_BYTES} bytes; not a configuration"])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError([f"{name}:{line}: not UTF-8 text; save the file as UTF-8"]) from None
