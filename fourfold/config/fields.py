"""How a key is declared: its type, default and one description.

The description given to `key`, `derived` or `section` is the only text about a key: the JSON
Schema, the reference page and the comments in YAML files are all made from it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

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
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


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
    if origin is list:
        return "a list of " + _words(get_args(kind)[0], []).split(" ", 1)[1] + "s"
    if kind is type(None):
        return "null"
    return _SIMPLE[kind] + (_bounds(metadata) if kind in (int, float) else "")


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
