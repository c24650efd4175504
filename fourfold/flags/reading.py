"""A command line of another program: every flag it has is known, and no other is taken.

Only flags that were given have a value, under the name they were given by, so that whoever reads
them can tell a default from a wish.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from fourfold.config.suggest import did_you_mean, nearest
from fourfold.errors import UserError


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


class FlagReader(argparse.ArgumentParser):
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
