"""A key tree as YAML text, each key preceded by its description."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import yaml

from fourfold.config.document import parse_scalar
from fourfold.config.fields import Section, section_type

WIDTH = 100
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./~ +-]*(?<! )")


def render_yaml(kind: type[Section], values: dict[str, Any], comments: bool = True) -> str:
    """YAML for `values`, a tree of known keys, in the order of `values`."""
    return "\n".join(_lines(kind, values, comments, "")).strip("\n") + "\n"


def _lines(kind: type[Section], values: dict[str, Any], comments: bool, indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        field = kind.model_fields[name]
        inner = section_type(field)
        if not indent:
            lines.append("")
        if comments:
            assert field.description is not None
            start = f"{indent}# "
            lines += textwrap.wrap(
                field.description,
                WIDTH,
                initial_indent=start,
                subsequent_indent=start,
                break_long_words=False,
                break_on_hyphens=False,
            )
        if inner is not None:
            lines.append(f"{indent}{name}:")
            lines += _lines(inner, value or {}, comments, indent + "  ")
        else:
            lines.append(f"{indent}{name}: {format_value(value)}".rstrip())
    return lines


def format_value(value: Any) -> str:
    """A value on one line as the documents write it: `1.0e-5`, `True`, nothing for null."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, list):
        return "[" + ", ".join(_format_item(item) for item in value) + "]"
    if isinstance(value, str):
        is_plain = _PLAIN_TEXT.fullmatch(value) and isinstance(parse_scalar(value), str)
        return value if is_plain else _quoted(value)
    return str(value)


def _format_item(item: Any) -> str:
    return _quoted(item) if isinstance(item, str) else format_value(item)


def _format_float(value: float) -> str:
    text = repr(value)
    if "e" not in text and 0 < abs(value) < 0.005:
        # Learning rates read better as 1.0e-3; rates and deviations of 0.01 stay as they are.
        digits = len(text.replace("0.", "").lstrip("-0"))
        text = f"{value:.{max(1, digits - 1)}e}"
    mantissa, exponent, power = text.partition("e")
    if not exponent:
        return mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(power)}"


def _quoted(text: str) -> str:
    style = "'" if text.isascii() and text.isprintable() and "'" not in text else '"'
    quoted: str = yaml.safe_dump(text, default_style=style, allow_unicode=True, width=10**9)
    return quoted.rstrip("\n")
