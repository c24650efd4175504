"""FleetX and PaddleNLP checkpoints: `.pdparams` files, single or as trees of ranks.

    model.pdparams, model_state.pdparams             one file
    mp_XX_sharding_XX_pp_XX/model.pdparams           a tree: tensor and pipeline ranks are merged

Paddle stores a linear weight as (in, out), the transpose of ours. Its fused qkv columns are head
by head like our rows; separate q, k and v are joined. Every sharding rank holds the same weights.
The files do not say how many heads there are; `model_config.json` beside them does, or the caller.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fourfold.convert.arrays import NUMPY, PickledArray
from fourfold.convert.imported import (
    ROWS,
    ForeignModel,
    LazyTensor,
    assemble,
    check_tied,
    count_of,
    find_tokenizer,
    heads_from_blocks,
    joined,
    our_names,
    read_json,
    require_gpt2,
    reshaped,
    split_number,
    their_name,
    transposed,
)
from fourfold.convert.pickles import Constructor, PickleMachine, only
from fourfold.convert.torch_files import map_file
from fourfold.errors import CheckpointError

RANK = re.compile(r"mp_(\d\d)_sharding_(\d\d)_pp_(\d\d)")
CONFIG = "model_config.json"
HEADS_OPTION = "--num-attention-heads"

_FILES = ("model.pdparams", "model_state.pdparams")
_WRAPPERS = re.compile(r"^(?:_layers\.)?(?:gpt\.)?(?:shared_layers\.embed\.(?=\w))?")
_STAGED = re.compile(r"(\d{1,6})\.([a-z0-9_]+\.[a-z0-9_.]+)")
_STAGED_NORM = re.compile(r"\d{1,6}\.(?:norm\.)?(weight|bias)")
_APART = re.compile(r"(?<=self_attn\.)([qkv])(?=_proj\.)")
_HEADS = ("lm_head.weight", "lm_head.decoder_weight")
_OURS = {theirs.removeprefix("gpt."): ours for theirs, ours in our_names("fleetx").items()}


# --- in ---------------------------------------------------------------------------------------


def read_fleetx(directory: Path, heads: int | None = None) -> ForeignModel:
    """The model in `directory`: a leaf with a `.pdparams` file, or a tree of ranks.

    `heads` is for files without a description.
    """
    config = _read_config(directory / CONFIG)
    if heads is None or "num_attention_heads" in config:
        heads = _find_heads(directory, config)
    found: dict[str, LazyTensor] = {}
    for ranks in _stages(directory):
        pieces = [_ours(read_pdparams(file)) for file in ranks]
        for name in pieces[0]:
            if not all(name in piece for piece in pieces):
                raise CheckpointError(f"{directory}: {name} is not in the files of every rank")
            # The embedding is on the first and on the last stage.
            found.setdefault(name, _merged(name, [piece[name] for piece in pieces]))
    if head := found.pop("head", None):
        check_tied(directory, "its output head", head, found.get("embeddings.word.weight"))
    return assemble(
        "fleetx",
        directory,
        _fused(directory, found, heads),
        heads,
        declared={},
        options={
            key: float(config[key])
            for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
            if isinstance(config.get(key), int | float) and 0 <= config[key] < 1
        },
        tokenizer=find_tokenizer(directory, directory.parent),
    )


def _read_config(path: Path) -> dict[str, Any]:
    """PaddleNLP's description of the model, which FleetX does not write; empty without one."""
    if not path.is_file():
        return {}
    content = read_json(path)
    arguments = content.get("init_args")
    if isinstance(arguments, list) and arguments and isinstance(arguments[0], dict):
        return arguments[0]
    return content


def _find_heads(directory: Path, config: dict[str, Any]) -> int:
    if "num_attention_heads" not in config:
        raise CheckpointError(
            f"{directory}: FleetX's files do not say how many attention heads the model has; give "
            f"{HEADS_OPTION} (the YAML file it was trained with has it under Model)"
        )
    return count_of(directory / CONFIG, "num_attention_heads", config["num_attention_heads"])


