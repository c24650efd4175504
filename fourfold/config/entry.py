"""The key tree as it was written, before types are known.

An `Entry` keeps where a value was written ("gpt.yaml:12" or "-o Engine.max_steps=10") and in
which layer: base files come first, then the file, then each `-o`; a later layer wins. Sections
are dictionaries of entries, everything else is a plain Python value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    value: Any
    source: str
    layer: int = 0

    @property
    def is_section(self) -> bool:
        return isinstance(self.value, dict)


Tree = dict[str, Entry]


@dataclass
class Report:
    """What is to be said about a configuration, collected over all stages of loading it."""

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def problem(self, source: str, text: str) -> None:
        self.problems.append(f"{source}: {text}")

    def notice(self, source: str, text: str) -> None:
        self.notices.append(f"{source}: {text}")


def in_reading_order(lines: list[str]) -> list[str]:
    """Each line once: those of files by line number, then those of overrides."""

    def place(line: str) -> tuple[bool, str, int]:
        file, _, rest = line.partition(":")
        number = rest.partition(":")[0]
        override = line.startswith("-o ")
        return override, "" if override else file, int(number) if number.isdecimal() else 0

    return sorted(dict.fromkeys(lines), key=place)


@dataclass
class Findings:
    """Says what is wrong or remarkable about values, at the place they were written.

    A check names the keys it looked at. It stays silent when one of them was already reported,
    or is what a misspelt key was meant to be: it then saw a default, not what the user wrote.
    """

    tree: Tree
    file: str
    report: Report
    reported: set[str]

    def problem(self, text: str, *paths: str) -> None:
        if not self._saw_defaults(paths):
            self.report.problem(self.source(*paths), text)

    def notice(self, text: str, *paths: str) -> None:
        if not self._saw_defaults(paths):
            self.report.notice(self.source(*paths), text)

    def given(self, path: str) -> bool:
        return not self._saw_defaults((path,)) and value_of(self.tree, path) is not None

    def _saw_defaults(self, paths: tuple[str, ...]) -> bool:
        return any(f"{path}.".startswith(f"{bad}.") for path in paths for bad in self.reported)

    def layer(self, path: str) -> int:
        entry = find(self.tree, path)
        return 0 if entry is None else entry.layer

    def source(self, *paths: str) -> str:
        """Where the first of these keys with a value was written, else the first at all."""
        entries = [entry for path in paths if (entry := find(self.tree, path)) is not None]
        valued = [entry for entry in entries if entry.value is not None]
        return (valued + entries)[0].source if entries else self.file


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

    Precedence has what a later layer said and, within a layer, what is not null. Returns the
    entry that contradicts this one in the same layer, if there is one.
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
