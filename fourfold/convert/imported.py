"""`ForeignModel`: a model of any format, seen with Fourfold's names.

    model     keys of the `Model` section: sizes, heads, dropout, and what is not as in GPT-2
    stored    every weight under our name (without "model."), in our order, checked
    tensors() the same, read one at a time
    tokenizer a place `Tokenizer.load` knows, or None
    made_with the identity of the tokenizer that made the training data, where it is known
    notes     what was decided on the way, one sentence each

What the tensors themselves say (layers, widths, vocabulary) is measured, never taken from a
description; a description that says otherwise is an error.

A `LazyTensor` is a tensor in somebody's file, with its shape known and its numbers not yet read.
Functions here turn, join and reorder lazy tensors into other lazy tensors. Nothing is read until
`read()`, which reads one tensor; so a model is checked before its first number is touched, and
converted in the memory of its largest tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fourfold.checkpoint.bounded import read_bounded
from fourfold.config.model_section import GATED
from fourfold.errors import CheckpointError, UserError
from fourfold.model.gpt_table import gpt_parameters
from fourfold.model.params import ModelShape, RopeScaling
from fourfold.tokenizer import END_OF_TEXT, Tokenizer, file_in

Kind = Literal["fourfold", "hf", "fleetx", "megatron"]

NAMES_SHOWN = 3
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_LAYER = re.compile(r"layers\.([0-9]{1,6})\.")


@dataclass
class ForeignModel:
    kind: Kind
    path: Path
    model: dict[str, Any]
    stored: dict[str, LazyTensor]
    tokenizer: Path | None = None
    made_with: str | None = None
    notes: list[str] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The widest type among the weights."""
        return max((s.dtype for s in self.stored.values()), key=lambda dtype: dtype.itemsize)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by our name, read on request, in the type it is stored in."""
        for name, source in self.stored.items():
            yield name, source.read()

    def trim_vocabulary(self, rows: int) -> None:
        """Keep the first `rows` of the token embedding: a padded vocabulary's own tokens. A head of
        its own is cut too."""
        word = self.stored["embeddings.word.weight"]
        if not 0 < rows <= word.shape[0]:
            raise CheckpointError(
                f"{self.path}: vocabulary of {rows} requested, but it has {word.shape[0]} "
                "rows; rows can be cut off, not added"
            )
        if rows < word.shape[0]:
            self.notes.append(f"vocabulary cut from {word.shape[0]} to {rows} rows")
        for name in ("embeddings.word.weight", "head.weight"):
            if name in self.stored:
                self.stored[name] = first_rows(self.stored[name], rows)
        self.model["vocab_size"] = rows

    def cast(self, dtype: torch.dtype) -> None:
        """Give every weight this type; a number too large for it is an error when it is read."""
        for name, source in self.stored.items():
            if source.dtype != dtype:
                self.stored[name] = cast(source, dtype, f"{self.path}: {name}")

    def tokenizer_identity(self) -> str | None:
        """Of what made the training data, or else of the tokenizer beside the weights."""
        if self.made_with is None and self.tokenizer is not None:
            with suppress(UserError):
                return Tokenizer.load(self.tokenizer).identity
        return self.made_with

    def close(self) -> None:
        """Close the files, and remove the directory an archive was unpacked to."""
        self.closing.close()

    def __enter__(self) -> ForeignModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- networks -------------------------------------------------------------------------------------

# What decides a network besides its sizes, with the values of GPT-2.
NETWORK: dict[str, Any] = {
    field.name: field.default for field in ModelShape.network_fields() if field.type != "int"
}


def shape_of(model: Mapping[str, Any]) -> ModelShape:
    """The shape that keys of the `Model` section describe, with what follows from others filled in
    as a configuration has it."""
    given = dict(model)
    heads = given["num_attention_heads"]
    given["num_key_value_heads"] = given.get("num_key_value_heads") or heads
    given["head_dim"] = given.get("head_dim") or given["hidden_size"] // heads
    scaling = RopeScaling(**given.get("rope_scaling", {}))
    if scaling.type != "none" and scaling.original_max_position_embeddings is None:
        length = max(1, int(given["max_position_embeddings"] / scaling.factor))
        scaling = replace(scaling, original_max_position_embeddings=length)
    given["rope_scaling"] = scaling
    if given.get("sliding_window_layers") is not None:
        given["sliding_window_layers"] = tuple(given["sliding_window_layers"])
    return ModelShape(**given)


def options_of(shape: ModelShape) -> dict[str, Any]:
    """The keys of the `Model` section, besides sizes, in which the network is not GPT-2."""
    given = {name: getattr(shape, name) for name in NETWORK}
    if shape.key_value_heads == shape.num_attention_heads:
        del given["num_key_value_heads"]
    if shape.head_size * shape.num_attention_heads == shape.hidden_size:
        del given["head_dim"]
    chosen = shape.sliding_window_layers
    if chosen is not None and set(chosen) == set(range(shape.num_layers)):
        given["sliding_window_layers"] = None
    if shape.sliding_window is None or chosen == ():
        given["sliding_window"] = given["sliding_window_layers"] = None
    options = {name: value for name, value in given.items() if value != NETWORK[name]}
    if "rope_scaling" in options:
        options["rope_scaling"] = _scaling(shape.rope_scaling)
    if "sliding_window_layers" in options:
        options["sliding_window_layers"] = list(shape.sliding_window_layers or ())
    return options


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    """What of it has an effect."""
    names = {"linear": "factor", "llama3": _LLAMA3, "yarn": _YARN}[scaling.type].split()
    return {"type": scaling.type, **{name: getattr(scaling, name) for name in names}}


_LLAMA3 = "factor original_max_position_embeddings low_freq_factor high_freq_factor"
_YARN = "factor original_max_position_embeddings beta_fast beta_slow attention_factor truncate"


def require_gpt2(model: ForeignModel, program: str) -> None:
    """Raise for a network that only some of the programs have."""
    for name, value in options_of(model.shape).items():
        raise CheckpointError(
            f"{model.path}: Model.{name}={value} is not GPT-2's, and for {program} Fourfold writes "
            "and reads GPT-2's network only; convert it --to hf or fourfold"
        )


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
    found: dict[str, LazyTensor],
    heads: int,
    declared: dict[str, int],
    **rest: Any,
) -> ForeignModel:
    """A checked `ForeignModel` of the tensors `found`, by our names.

    `declared` is what a description says under the names of the `Model` section; `rest` goes to
    `ForeignModel`, except `options`, which are keys of the `Model` section that are no sizes, or
    that tensors do not tell.
    """
    options: dict[str, Any] = rest.pop("options", {})
    model = {**_measure(path, found, options), "num_attention_heads": heads, **options}
    for key, said in declared.items():
        if said != model[key]:
            raise CheckpointError(
                f"{path}: its description says {key}={said}, but the weights have {model[key]}; "
                "files of two models are mixed, or some are missing"
            )
    if heads < 1 or ("head_dim" not in options and model["hidden_size"] % heads):
        raise CheckpointError(
            f"{path}: {heads} attention heads do not divide the hidden size "
            f"{model['hidden_size']}; check the number of heads"
        )
    shape = shape_of(model)
    shapes = gpt_parameters(shape).shapes
    _check(path, found, shapes)
    stored = {name: found[name] for name in shapes}
    rest_of = {name: value for name, value in model.items() if name not in NETWORK}
    return ForeignModel(kind, path, rest_of | options_of(shape), stored, **rest)


def _measure(
    path: Path, found: dict[str, LazyTensor], options: Mapping[str, Any]
) -> dict[str, int]:
    def size(name: str, axis: int) -> int:
        source = found.get(name)
        if source is None or len(source.shape) != 2:
            what = "missing" if source is None else f"{source}, not a matrix"
            raise CheckpointError(f"{path} is not a complete GPT: its {name} is {what}")
        return source.shape[axis]

    numbers = {int(match[1]) for name in found if (match := _LAYER.match(name))}
    if numbers != set(range(len(numbers))) or not numbers:
        absent = min(set(range(len(numbers) + 1)) - numbers)
        raise CheckpointError(
            f"{path} is not a complete GPT: layer {absent} is missing; is a pipeline stage missing?"
        )
    gated = options.get("activation") in GATED
    measured = {
        "vocab_size": size("embeddings.word.weight", 0),
        "hidden_size": size("embeddings.word.weight", 1),
        "num_layers": len(numbers),
        "ffn_hidden_size": size(f"layers.0.mlp.{'in_proj.up' if gated else 'up'}.weight", 0),
    }
    if options.get("position_embedding", "learned") == "learned":
        measured["max_position_embeddings"] = size("embeddings.position.weight", 0)
    return measured


def _check(path: Path, found: dict[str, LazyTensor], shapes: dict[str, tuple[int, ...]]) -> None:
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


def check_tied(path: Path, head: str, copy: LazyTensor, word: LazyTensor | None) -> None:
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
    raise CheckpointError(f"{path}: {what} is not a valid number; the file is damaged")


# -- lazy tensors ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LazyTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def transposed(source: LazyTensor) -> LazyTensor:
    """(in, out) to (out, in), or back."""
    return LazyTensor(source.shape[::-1], source.dtype, lambda: source.read().mT.contiguous())


def multiplied(source: LazyTensor, factor: float) -> LazyTensor:
    return LazyTensor(source.shape, source.dtype, lambda: source.read() * factor)


def reshaped(source: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    if math.prod(shape) != math.prod(source.shape):
        raise CheckpointError(f"{list(source.shape)} cannot be seen as {list(shape)}")
    return LazyTensor(shape, source.dtype, lambda: source.read().reshape(shape))


def joined(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """The parts one after the other along `dim`; what one alone is stays as it is."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        around = [(*s.shape[:dim], *s.shape[dim + 1 :]) for s in (first, part)]
        if dim >= len(part.shape) or around[0] != around[1] or part.dtype != first.dtype:
            raise CheckpointError(f"pieces of one tensor do not fit: {first} and {part}")
    length = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return LazyTensor(shape, first.dtype, lambda: torch.cat([part.read() for part in parts], dim))