def _stages(directory: Path) -> list[list[Path]]:
    """The files of the tensor ranks, for each pipeline stage."""
    leaves = {
        (int(match[3]), int(match[1])): path
        for path in sorted(directory.iterdir(), reverse=True)  # so that sharding rank 0 stays
        if (match := RANK.fullmatch(path.name)) and path.is_dir()
    }
    if not leaves:
        return [[_file_in(directory)]]
    stages, ranks = (1 + max(key[axis] for key in leaves) for axis in (0, 1))
    for stage in range(stages):
        for rank in range(ranks):
            if (stage, rank) not in leaves:
                raise CheckpointError(
                    f"{directory} is incomplete: mp_{rank:02d}_sharding_00_pp_{stage:02d} is "
                    "missing"
                )
    return [[_file_in(leaves[stage, rank]) for rank in range(ranks)] for stage in range(stages)]


def _file_in(directory: Path) -> Path:
    present = [directory / name for name in _FILES if (directory / name).is_file()]
    present = present or sorted(directory.glob("*.pdparams"))
    if len(present) == 1:
        return present[0]
    count = "no" if not present else "more than one"
    raise CheckpointError(
        f"{directory} has {count} .pdparams file; give a directory with one, or with the tree of "
        "ranks mp_XX_sharding_XX_pp_XX"
    )


