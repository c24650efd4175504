"""The flags of another program: parsed as it parses them, and turned into a configuration file.

`FlagParser` knows every flag of the program and takes no other. Only flags that were given have a
value, under the name they were given by, so a default can be told from a choice.

`Translation` writes a file in which each value names the flag it came from. It is written into the
run's directory and trained from, so there is no second way into a run: what the flags meant can be
read there, changed, and used again with `fourfold train -c`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fourfold.atomic_files import replace_text
from fourfold.config import load_config
from fourfold.config.suggest import did_you_mean, nearest
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


class FlagParser(argparse.ArgumentParser):
    """`argparse` without abbreviations, defaults or an exit of its own."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)

    def switch(self, flag: str, meaning: str) -> None:
        self.add_argument(
            flag, dest=flag, action="store_true", default=argparse.SUPPRESS, help=meaning
        )

    def value(self, flag: str, meaning: str, **options: Any) -> None:
        """`options` are those of `add_argument`: type, choices, nargs."""
        kind = getattr(options.get("type"), "__name__", "")
        options.setdefault("metavar", {"whole": "N", "number": "X"}.get(kind, "VALUE"))
        self.add_argument(flag, dest=flag, default=argparse.SUPPRESS, help=meaning, **options)

    def read(
        self, arguments: Sequence[str], refused: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The given flags; `refused` says of flags that exist elsewhere what to do instead."""
        refused = refused or {}
        for word in arguments:
            flag = word.partition("=")[0]
            if flag in refused:
                raise UserError(f"{flag} is not supported: {refused[flag]}")
        given, strange = self.parse_known_args(list(arguments))
        if strange:
            self._refuse(strange, refused)
        return vars(given)

    def _refuse(self, strange: list[str], others: Iterable[str]) -> NoReturn:
        flag = next((word for word in strange if word.startswith("--")), None)
        if flag is None:
            raise UserError(
                f"{strange[0]!r} belongs to no flag of {self.prog}; remove it, or put a value "
                "with blanks in it in quotes"
            )
        name = flag.partition("=")[0]
        known = [*self._option_string_actions, *others]
        hint = did_you_mean(nearest(name, known)) or f"; {self.prog} --help lists those it has"
        raise UserError(f"{name}: unknown flag{hint}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; {self.prog} --help tells more")


# -- flags to a configuration -------------------------------------------------------------------


@dataclass
class Translation:
    """Values by their dotted key, each with the flag it was given by."""

    program: str
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def set(self, key: str, value: Any, flag: str) -> None:
        """`flag` is what the reader of the file looks for: `--max_lr`, or why there is none."""
        self.values[key] = (value, flag)

    def problems(self, doubtful: Collection[str] = ()) -> list[str]:
        """Why no run can be made of these values, in the words of the flags.

        Nothing is said about keys in `doubtful`: what is wrong with them has been said.
        """
        sound = {key: given for key, given in self.values.items() if key not in doubtful}
        with tempfile.TemporaryDirectory() as directory:
            file = Translation(self.program, sound).write(directory)
            try:
                load_config(file)
            except ConfigError as error:
                told = [problem for problem in error.problems if not {*problem.paths} & {*doubtful}]
                return [problem.text(self._in_flags) for problem in told]
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
            lines.append(f"{indent}{name}: {_scalar(value)}  # {flag}")
    return lines


def _scalar(value: Any) -> str:
    """One line of YAML; floats keep a form that YAML reads as one."""
    text = yaml.safe_dump(value, default_flow_style=True, width=2**16, allow_unicode=True)
    return text.removesuffix("...\n").strip()
