"""The flags of another program: a table of them, their parser, and the configuration they become.

Both programs whose command lines we accept are described in one format: a `Flag` for each flag,
with its kind, its meaning and the program's default, and a mapping of the flags that are keys of
ours under another name. `FlagParser` knows the flags of a table and takes no other; `Flags` gives
each its value and can tell a default from a choice.

`Translation` writes a file in which each value names the flag it came from. It is written into the
run's directory and trained from, so there is no second way into a run: what the flags meant can be
read there, changed, and used again with `fourfold train -c`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from fourfold.atomic_files import replace_text
from fourfold.config import load_config
from fourfold.config.fields import format_value
from fourfold.config.findings import did_you_mean, nearest
from fourfold.errors import ConfigError, Setting, UserError

FILE_NAME = "config.yaml"


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def true_or_false(text: str) -> bool:
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


# A function that reads the value, the words to choose from, or a switch that takes no value. What
# is `true_or_false` may stand without its value, which then is true.
Kind = Callable[[str], Any] | Sequence[str] | Literal["switch"]
METAVARS: dict[Any, str] = {whole: "N", number: "X", true_or_false: "true|false"}


@dataclass(frozen=True)
class Flag:
    """A row of a program's table; --help shows the meaning and the default."""

    name: str
    kind: Kind
    meaning: str
    default: Any = None  # the program's; None if it has none, or one that is derived
    metavar: str | tuple[str, ...] | None = None
    nargs: int | str | None = None
    short: str | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        names = [self.name] if self.short is None else [self.short, self.name]
        parser.add_argument(
            *names, dest=self.name, default=argparse.SUPPRESS, help=self._help(), **self._options()
        )

    def _help(self) -> str:
        if self.default is None or isinstance(self.default, bool):
            return self.meaning
        values = self.default if isinstance(self.default, list) else [self.default]
        shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        return f"{self.meaning} ({' '.join(shown)})"

    def _options(self) -> dict[str, Any]:
        if self.kind == "switch":
            return {"action": "store_true"}
        if not callable(self.kind):
            return {"choices": self.kind, "metavar": self.metavar or "|".join(self.kind)}
        options = {"type": self.kind, "metavar": self.metavar or METAVARS.get(self.kind, "VALUE")}
        if self.kind is true_or_false:
            return {**options, "nargs": "?", "const": True}
        return options if self.nargs is None else {**options, "nargs": self.nargs}


@dataclass(frozen=True)
class Flags:
    """The flags of a command line, by their names with or without the dashes.

    `flags[name]` is what was given, else the program's default, else None; `name in flags` asks
    whether it was given.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        flag = _with_dashes(name)
        return self.given.get(flag, self.defaults.get(flag))

    def __contains__(self, name: str) -> bool:
        return _with_dashes(name) in self.given

    def origin(self, name: str) -> str:
        """How a reader of the configuration finds the flag."""
        return _with_dashes(name) if name in self else f"{_with_dashes(name)} by default"

    def shown(self, name: str) -> str:
        return f"{_with_dashes(name)} {self[name]}"


def _with_dashes(name: str) -> str:
    return f"--{name.removeprefix('--')}"


class FlagParser(argparse.ArgumentParser):
    """`argparse` without abbreviations, defaults or an exit of its own."""

    def __init__(self, program: str, description: str, table: Iterable[Flag]) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        self.table = list(table)
        for flag in self.table:
            flag.add_to(self)

    def read(
        self,
        arguments: Sequence[str],
        required: Iterable[str],
        refused: Mapping[str, str] | None = None,
    ) -> Flags:
        """The flags; `refused` says of those that exist elsewhere what to do instead."""
        refused = refused or {}
        for word in arguments:
            flag = word.partition("=")[0]
            if flag in refused:
                raise UserError(f"{flag} is not supported: {refused[flag]}")
        given, strange = self.parse_known_args(list(arguments))
        if strange:
            self._refuse(strange, refused)
        if missing := [flag for flag in required if flag not in given]:
            raise UserError(f"{' and '.join(missing)} missing; {self.prog} --help lists all flags")
        return Flags(vars(given), {flag.name: flag.default for flag in self.table})

    def _refuse(self, strange: list[str], others: Iterable[str]) -> NoReturn:
        flag = next((word for word in strange if word.startswith("--")), None)
        if flag is None:
            raise UserError(
                f"{strange[0]!r} belongs to no flag of {self.prog}; remove it, or put a value "
                "with blanks in it in quotes"
            )
        name = flag.partition("=")[0]
        known = [*self._option_string_actions, *others]
        hint = did_you_mean(nearest(name, known)) or f"; {self.prog} --help lists all flags"
        raise UserError(f"{name}: unknown flag{hint}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; {self.prog} --help lists all flags")


# -- flags to a configuration -------------------------------------------------------------------


@dataclass
class Translation:
    """Values by their dotted key, each with the flag it was given by."""

    program: str
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def set(self, key: str, value: Any, flag: str) -> None:
        """`flag` is what the reader of the file looks for: `--max_lr`, or why there is none."""
        self.values[key] = (value, flag)

    def set_keys(self, flags: Flags, keys: Mapping[str, str]) -> None:
        """Every flag that is a key under another name, unless it is neither given nor has a
        default."""
        for name, key in keys.items():
            if flags[name] is not None:
                self.set(key, flags[name], flags.origin(name))

    def problems(self, doubtful: Collection[str] = ()) -> list[str]:
        """Why no run can be made of these values, in the words of the flags.

        Problems with keys in `doubtful` are left out: they have been reported already.
        """
        sound = {key: given for key, given in self.values.items() if key not in doubtful}
        with tempfile.TemporaryDirectory() as directory:
            file = Translation(self.program, sound).write(directory)
            try:
                load_config(file)
            except ConfigError as error:
                new = [problem for problem in error.problems if not {*problem.paths} & {*doubtful}]
                return [problem.text(self._in_flags) for problem in new]
        return []

    def _in_flags(self, setting: Setting) -> str:
        """`--max_seq_len 0` for `Data.dataset.max_seq_len=0`, and the origin of other values."""
        if setting.path not in self.values:
            return str(setting)
        flag = self.values[setting.path][1]
        keys_of = Counter(flag for _, flag in self.values.values())
        name = flag.removesuffix(" by default")
        if keys_of[flag] > 1 or not name.startswith("--") or " " in name:
            return f"{setting} ({flag})"
        return name if setting.value is None else f"{name} {setting.value}"

    def to_yaml(self) -> str:
        tree: dict[str, Any] = {}
        for key, given in self.values.items():
            *sections, name = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = given
        lines = [f"# What the flags of {self.program} say.", *_lines(tree, 0)]
        return "\n".join(lines) + "\n"

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """The file, whole at any moment: every rank of a run writes the same one."""
        place = Path(directory)
        try:
            place.mkdir(parents=True, exist_ok=True)
            replace_text(place / FILE_NAME, self.to_yaml())
        except OSError as error:
            raise UserError(
                f"{place}: the configuration cannot be written there ({error.strerror}); choose an "
                "output directory you can write to"
            ) from error
        return place / FILE_NAME


def _lines(tree: dict[str, Any], depth: int) -> list[str]:
    indent, lines = "  " * depth, []
    for name, given in tree.items():
        if isinstance(given, dict):
            lines += [f"{indent}{name}:", *_lines(given, depth + 1)]
        else:
            value, flag = given
            lines.append(f"{indent}{name}: {format_value(value)}  # {flag}")
    return lines