def _ours(arrays: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    return {_our_name(name): array for name, array in arrays.items()}


def _our_name(name: str) -> str:
    """Our name, or the name itself where it means nothing here. Queries, keys and values that are
    stored separately get their joint name and `#q`, `#k` or `#v`."""
    plain = _WRAPPERS.sub("", name)
    if plain in _HEADS:
        return "head"
    if match := _STAGED_NORM.fullmatch(plain):
        return f"norm.{match[1]}"
    if match := _STAGED.fullmatch(plain):
        # Stage 0 of the pipeline's list is the embedding.
        plain = f"decoder.layers.{int(match[1]) - 1}.{match[2]}"
    if plain.startswith(("word_embeddings.", "position_embeddings.")):
        plain = f"embeddings.{plain}"
    apart = _APART.search(plain)
    pattern, number = split_number(_APART.sub("qkv", plain))
    ours = _OURS.get(pattern)
    if ours is None:
        return name
    return ROWS[ours].of_layer(number) + (f"#{apart[1]}" if apart else "")


def _merged(name: str, pieces: list[LazyTensor]) -> LazyTensor:
    """Of all tensor ranks; everything that is not cut is the same on each."""
    whole = name.partition("#")[0]
    axis = 0 if name == "head" else None
    if whole in ROWS and (axis := ROWS[whole].split_dim) is not None and ROWS[whole].is_matrix:
        axis = 1 - axis  # in Paddle's orientation
    return pieces[0] if axis is None else joined(pieces, axis)


def _fused(path: Path, found: dict[str, LazyTensor], heads: int) -> dict[str, LazyTensor]:
    """Transposed to (out, in), with separate q, k and v joined."""
    turned = {
        name: transposed(source) if _is_turned(name, source) else source
        for name, source in found.items()
    }
    for name in list(turned):
        whole, _, part = name.partition("#")
        if part != "q":
            continue
        names = [f"{whole}#{letter}" for letter in "qkv"]
        if not all(each in turned for each in names):
            raise CheckpointError(f"{path} is not a complete GPT: some of {names} are missing")
        together = joined([turned.pop(each) for each in names], 0)
        turned[whole] = heads_from_blocks(together, heads)
    return turned


def _is_turned(name: str, source: LazyTensor) -> bool:
    whole = name.partition("#")[0]
    return whole in ROWS and ROWS[whole].kind == "linear" and len(source.shape) == 2


# --- out --------------------------------------------------------------------------------------


def write_fleetx(model: ForeignModel, directory: Path) -> None:
    """FleetX's tree of one rank, with fused qkv, and the sizes in `model_config.json`."""
    require_gpt2(model, "FleetX")
    leaf = directory / "mp_00_sharding_00_pp_00"
    leaf.mkdir()
    names = {ours: their_name("fleetx", ours) for ours in model.stored}
    write_pdparams(
        leaf / "model.pdparams",
        (
            (names[ours], tensor.mT if ROWS[ours].is_matrix else tensor)
            for ours, tensor in model.tensors()
        ),
        _paddle_names(names),
    )
    (directory / CONFIG).write_text(json.dumps({"init_args": [model.model]}, indent=2) + "\n")


def _paddle_names(names: dict[str, str]) -> dict[str, str]:
    """The name Paddle itself gives each parameter: kind, number of its kind, w or b."""
    kinds = {"embedding": "embedding", "linear": "linear", "norm": "layer_norm"}
    counts = dict.fromkeys(kinds, 0)
    table: dict[str, str] = {}
    for ours, foreign in names.items():
        kind = ROWS[ours].kind
        is_weight = foreign.endswith(".weight")
        counts[kind] += is_weight
        table[foreign] = f"{kinds[kind]}_{counts[kind] - 1}.{'w' if is_weight else 'b'}_0"
    return table


# -- `.pdparams`: Paddle's pickled dictionaries, without Paddle or pickle -------------------------


NAME_TABLE = "StructuredToParameterName@@"
SLICE_TABLE = "UnpackBigParamInfor@@"


# --- reading ----------------------------------------------------------------------------------


def _itself(items: Any) -> tuple[Any, ...]:
    """`tuple((name, array))`."""
    if not isinstance(items, tuple):
        raise TypeError
    return items


def _named(expression: Any, names: Any) -> Any:
    """`eval("data", {"data": array})`, Paddle's way to write a tensor: looked up, not evaluated."""
    if expression != "data" or not isinstance(names, dict) or set(names) != {"data"}:
        raise CheckpointError("it asks to evaluate an expression. Nothing was run")
    return names["data"]


_PADDLE = NUMPY | {
    f"{module}.{name}": Constructor(make)
    for module in ("builtins", "__builtin__")
    for name, make in (("tuple", _itself), ("eval", _named))
}


def read_pdparams(path: Path) -> dict[str, LazyTensor]:
    """Every array of a `.pdparams` file by its name there."""
    content = PickleMachine(map_file(path), path, only(_PADDLE)).load()
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no dictionary of weights")
    try:
        arrays = {
            name: _array(name, value)
            for name, value in content.items()
            if name not in (NAME_TABLE, SLICE_TABLE)
        }
        return _without_slices(arrays, content.get(SLICE_TABLE, {}))
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None


def _array(name: Any, value: Any) -> LazyTensor:
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    if not isinstance(name, str) or not isinstance(value, PickledArray):
        raise CheckpointError(f"its entry {str(name)[:100]!r} is no array")
    return value.stored()


def _without_slices(arrays: dict[str, LazyTensor], table: Any) -> dict[str, LazyTensor]:
    try:
        for name, about in table.items():
            parts = [arrays.pop(part) for part in about["slices"]]
            arrays[name] = reshaped(joined(parts, 0), tuple(about["OriginShape"]))
    except (TypeError, KeyError, AttributeError, IndexError):
        raise CheckpointError("its table of cut arrays is damaged") from None
    return arrays


# --- writing ----------------------------------------------------------------------------------

# The opcodes are written here and not by pickle, so that arrays go to the disk one at a time, and
# under the name numpy had for its constructor before version 2, which newer ones know as well.
_PROTOCOL_4 = b"\x80\x04"
_RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
_NUMPY_CODES = {torch.float32: b"f4", torch.float16: b"f2", torch.bfloat16: b"u2"}
_LITTLE_ENDIAN = b"(K\x03\x8c\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def write_pdparams(
    path: Path, tensors: Iterable[tuple[str, Tensor]], table: dict[str, str]
) -> None:
    """Write arrays as they come; `table` gives Paddle's own name of each."""
    with path.open("wb") as stream:
        stream.write(_PROTOCOL_4 + b"}")
        for name, tensor in tensors:
            stream.write(_text(name))
            _write_array(stream, tensor)
            stream.write(b"s")
        stream.write(_text(NAME_TABLE) + b"}")
        for name, own in table.items():
            stream.write(_text(name) + _text(own) + b"s")
        stream.write(b"s.")


def _write_array(stream: BinaryIO, tensor: Tensor) -> None:
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    sizes = b"".join(b"J" + struct.pack("<i", size) for size in tensor.shape)
    dtype = b"cnumpy\ndtype\n\x8c\x02" + _NUMPY_CODES[tensor.dtype] + b"\x89\x88\x87R"
    stream.write(_RECONSTRUCT + b"(K\x01(" + sizes + b"t" + dtype + _LITTLE_ENDIAN + b"\x89")
    stream.write(b"\x8e" + struct.pack("<Q", tensor.nbytes))
    stream.write(bits.contiguous().numpy().data.cast("B"))
    stream.write(b"tb")


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded
