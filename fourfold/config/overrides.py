"""`-o Section.key=value`: one value changed from the command line.

The value is a word as in YAML (`1e-5`, `True`, `null`, `./data`), a quoted string, or a list or
mapping in brackets. Everything after the first `=` belongs to it. Nothing is evaluated.
"""

from __future__ import annotations

from fourfold.config.document import parse_document, parse_scalar
from fourfold.config.entry import Entry, Report, Tree, find, merge
from fourfold.errors import ConfigError


def apply_overrides(tree: Tree, overrides: list[str], report: Report) -> Tree:
    """`tree` with every override in it, later ones winning."""
    for layer, text in enumerate(overrides, start=1):
        source = f"-o {text}"
        if not _is_unicode(text):
            report.problem(ascii(source)[1:-1], "not UTF-8 text")
            continue
        path, equals, written = text.partition("=")
        names = [name.strip() for name in path.split(".")]
        if not equals or not all(names):
            report.problem(source, "write it as Section.key=value")
            continue
        try:
            value = _parse_value(written.strip(), source, layer)
        except ConfigError as error:
            report.problems += error.problems
            continue
        tree = _apply(tree, names, Entry(value, source, layer), report)
    return tree


def _is_unicode(text: str) -> bool:
    """False for what a shell passed in another encoding, which no file of ours could hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _parse_value(text: str, source: str, layer: int) -> object:
    if text[:1] not in ("[", "{", "'", '"'):
        return parse_scalar(text)
    try:
        return parse_document(text, source, layer).value
    except ConfigError:
        raise ConfigError(
            [f"{source}: {text} is no complete list, mapping or quoted string; close or quote it"]
        ) from None


def _apply(tree: Tree, names: list[str], entry: Entry, report: Report) -> Tree:
    holder = find(tree, ".".join(names[:-1])) if len(names) > 1 else None
    if holder is not None and isinstance(holder.value, list):
        _set_item(holder, ".".join(names), names[-1], entry, report)
        return tree
    for name in reversed(names):
        entry = Entry({name: entry}, entry.source, entry.layer)
    return merge(tree, entry.value)


def _set_item(holder: Entry, path: str, index: str, entry: Entry, report: Report) -> None:
    if not index.isdecimal() or len(index) > 9 or int(index) >= len(holder.value):
        last = len(holder.value) - 1
        text = (
            f"{path}: the list has items 0 to {last}" if last >= 0 else f"{path}: the list is empty"
        )
        report.problem(entry.source, text)
        return
    items = list(holder.value)
    items[int(index)] = entry.value
    holder.value, holder.source, holder.layer = items, entry.source, entry.layer
