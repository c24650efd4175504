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
from pathlib import Path
from typing import Any

from fourfold.convert.files import find_tokenizer, read_json
from fourfold.convert.foreign import ForeignModel, assemble, check_tied, count_of
from fourfold.convert.pdparams import read_pdparams, write_pdparams
from fourfold.convert.stored import Stored, heads_from_blocks, joined, transposed
from fourfold.errors import CheckpointError

RANK = re.compile(r"mp_(\d\d)_sharding_(\d\d)_pp_(\d\d)")
CONFIG = "model_config.json"
HEADS_OPTION = "--num-attention-heads"

_FILES = ("model.pdparams", "model_state.pdparams")
_PARTS = {
    "self_attn.qkv_proj": "attn.qkv",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.out_proj": "attn.out",
    "linear1": "mlp.up",
    "linear2": "mlp.down",
    "norm1": "norm1",
    "norm2": "norm2",
}
_WHOLE = re.compile(r"decoder\.layers\.(\d{1,6})\.([a-z0-9_.]+)\.(weight|bias)")
_STAGED = re.compile(r"(\d{1,6})\.([a-z0-9_.]+)\.(weight|bias)")
_STAGED_NORM = re.compile(r"\d{1,6}\.(?:norm\.)?(weight|bias)")
_WRAPPERS = re.compile(r"^(?:_layers\.)?(?:gpt\.)?(?:shared_layers\.embed\.(?=\w))?")

# The axis, in Paddle's orientation, along which tensor ranks hold pieces; biases of the others and
# everything else is the same on every rank.
_PIECES = {
    **{f"attn.{part}.{kind}": -1 for part in ("qkv", "q", "k", "v") for kind in ("weight", "bias")},
    "mlp.up.weight": -1,
    "mlp.up.bias": -1,
    "attn.out.weight": 0,
    "mlp.down.weight": 0,
    "embeddings.word.weight": 0,
    "head": 0,
}


# --- in ---------------------------------------------------------------------------------------


def read_fleetx(directory: Path, heads: int | None = None) -> ForeignModel:
    """The model in `directory`: a leaf with a `.pdparams` file, or a tree of ranks.

    `heads` is for files without a description.
    """
    config = _read_config(directory / CONFIG)
    if heads is None or "num_attention_heads" in config:
        heads = _find_heads(directory, config)
    found: dict[str, Stored] = {}
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


def _ours(arrays: dict[str, Stored]) -> dict[str, Stored]:
    return {_our_name(name): array for name, array in arrays.items()}


def _our_name(name: str) -> str:
    """Our name, or the name itself where it means nothing here."""
    plain = _WRAPPERS.sub("", name)
    if match := _WHOLE.fullmatch(plain):
        part = _PARTS.get(match[2])
        return f"layers.{match[1]}.{part}.{match[3]}" if part else name
    staged = _STAGED.fullmatch(plain)
    if staged and staged[2] in _PARTS:
        # Stage 0 of the pipeline's list is the embedding.
        return f"layers.{int(staged[1]) - 1}.{_PARTS[staged[2]]}.{staged[3]}"
    if match := _STAGED_NORM.fullmatch(plain):
        return f"norm.{match[1]}"
    known = {
        "embeddings.word_embeddings.weight": "embeddings.word.weight",
        "embeddings.position_embeddings.weight": "embeddings.position.weight",
        "word_embeddings.weight": "embeddings.word.weight",
        "position_embeddings.weight": "embeddings.position.weight",
        "decoder.norm.weight": "norm.weight",
        "decoder.norm.bias": "norm.bias",
        "lm_head.weight": "head",
        "lm_head.decoder_weight": "head",
    }
    return known.get(plain, name)


def _merged(name: str, pieces: list[Stored]) -> Stored:
    axis = _PIECES.get(re.sub(r"^layers\.\d+\.", "", name))
    if axis is None:
        return pieces[0]
    return joined(pieces, axis % max(len(pieces[0].shape), 1))


def _fused(path: Path, found: dict[str, Stored], heads: int) -> dict[str, Stored]:
    """Turned to (out, in), and separate q, k and v made one."""
    turned = {
        name: transposed(source)
        if name.startswith("layers.") and len(source.shape) == 2
        else source
        for name, source in found.items()
    }
    for name in list(turned):
        if ".attn.q." not in name:
            continue
        names = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
        if not all(part in turned for part in names):
            raise CheckpointError(f"{path} is no whole GPT: of {names} only some are there")
        together = joined([turned.pop(part) for part in names], 0)
        turned[name.replace(".attn.q.", ".attn.qkv.")] = heads_from_blocks(together, heads)
    return turned


# --- out --------------------------------------------------------------------------------------

_FOREIGN_PARTS = {ours: theirs for theirs, ours in _PARTS.items()}


def write_fleetx(model: ForeignModel, directory: Path) -> None:
    """FleetX's tree of one rank, with fused qkv, and the sizes in `model_config.json`."""
    leaf = directory / "mp_00_sharding_00_pp_00"
    leaf.mkdir()
    names = {ours: _foreign_name(ours) for ours in model.stored}
    write_pdparams(
        leaf / "model.pdparams",
        (
            (names[ours], tensor.mT if ours.startswith("layers.") and tensor.ndim == 2 else tensor)
            for ours, tensor in model.tensors()
        ),
        _paddle_names(names),
    )
    (directory / CONFIG).write_text(json.dumps({"init_args": [model.model]}, indent=2) + "\n")


def _foreign_name(ours: str) -> str:
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", ours):
        return f"gpt.decoder.layers.{match[1]}.{_FOREIGN_PARTS[match[2]]}.{match[3]}"
    if ours.startswith("norm."):
        return f"gpt.decoder.{ours}"
    return "gpt." + ours.replace(".weight", "_embeddings.weight")


def _paddle_names(names: dict[str, str]) -> dict[str, str]:
    """The name Paddle itself gives each parameter: kind, number of its kind, w or b."""
    counts = {"embedding": 0, "linear": 0, "layer_norm": 0}
    table: dict[str, str] = {}
    for ours, foreign in names.items():
        kind = "linear"
        if ours.startswith("embeddings."):
            kind = "embedding"
        elif "norm" in ours:
            kind = "layer_norm"
        if foreign.endswith(".weight"):
            counts[kind] += 1
        letter = "w" if foreign.endswith(".weight") else "b"
        table[foreign] = f"{kind}_{counts[kind] - 1}.{letter}_0"
    return table
