"""Declaration of keys: type, default and one description of each, and their form in YAML.

The description given to `key`, `derived` or `section` is the only text about a key: the JSON
Schema, the reference page and the comments in YAML files are all made from it.
"""

from __future__ import annotations

import re
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from fourfold.config.yaml_nodes import parse_scalar

# Wide enough for any model or cluster, small enough that arithmetic on nonsense stays quick.
LARGEST = 2**31 - 1


def _not_bool(value: Any) -> Any:
    """YAML's `on` and `True` are no numbers, though Python would let them pass as 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "a boolean where a number belongs")
    return value


Number = BeforeValidator(_not_bool)
Count = Annotated[int, Number, Ge(1), Le(LARGEST)]
CountOrZero = Annotated[int, Number, Ge(0), Le(LARGEST)]
Positive = Annotated[float, Number, Gt(0)]
NotNegative = Annotated[float, Number, Ge(0)]
Probability = Annotated[float, Number, Ge(0), Le(1)]
BelowOne = Annotated[float, Number, Ge(0), Lt(1)]


class Section(BaseModel):
    """A mapping of known keys; anything else in it is a mistake."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=()
    )


def key(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


def derived(description: str) -> Any:
    """A key that may be left out and always has a value once the configuration is resolved."""
    return Field(default=None, description=description)


def section(kind: type[Section], description: str) -> Any:
    return Field(default_factory=kind, description=description)


def section_type(field: FieldInfo) -> type[Section] | None:
    """The `Section` class of a field that is a section, else None."""
    kind = field.annotation
    return kind if is_section(kind) else None


def is_section(kind: Any) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def leaves(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below `kind` that holds a value, as ("Data.dataset.split", field)."""
    for name, field in kind.model_fields.items():
        inner = section_type(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def allowed_text(field: FieldInfo) -> str:
    """What a key accepts, in words: "an integer of at least 1", "one of full, full_attn"."""
    return _words(field.annotation, field.metadata)


_SIMPLE = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _words(kind: Any, metadata: list[Any]) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        return _words(inner, [*metadata, *more])
    if origin is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if origin in (Union, types.UnionType):
        *options, last = [_words(option, metadata) for option in get_args(kind)]
        return ", ".join(options) + f" or {last}"
    if origin is list and is_section(get_args(kind)[0]):
        return "a list of mappings with " + ", ".join(_keys_of_item(get_args(kind)[0]))
    if origin is list and get_origin(get_args(kind)[0]) is Literal:
        return "a list of " + ", ".join(get_args(get_args(kind)[0]))
    if origin is list:
        return "a list of " + _words(get_args(kind)[0], []).split(" ", 1)[1] + "s"
    if kind is type(None):
        return "null"
    return _SIMPLE[kind] + (_bounds(metadata) if kind in (int, float) else "")


def _keys_of_item(kind: type[Section]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        is_choice = get_origin(field.annotation) is Literal
        yield f"{name} ({allowed_text(field)})" if is_choice else name


def _bounds(metadata: list[Any]) -> str:
    bounds = []
    for limit in metadata:
        if isinstance(limit, Ge):
            bounds.append(f"of at least {limit.ge}")
        elif isinstance(limit, Gt):
            bounds.append(f"above {limit.gt}")
        elif isinstance(limit, Le) and limit.le != LARGEST:
            bounds.append(f"at most {limit.le}")
        elif isinstance(limit, Lt):
            bounds.append(f"below {limit.lt}")
    return " " + " and ".join(bounds) if bounds else ""


# -- YAML text ----------------------------------------------------------------------------------

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
    if isinstance(item, dict):
        return "{" + ", ".join(f"{k}: {_format_item(v)}" for k, v in item.items()) + "}"
    if item is None:
        return "null"
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
