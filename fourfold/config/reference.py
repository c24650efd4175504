"""The key tree for readers: JSON Schema for editors, Markdown for docs/configuration.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.config.compat_keys import NOT_OFFERED, ONLY, RENAMED, USUAL, WITHOUT_EFFECT
from fourfold.config.fields import Section, allowed_text, format_value, section_type
from fourfold.config.schema import Config

_INTRODUCTION = """\
# Configuration

A run is described by one YAML file and, for single values, `-o Section.key=value` on the command
line. `fourfold config show -c FILE` prints the resolved tree, `fourfold config check -c FILE` its
problems, `fourfold config schema` a JSON Schema for editors. This page is made from the same
declarations (`python -m fourfold.config` writes it).

- A key that is left out, or null (`key:` with nothing after it, `null`, `~` or `None`), has its
  default. An empty section is a section of defaults.
- An unknown key is an error. All problems are reported together, each with file and line.
- `_base_: other.yaml` at the top inherits another file, found relative to this one; sections are
  merged key by key. `_inherited_: False` inside a section drops what it would inherit.
- `-o` takes words as YAML does (`1e-5`, `True`, `null`, `./data`), quoted strings and lists
  (`-o Profiler.scheduler=[1,5]`). Everything after the first `=` is the value. The last one wins.
- `Section.key` names a key everywhere: in messages, after `-o`, in Python (`config.Section.key`).
"""

_COMPAT_KEYS = """\
## Other spellings

Files of earlier and later FleetX versions are read as they are, with a notice for each key that
has another name here. Keys of the 2022 layout under `PreTraining:` go to their sections, and a
section pasted inside another one is taken out of it.
"""


# pydantic leaves the bounds of optional numbers under its own names.
_JSON_SCHEMA_BOUNDS = {
    "ge": "minimum",
    "le": "maximum",
    "gt": "exclusiveMinimum",
    "lt": "exclusiveMaximum",
}


def json_schema(config: Config | None = None) -> dict[str, Any]:
    """JSON Schema of a file in the documented spelling; null is allowed, as the default.

    With a configuration, its resolved values become the defaults.
    """
    declared = Config.model_json_schema()
    names = {name: name.removesuffix("Section") for name in declared["$defs"]}
    schema = _renamed(declared, names | _JSON_SCHEMA_BOUNDS)
    if config is not None:
        _set_defaults(schema, schema["$defs"], config.to_dict())
    for part in [schema, *schema["$defs"].values()]:
        part.pop("title", None)
        for name, field in part["properties"].items():
            field.pop("title", None)
            part["properties"][name] = _or_null(field)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Fourfold configuration"
    schema["description"] = "Sections and keys of a Fourfold run."
    schema["properties"]["_base_"] = {
        "type": "string",
        "description": "Another file to inherit from, relative to this one.",
    }
    return schema


def _renamed(node: Any, names: dict[str, str]) -> Any:
    if isinstance(node, dict):
        return {names.get(key, key): _renamed(value, names) for key, value in node.items()}
    if isinstance(node, list):
        return [_renamed(item, names) for item in node]
    if isinstance(node, str) and node.startswith("#/$defs/"):
        return node.removesuffix("Section")
    return node


def _set_defaults(part: dict[str, Any], sections: dict[str, Any], values: dict[str, Any]) -> None:
    """Put `values` in as defaults; every section of the tree is declared once and used once."""
    for name, value in values.items():
        field = part["properties"][name]
        if "$ref" in field:
            _set_defaults(sections[field["$ref"].rsplit("/", 1)[1]], sections, value)
        else:
            field["default"] = value


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    about = {name: value for name, value in field.items() if name in ("description", "default")}
    kind = {name: value for name, value in field.items() if name not in about}
    options = kind["anyOf"] if set(kind) == {"anyOf"} else [kind]
    if {"type": "null"} not in options:
        options = [*options, {"type": "null"}]
    return {**about, "anyOf": options}


def markdown_reference() -> str:
    """docs/configuration.md."""
    parts = [_INTRODUCTION]
    for name, field in Config.model_fields.items():
        kind = section_type(field)
        assert kind is not None
        parts.append(f"## {name}\n\n{field.description}\n\n" + _table(kind, ""))
    parts += [_COMPAT_KEYS, _compat_keys_table()]
    return "\n".join(parts)


def _table(kind: type[Section], prefix: str) -> str:
    rows = _rows(kind, prefix)
    return _markdown_table(("key", "accepts", "default", "meaning"), rows)


def _rows(kind: type[Section], prefix: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, field in kind.model_fields.items():
        inner = section_type(field)
        if inner is None:
            default = field.default
            shown = "null" if default is None else format_value(default)
            rows.append(
                (f"`{prefix}{name}`", allowed_text(field), f"`{shown}`", field.description or "")
            )
        else:
            rows.append((f"`{prefix}{name}`", "section", "", field.description or ""))
            rows += _rows(inner, f"{prefix}{name}.")
    return rows


def _compat_keys_table() -> str:
    rows = [(f"`{old}`", f"read as `{new}`") for old, new in RENAMED.items()]
    rows += [
        ("`Optimizer.grad_clip.clip_norm`", "read as `Optimizer.grad_clip`"),
        (
            "`Engine.mix_precision.enable`",
            "False is `dtype: float32`; True is `dtype`, or float16 when that is not given",
        ),
        (
            "`Model.vocab_size_divisible_unit`",
            "`Model.vocab_size` is padded to a multiple of it times `mp_degree`",
        ),
    ]
    rows += [
        (f"`{path}`", f"{', '.join(f'`{name}`' for name in names)}; else an error: {remedy}")
        for path, (names, remedy) in ONLY.items()
    ]
    rows += [(f"`{path}`", f"no effect: {reason}") for path, reason in WITHOUT_EFFECT.items()]
    rows += [(f"`{path}`", f"no effect: {reason}") for path, (_, reason) in USUAL.items()]
    rows += [
        (f"`{path}`", f"an error when enabled: {remedy}")
        for path, (_, remedy) in NOT_OFFERED.items()
    ]
    return _markdown_table(("spelling", "here"), rows)


def _markdown_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )
