"""Findings about a configuration: problems and notices, each at the line its value was written on.

All stages of loading report into one `Report`, so that all problems are shown together. The keys a
message names are kept as values (`Setting`), not only as text, so that a caller that knows a key by
another name, such as the flag of another program, can put that in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from fourfold.config.yaml_nodes import Tree, find, value_of
from fourfold.errors import ConfigError, Remark, Setting

Message = str | Sequence[str | Setting]  # a text, or its parts, to be joined as they are


@dataclass
class Report:
    """Problems and notices about a configuration, collected over all stages of loading it."""

    problems: list[Remark] = field(default_factory=list)
    notices: list[Remark] = field(default_factory=list)

    def problem(self, source: str, message: Message, paths: Iterable[str] = ()) -> None:
        self.problems.append(_remark(source, message, paths))

    def notice(self, source: str, message: Message, paths: Iterable[str] = ()) -> None:
        self.notices.append(_remark(source, message, paths))

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError(in_reading_order(self.problems))


def _remark(source: str, message: Message, paths: Iterable[str]) -> Remark:
    parts = (message,) if isinstance(message, str) else tuple(message)
    named = [part.path for part in parts if isinstance(part, Setting)]
    return Remark(parts, source, tuple(dict.fromkeys([*paths, *named])))


def in_reading_order(remarks: list[Remark]) -> list[Remark]:
    """Each remark once: those of files by line number, then those of overrides."""

    def position(remark: Remark) -> tuple[bool, str, int]:
        if remark.source.startswith("-o "):
            return True, "", 0
        file, _, line = remark.source.rpartition(":")
        return (False, file, int(line)) if line.isdecimal() else (False, remark.source, 0)

    return sorted({str(remark): remark for remark in remarks}.values(), key=position)


@dataclass
class ConfigFindings:
    """Reports on values, each at the place it was written.

    A check names the keys it looked at: those in its message, and `paths` before them. Nothing is
    reported when one of them was reported already, or is what a misspelt key was meant to be: the
    check then saw a default, not what the user wrote.
    """

    tree: Tree
    file: str
    report: Report
    reported: set[str]

    def problem(self, message: Message, *paths: str) -> None:
        self._add(self.report.problems, message, paths)

    def notice(self, message: Message, *paths: str) -> None:
        self._add(self.report.notices, message, paths)

    def _add(self, remarks: list[Remark], message: Message, paths: tuple[str, ...]) -> None:
        remark = _remark("", message, paths)
        if not self._saw_defaults(remark.paths):
            remarks.append(replace(remark, source=self.source(*remark.paths)))

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


# -- suggestions: "did you mean" ------------------------------------------------------------------


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The name most like `name`, or nothing when none is close."""
    by_folded = {known.lower(): known for known in names}
    if len(name) <= 3:  # any two such words are alike: tpu is not a slip of gpu, but gup is
        return [known for low, known in by_folded.items() if sorted(low) == sorted(name.lower())]
    matches = get_close_matches(name.lower()[:100], list(by_folded), n=1, cutoff=0.6)
    return [by_folded[match] for match in matches]


def did_you_mean(names: Iterable[str]) -> str:
    """What to append to a message: "; did you mean hidden_size?"."""
    choices = " or ".join(names)
    return f"; did you mean {choices}?" if choices else ""


def multiple_near(size: int, factor: int) -> str:
    """ "28 or 32": the multiples of `factor` on both sides of `size`."""
    below = size // factor * factor
    return f"{below} or {below + factor}" if below > 0 else str(factor)
