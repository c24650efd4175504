"""`ForeignModel`: a model of any format, seen with Fourfold's names.

    model     keys of the `Model` section: sizes, heads, dropout
    stored    every weight under our name (without "model."), in our order, checked
    tensors() the same, read one at a time
    tokenizer a place `Tokenizer.load` knows, or None
    made_with the identity of the tokenizer that made the training data, where it is known
    notes     what was decided on the way, one sentence each

What the tensors themselves say (layers, widths, vocabulary) is measured, never believed from a
description; a description that says otherwise is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fourfold.convert.stored import Stored, cast, first_rows
from fourfold.errors import CheckpointError
from fourfold.model.params import ModelShape, gpt_parameters

Kind = Literal["fourfold", "hf", "fleetx", "megatron"]

NAMES_SHOWN = 3
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_LAYER = re.compile(r"layers\.([0-9]{1,6})\.")


@dataclass
class ForeignModel:
    kind: Kind
    path: Path
    model: dict[str, int | float]
    stored: dict[str, Stored]
    tokenizer: Path | None = None
    made_with: str | None = None
    notes: list[str] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def shape(self) -> ModelShape:
        return ModelShape(**self.model)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """The widest type among the weights."""
        return max((s.dtype for s in self.stored.values()), key=lambda dtype: dtype.itemsize)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by our name, read when it is asked for, in the type it is stored in."""
        for name, source in self.stored.items():
            yield name, source.read()

    def trim_vocabulary(self, rows: int) -> None:
        """Keep the first `rows` of the token embedding: a padded vocabulary's own tokens."""
        word = self.stored["embeddings.word.weight"]
        if not 0 < rows <= word.shape[0]:
            raise CheckpointError(
                f"{self.path}: vocabulary of {rows} asked for, but it has {word.shape[0]} rows; "
                "rows can be cut off and not invented"
            )
        if rows < word.shape[0]:
            self.notes.append(f"vocabulary cut from {word.shape[0]} to {rows} rows")
        self.stored["embeddings.word.weight"] = first_rows(word, rows)
        self.model["vocab_size"] = rows

    def cast(self, dtype: torch.dtype) -> None:
        """Give every weight this type; a number too large for it is an error when it is read."""
        for name, source in self.stored.items():
            if source.dtype != dtype:
                self.stored[name] = cast(source, dtype, f"{self.path}: {name}")

    def close(self) -> None:
        """Close the files, and give back the place an archive was unpacked to."""
        self.closing.close()

    def __enter__(self) -> ForeignModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- names ----------------------------------------------------------------------------------------

# Names, cuts and orders of rows do not depend on the sizes.
ROWS = gpt_parameters(ModelShape(1, 1, 1, 1, 1, 1))
_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]{1,6}(?=\.)")


def split_number(name: str) -> tuple[str, int]:
    """A name with `*` for the number of its layer, and the number; 0 if there is none."""
    match = _NUMBER.search(name)
    if match is None:
        return name, 0
    return f"{name[: match.start()]}*{name[match.end() :]}", int(match[0])


def their_name(program: str, ours: str) -> str:
    """What another program calls a parameter of ours."""
    foreign = ROWS[ours].foreign
    assert foreign is not None
    return foreign[program].replace("*", str(split_number(ours)[1]), 1)


def our_names(*programs: str) -> dict[str, str]:
    """Their name -> our name, both with `*` for the number of a layer."""
    return {
        row.foreign[program]: row.name
        for program in programs
        for row in ROWS.rows
        if row.foreign is not None
    }


# -- checking -------------------------------------------------------------------------------------


def assemble(
    kind: Kind,
    path: Path,
    found: dict[str, Stored],
    heads: int,
    declared: dict[str, int],
    **rest: Any,
) -> ForeignModel:
    """A checked `ForeignModel` of the tensors `found`, by our names.

    `declared` is what a description says under the names of the `Model` section; `rest` goes to
    `ForeignModel`, except `options`, which are keys of the `Model` section that are no sizes.
    """
    options: dict[str, float] = rest.pop("options", {})
    model = _measure(path, found)
    for key, said in declared.items():
        if said != model[key]:
            raise CheckpointError(
                f"{path}: its description says {key}={said}, but the weights have {model[key]}; "
                "files of two models are mixed, or some are missing"
            )
    if heads < 1 or model["hidden_size"] % heads:
        raise CheckpointError(
            f"{path}: {heads} attention heads do not divide the hidden size "
            f"{model['hidden_size']}; check the number of heads"
        )
    shapes = gpt_parameters(ModelShape(**model, num_attention_heads=heads)).shapes  # type: ignore[arg-type]
    _check(path, found, shapes)
    stored = {name: found[name] for name in shapes}
    return ForeignModel(
        kind, path, {**model, "num_attention_heads": heads, **options}, stored, **rest
    )


def _measure(path: Path, found: dict[str, Stored]) -> dict[str, int]:
    def size(name: str, axis: int) -> int:
        source = found.get(name)
        if source is None or len(source.shape) != 2:
            what = "missing" if source is None else f"{source}, not a matrix"
            raise CheckpointError(f"{path} is no whole GPT: its {name} is {what}")
        return source.shape[axis]

    numbers = {int(match[1]) for name in found if (match := _LAYER.match(name))}
    if numbers != set(range(len(numbers))) or not numbers:
        absent = min(set(range(len(numbers) + 1)) - numbers)
        raise CheckpointError(
            f"{path} is no whole GPT: layer {absent} is missing; is a pipeline stage not there?"
        )
    return {
        "vocab_size": size("embeddings.word.weight", 0),
        "hidden_size": size("embeddings.word.weight", 1),
        "num_layers": len(numbers),
        "ffn_hidden_size": size("layers.0.mlp.up.weight", 0),
        "max_position_embeddings": size("embeddings.position.weight", 0),
    }


def _check(path: Path, found: dict[str, Stored], shapes: dict[str, tuple[int, ...]]) -> None:
    missing = [name for name in shapes if name not in found]
    unexpected = [name for name in found if name not in shapes]
    different = [
        f"{name} ({found[name]}, not {list(shape)})"
        for name, shape in shapes.items()
        if name in found and (found[name].shape != shape or found[name].dtype not in FLOATS)
    ]
    complaints = [
        f"{len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}"
        + (", ..." if len(names) > NAMES_SHOWN else "")
        for names, what in (
            (missing, "missing"),
            (unexpected, "too many"),
            (different, "of another shape or type"),
        )
        if names
    ]
    if complaints:
        raise CheckpointError(
            f"{path} is no GPT that Fourfold can express, by our names: {'; '.join(complaints)}"
        )


def check_tied(path: Path, head: str, copy: Stored, word: Stored | None) -> None:
    """Raise unless a stored output head is the token embedding once more."""
    if word is not None and copy.shape == word.shape and torch.equal(copy.read(), word.read()):
        return
    raise CheckpointError(
        f"{path}: {head} is not the token embedding; Fourfold's head is tied to it, so this "
        "model cannot be expressed"
    )


def count_of(path: Path, what: str, value: Any) -> int:
    """A size from a description, which may be anything."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
        return value
    raise CheckpointError(f"{path}: {what} is no sensible number; the file is damaged")