def first_rows(source: LazyTensor, count: int) -> LazyTensor:
    shape = (count, *source.shape[1:])
    return LazyTensor(shape, source.dtype, lambda: source.read()[:count].contiguous())


def cast(source: LazyTensor, dtype: torch.dtype, name: str) -> LazyTensor:
    def read() -> Tensor:
        before = source.read()
        after = before.to(dtype)
        if not after.isfinite().all() and before.isfinite().all():
            raise CheckpointError(
                f"{name} holds {before.abs().max():.3g}, which is beyond the range of "
                f"{str(dtype).removeprefix('torch.')}; choose bfloat16 or float32"
            )
        return after

    return LazyTensor(source.shape, dtype, read)


def regrouped(
    source: LazyTensor, parts: tuple[int, int, int], order: tuple[int, int, int]
) -> LazyTensor:
    """The rows, seen as a block of `parts`, with the axes of that block put in `order`."""
    if not source.shape or math.prod(parts) != source.shape[0]:
        raise CheckpointError(
            f"{source} has no rows for {' x '.join(map(str, parts))} parts of attention heads"
        )

    def read() -> Tensor:
        rest = source.shape[1:]
        axes = (*order, *range(3, 3 + len(rest)))
        return source.read().reshape(*parts, *rest).permute(axes).reshape(source.shape)

    return LazyTensor(source.shape, source.dtype, read)


