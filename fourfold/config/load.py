"""Loading: a YAML file and `-o Section.key=value` overrides to a resolved, checked `Config`.

Stages, each of which reports into one list: read the file and its bases, apply overrides,
translate other spellings, check types, derive values, check constraints. What was read is kept as
a `ConfigSource`, of which several configurations can be made: an automatic layout is planned
without one, then set, and the file is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fourfold.config.compat_keys import RENAMED, expand_auto, is_auto, translate
from fourfold.config.fields import Section, allowed_text, leaves, section_type
from fourfold.config.findings import (
    ConfigFindings,
    Message,
    Report,
    did_you_mean,
    in_reading_order,
    nearest,
)
from fourfold.config.resolve import resolve
from fourfold.config.rules import check
from fourfold.config.schema import Config
from fourfold.config.yaml_nodes import (
    Entry,
    Tree,
    find,
    merge,
    parse_document,
    parse_scalar,
    plain,
    read_tree,
    walk,
)
from fourfold.errors import ConfigError, Setting


def load_config(
    path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None
) -> Config:
    """Read, resolve and check a configuration; raises `ConfigError` with every problem found.

    `world_size` is the number of processes started; None means that nothing is launched, and
    then degrees are taken as written.
    """
    return read_config(path, overrides).load(world_size)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> ConfigSource:
    """The file with its bases and every override in it. Only a file that cannot be read raises."""
    tree, report = read_tree(path), Report()
    # Before the overrides, which add keys to sections and would replace a word.
    expand_auto(tree)
    tree = apply_overrides(tree, overrides, report)
    return ConfigSource(str(path), tree, report, len(overrides))


@dataclass(frozen=True)
class ConfigSource:
    """A configuration as it is written, before names and types are checked."""

    file: str
    tree: Tree
    report: Report = field(default_factory=Report)  # about the overrides
    layers: int = 0  # one for each override

    def with_values(self, values: Mapping[str, Any]) -> ConfigSource:
        """The same with these keys set, as overrides after all others would."""
        tree = deepcopy(self.tree)
        for path, value in values.items():
            source = f"-o {path}={'null' if value is None else value}"
            entry = Entry(value, source, self.layers + 1)
            tree = _apply(tree, path.split("."), entry, self.report)
        return replace(self, tree=tree, layers=self.layers + 1)

    def translated(self) -> tuple[Tree, Report]:
        """Its tree under the documented names, and what there is to say about it so far."""
        tree, report = deepcopy(self.tree), deepcopy(self.report)
        translate(tree, report)
        return tree, report

    def load(self, world_size: int | None = None) -> Config:
        """As `load_config`."""
        assert world_size is None or world_size >= 1
        tree, report = self.translated()
        config, reported = validate(tree, report)
        findings = ConfigFindings(tree, self.file, report, reported)
        resolve(config, findings, world_size)
        check(config, findings)
        report.raise_problems()
        config.notices.extend(str(notice) for notice in in_reading_order(report.notices))
        return config


def validate(tree: Tree, report: Report) -> tuple[Config, set[str]]:
    """The typed tree, with defaults in place of what is reported, and the paths reported."""
    values = _without_nulls(tree, Config)
    reported: set[str] = set()
    removed: set[str] = set()
    while True:
        try:
            return Config.model_validate(values), reported
        except ValidationError as error:
            for details in error.errors(include_url=False):
                path, field = _locate(details["loc"])
                if path in removed:  # one value may be wrong for several reasons
                    continue
                removed.add(path)
                reported.add(path)
                entry = find(tree, path)
                assert entry is not None
                if details["type"] == "extra_forbidden" and field is None:
                    reported.update(_report_unknown(path, entry, report))
                else:
                    report.problem(entry.source, _type_problem(path, field, entry, details))
                _remove(values, path.split("."))


def _without_nulls(tree: Tree, kind: type[Section]) -> dict[str, Any]:
    """Plain values; a null stands for the default, except under a name that does not exist."""
    values: dict[str, Any] = {}
    for name, entry in tree.items():
        field = kind.model_fields.get(name)
        inner = None if field is None else section_type(field)
        if field is not None and entry.value is None:
            continue
        if inner is not None and entry.is_section:
            values[name] = _without_nulls(entry.value, inner)
        else:
            values[name] = plain(entry)
    return values


def _locate(location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The key an error is about: pydantic also names list items and the members of unions."""
    kind: type[Section] | None = Config
    field: FieldInfo | None = None
    names: list[str] = []
    for part in location:
        if kind is None:
            break
        names.append(str(part))
        field = kind.model_fields.get(str(part))
        kind = None if field is None else section_type(field)
    return ".".join(names), field


def _remove(values: dict[str, Any], names: list[str]) -> None:
    for name in names[:-1]:
        values = values[name]
    del values[names[-1]]


def _type_problem(path: str, field: FieldInfo | None, entry: Entry, details: Any) -> Message:
    assert field is not None
    value = plain(entry)
    setting = Setting(path, repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "...")
    if section_type(field) is not None:
        return [setting, ": this is a section; write its keys below it"]
    if details["type"] == "value_error":
        return [setting, f": {details['ctx']['error']}"]
    if details["type"] == "less_than_equal" and isinstance(value, int | float):
        return [setting, f" is too large; choose at most {details['ctx']['le']}"]
    allowed = allowed_text(field)
    meant = nearest(value, allowed.split(", ")) if isinstance(value, str) else []
    return [setting, f" is not {allowed}{did_you_mean(meant)}"]


def _report_unknown(path: str, entry: Entry, report: Report) -> list[str]:
    """Report an unknown key; returns the paths of the keys it may have been meant to be."""
    later = [old for old in RENAMED if old.startswith(f"{path}.")]
    if entry.is_section and later:
        # A section of a later layout, left with the keys that no version had.
        for inner, unknown in walk(entry.value, f"{path}."):
            hint = did_you_mean(nearest(inner, later))
            report.problem(unknown.source, f"{inner}: unknown key{hint}")
        return []
    holder, _, name = path.rpartition(".")
    known = [leaf for leaf, _ in leaves(Config)]
    meant = [leaf for leaf in known if leaf.rsplit(".", 1)[-1] == name]
    if meant:
        hint = did_you_mean(meant)
    else:
        siblings = nearest(name, _section_at(holder).model_fields)
        meant = [f"{holder}.{sibling}".lstrip(".") for sibling in siblings] or nearest(name, known)
        hint = did_you_mean(siblings or meant)
    report.problem(entry.source, f"{path}: unknown {'key' if holder else 'section'}{hint}")
    return meant


def _section_at(path: str) -> type[Section]:
    kind: type[Section] = Config
    for name in filter(None, path.split(".")):
        inner = section_type(kind.model_fields[name])
        assert inner is not None
        kind = inner
    return kind


# -- overrides ----------------------------------------------------------------------------------


def apply_overrides(tree: Tree, overrides: Sequence[str], report: Report) -> Tree:
    """`tree` with every override in it, later ones winning.

    The value is a word as in YAML (`1e-5`, `True`, `null`, `./data`), a quoted string, or a list or
    mapping in brackets. Everything after the first `=` belongs to it. Nothing is evaluated.
    """
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
        written = written.strip()
        try:
            value = _parse_value(written, source, layer)
        except ConfigError:
            report.problem(
                source,
                f"{written} is no complete list, mapping or quoted string; close or quote it",
            )
            continue
        if path.strip().lower() == "distributed" and is_auto(value):
            names, value = ["Distributed", "auto"], True
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
    if text[:1] in ("[", "{", "'", '"'):
        return parse_document(text, source, layer).value
    return parse_scalar(text)


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