def _head_size(source: LazyTensor, heads: int) -> int:
    return source.shape[0] // (3 * heads) if source.shape else 0


def heads_from_blocks(source: LazyTensor, heads: int) -> LazyTensor:
    """Rows [all q | all k | all v] to ours, [q_j, k_j, v_j] for each head j."""
    return regrouped(source, (3, heads, _head_size(source, heads)), (1, 0, 2))


def blocks_from_heads(source: LazyTensor, heads: int) -> LazyTensor:
    """Ours to [all q | all k | all v]."""
    return regrouped(source, (heads, 3, _head_size(source, heads)), (1, 0, 2))


def part_of_heads(source: LazyTensor, heads: int, part: int) -> LazyTensor:
    """Of ours, all q (part 0), all k (1) or all v (2)."""
    size = _head_size(source, heads)
    shape = (heads * size, *source.shape[1:])

    def read() -> Tensor:
        rows = source.read().reshape(heads, 3, size, *source.shape[1:])
        return rows[:, part].reshape(shape).clone()

    return LazyTensor(shape, source.dtype, read)


def heads_from_triples(source: LazyTensor, heads: int) -> LazyTensor:
    """Rows of single (q, k, v) triples within each head to ours."""
    return regrouped(source, (heads, _head_size(source, heads), 3), (0, 2, 1))


def queries_scaled(source: LazyTensor, heads: int, factor: float) -> LazyTensor:
    """Ours, with every query times `factor`."""

    def read() -> Tensor:
        rows = source.read().clone()
        rows.view(heads, 3, -1)[:, 0] *= factor
        return rows

    return LazyTensor(source.shape, source.dtype, read)


# -- small files: descriptions and tokenizers -----------------------------------------------------


MAX_JSON_BYTES = 32 << 20


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object")
    return content


def find_tokenizer(*directories: Path) -> Path | None:
    """The first of these directories that holds a tokenizer's files."""
    for directory in directories:
        if file_in(directory) is not None:
            return directory
    return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_pair(directory: Path, tokenizer: Tokenizer) -> tuple[Path, Path] | None:
    """`vocab.json` and `merges.txt`, if these two alone are the tokenizer, as they are GPT-2's."""
    if not tokenizer.is_gpt2_like:
        return None
    bpe = json.loads(tokenizer.to_json())["model"]
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    write_json(vocab, bpe["vocab"] | {END_OF_TEXT: tokenizer.eos_id})
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    merges.write_text("\n".join(["#version: 0.2", *pairs, ""]), encoding="utf-8")
    return vocab, merges
