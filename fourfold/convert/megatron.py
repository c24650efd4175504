"""Megatron-LM and Megatron-DeepSpeed checkpoints, in.

    latest_checkpointed_iteration.txt        names iter_XXXXXXX or release
    iter_XXXXXXX/mp_rank_TT[_PPP]/model_optim_rng.pt, or model_rng.pt       format `torch`
    iter_XXXXXXX/.metadata, *.distcp, common.pt                             format `torch_dist`

Tensor and pipeline ranks are merged, virtual stages too. Both naming schemes are read: the classic
one (`language_model.encoder.layers.0.self_attention.query_key_value`) and megatron.core's
(`decoder.layers.0.self_attention.linear_qkv`).

The rows of qkv are ours, head by head, since checkpoint version 2.0; version 1.0 has triples
(q, k, v) within each head and version 0 all q, all k, all v of a rank.

In `torch_dist`, the default since 2024, a tensor is whole whatever layout wrote it, and one tensor
holds the same weight of all layers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fourfold.checkpoint.bounded import read_bounded
from fourfold.convert.distributed_files import METADATA, DistributedFiles
from fourfold.convert.imported import (
    ROWS,
    ForeignModel,
    LazyTensor,
    assemble,
    check_tied,
    count_of,
    find_tokenizer,
    heads_from_blocks,
    heads_from_triples,
    joined,
    our_names,
    split_number,
)
from fourfold.convert.pickles import Record
from fourfold.convert.torch_files import Namespace, read_torch_file
from fourfold.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
STEP = re.compile(r"iter_\d{7}|release")

FILES = ("model_optim_rng.pt", "model_rng.pt")
MAX_DEPTH = 8
MAX_NAMES = 100_000

OUR_LAYER = re.compile(r"layers\.(\d+)\.")
_STACKED = re.compile(r"(?:model\.)?(?:module\.)*(?:encoder|decoder)\.layers\.(?!\d)")
_NO_WEIGHTS = re.compile(
    r"optimizer|chained_|opt_param_scheduler|rng_state|rerun_state|.*_extra_state"
)
_WRAPPERS = re.compile(r"^(?:model\.)?(?:module\.)*(?:language_model\.)?")
_ROOTS = re.compile(r"^(?:transformer|encoder|decoder)\.")
_OLD_ATTENTION = re.compile(r"^(layers\.[^.]+\.)attention\.")
_OLD_NORM = re.compile(r"(?<=input)_norm\.|(?<=post_attention)_norm\.|(?<=final)_norm\.")


def _normal(name: str) -> str:
    """A name without what versions of Megatron spell in different ways."""
    plain = _ROOTS.sub("", _WRAPPERS.sub("", name))
    return _OLD_NORM.sub("_layernorm.", _OLD_ATTENTION.sub(r"\1self_attention.", plain))


_HEADS = ("word_embeddings_for_head.weight", "output_layer.weight")
_OURS = {
    _normal(theirs): ours for theirs, ours in our_names("core", "core_local", "classic").items()
}

# Arguments of a model that ours is not: key, the values that are ours, what it means.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("swiglu", (False,), "SwiGLU"),
    ("squared_relu", (False,), "squared ReLU"),
    ("normalization", ("LayerNorm",), "another norm than LayerNorm"),
    ("apply_layernorm_1p", (False,), "norm weights stored less one"),
    ("layernorm_epsilon", (1e-5,), "another layernorm_epsilon than 1e-5"),
    ("norm_epsilon", (1e-5,), "another norm_epsilon than 1e-5"),
    ("apply_residual_connection_post_layernorm", (False,), "residuals taken after the norm"),
    ("position_embedding_type", ("learned_absolute",), "positions that are not learned"),
    ("use_rotary_position_embeddings", (False,), "rotary positions"),
    ("untie_embeddings_and_output_weights", (False,), "a head of its own"),
    ("add_bias_linear", (True,), "linear layers without bias"),
    ("group_query_attention", (False,), "grouped queries"),
    ("multi_latent_attention", (False,), "latent attention"),
    ("num_experts", ([1], 1), "experts"),
    ("onnx_safe", (False,), "the exact GELU in place of the tanh form"),
)

OPTIONS = {
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_method_std": "initializer_range",
}


def read_megatron(directory: Path, heads: int | None = None) -> ForeignModel:
    """The model in `directory`: one with the tracker file, or one of its steps.

    `heads` is for files too old to carry their arguments.
    """
    step = step_directory(directory)
    whole = is_torch_dist(step)
    contents = {} if whole else {key: _content(file) for key, file in _ranks(step).items()}
    arguments = (_common(step) if whole else contents[0, 0]).get("args")
    args = arguments.values if isinstance(arguments, Namespace) else {}
    _refuse(step, args)
    if heads is None or "num_attention_heads" in args:
        heads = _heads(step, args)
    found = _of_all_layers(step) if whole else _merge_ranks(step, contents, heads)
    if head := found.pop("head", None):
        check_tied(step, "its output head", head, found.get("embeddings.word.weight"))
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "max_position_embeddings")
    return assemble(
        "megatron",
        step,
        found,
        heads,
        declared={key: args[key] for key in sizes if isinstance(args.get(key), int)},
        options=_options(args),
        tokenizer=find_tokenizer(step, step.parent),
    )


def is_torch_dist(directory: Path) -> bool:
    return (directory / METADATA).is_file()


def _common(step: Path) -> dict[Any, Any]:
    """What is the same on all ranks: arguments, iteration, version."""
    file = step / "common.pt"
    return _content(file) if file.is_file() else {}


def _of_all_layers(step: Path) -> dict[str, LazyTensor]:
    """The weights of a `torch_dist` directory by our names."""
    files = DistributedFiles(step)
    found: dict[str, LazyTensor] = {}
    for name in files.names:
        if _NO_WEIGHTS.match(name):
            continue
        match = _STACKED.match(name)
        if match is None:
            found[_our_name(name, 0)] = files.tensor(name)
            continue
        for number, stored in enumerate(files.rows(name)):
            found[_our_name(f"{match[0]}{number}.{name[match.end() :]}", 0)] = stored
    return found


def _content(file: Path) -> dict[Any, Any]:
    content = read_torch_file(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no dictionary")
    return content


def _heads(step: Path, args: dict[Any, Any]) -> int:
    if "num_attention_heads" not in args:
        raise CheckpointError(
            f"{step}: it carries no arguments, so the number of attention heads is unknown; give "
            "--num-attention-heads"
        )
    return count_of(step, "num_attention_heads", args["num_attention_heads"])


def _merge_ranks(
    step: Path, contents: dict[tuple[int, int], dict[Any, Any]], heads: int
) -> dict[str, LazyTensor]:
    """Every tensor by our name. Layers are numbered as data meets them: the first chunk of every
    stage in turn, then the second of every stage, and so on."""
    stages, width = (1 + max(key[axis] for key in contents) for axis in (0, 1))
    if heads % width:
        raise CheckpointError(f"{step}: {width} tensor ranks do not divide {heads} heads")
    version = contents[0, 0].get("checkpoint_version", 0)
    found: dict[str, LazyTensor] = {}
    before = 0
    for key in _chunk_keys(step, contents[0, 0]):
        for stage in range(stages):
            pieces = [_tensors(step, contents[stage, rank], key, before) for rank in range(width)]
            for name in pieces[0]:
                parts = [_in_our_order(piece, name, version, heads // width) for piece in pieces]
                # The embedding is on the first and on the last stage.
                found.setdefault(name, _merged(name, parts))
            before += len({match[1] for n in pieces[0] if (match := OUR_LAYER.match(n))})
    return found


def step_directory(directory: Path) -> Path:
    """The directory that holds the `mp_rank` directories, or the files of `torch_dist`."""
    if is_torch_dist(directory) or any(RANK.fullmatch(path.name) for path in directory.iterdir()):
        return directory
    tracker = directory / TRACKER
    if tracker.is_file():
        word = read_bounded(tracker, 100).decode("utf-8", "replace").strip()
        step = directory / (f"iter_{int(word):07d}" if word.isascii() and word.isdigit() else word)
        if not STEP.fullmatch(step.name) or not step.is_dir():
            raise CheckpointError(f"{tracker} names {word[:40]!r}, which is not there")
        return step
    steps = sorted(path for path in directory.iterdir() if STEP.fullmatch(path.name))
    if not steps:
        raise CheckpointError(f"{directory} holds no step of a Megatron checkpoint")
    return steps[-1]


def _ranks(step: Path) -> dict[tuple[int, int], Path]:
    """(pipeline rank, tensor rank) -> file."""
    found = {}
    for path in step.iterdir():
        match = RANK.fullmatch(path.name)
        if match:
            file = next((path / name for name in FILES if (path / name).is_file()), None)
            if file is None:
                raise CheckpointError(f"{path} holds neither of {', '.join(FILES)}")
            found[int(match[2] or 0), int(match[1])] = file
        elif path.name.startswith("mp_rank_"):
            raise CheckpointError(f"{path}: experts are not part of Fourfold's model")
    stages, width = (1 + max((key[axis] for key in found), default=-1) for axis in (0, 1))
    if len(found) != stages * width or not found:
        raise CheckpointError(
            f"{step} is incomplete: of {stages} x {width} ranks {len(found)} are there"
        )
    return found


def _refuse(step: Path, args: dict[Any, Any]) -> None:
    for key, ours, meaning in _REFUSED:
        value = args.get(key)
        # Of an enumeration nothing is known but its name; the tensors will tell.
        if value is not None and not isinstance(value, Record) and value not in ours:
            raise CheckpointError(
                f"{step} was trained with {meaning} ({key}), which Fourfold's model does not have"
            )
    if args.get("bias_gelu_fusion") is False and not args.get("openai_gelu"):
        raise CheckpointError(
            f"{step} was trained with the exact GELU (bias_gelu_fusion off, openai_gelu off); "
            "Fourfold's model has the tanh form"
        )


def _options(args: dict[Any, Any]) -> dict[str, float]:
    return {
        ours: float(args[theirs])
        for theirs, ours in OPTIONS.items()
        if isinstance(args.get(theirs), float) and 0 <= args[theirs] < 1
    }


def _chunk_keys(step: Path, content: dict[Any, Any]) -> list[str]:
    """`model`, or model0, model1, ... where every rank holds several stages of the pipeline."""
    if "model" in content:
        return ["model"]
    keys = [key for key in content if isinstance(key, str) and re.fullmatch(r"model\d{1,3}", key)]
    if not keys:
        raise CheckpointError(f"{step}: the files hold no model")
    return sorted(keys, key=lambda key: int(key.removeprefix("model")))


def _tensors(step: Path, content: dict[Any, Any], key: str, offset: int) -> dict[str, LazyTensor]:
    """The tensors of one rank by our names, its layers counted from `offset`."""
    flat: dict[str, LazyTensor] = {}
    _flatten(content.get(key), "", 0, flat)
    if not flat:
        raise CheckpointError(f"{step}: one of the ranks holds no {key}")
    return {_our_name(name, offset): tensor for name, tensor in flat.items()}


def _flatten(value: Any, prefix: str, depth: int, flat: dict[str, LazyTensor]) -> None:
    if not isinstance(value, dict) or depth > MAX_DEPTH or len(flat) > MAX_NAMES:
        raise CheckpointError(f"the model's dictionary is damaged below {prefix[:100]!r}")
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if name.endswith("_extra_state"):
            continue
        if isinstance(inner, LazyTensor):
            flat[name] = inner
        else:
            _flatten(inner, f"{name}.", depth + 1, flat)


def _our_name(name: str, offset: int) -> str:
    """Our name, or the name itself where it means nothing here."""
    plain = _normal(name)
    if plain in _HEADS:
        return "head"
    pattern, number = split_number(plain)
    ours = _OURS.get(pattern)
    return name if ours is None else ROWS[ours].of_layer(number + offset)


def _in_our_order(piece: dict[str, LazyTensor], name: str, version: Any, heads: int) -> LazyTensor:
    if name not in piece:
        raise CheckpointError(f"{name} is not in the file of every tensor rank")
    by_head = name in ROWS and ROWS[name].rows_by_head
    if not by_head or (isinstance(version, int | float) and version >= 2):
        return piece[name]
    if version not in (0, 1):
        raise CheckpointError("checkpoint_version is none that Megatron wrote: 0, 1.0, 2.0, 3.0")
    return (heads_from_blocks if version == 0 else heads_from_triples)(piece[name], heads)


def _merged(name: str, pieces: list[LazyTensor]) -> LazyTensor:
    axis = split_dim(name)
    return pieces[0] if axis is None else joined(pieces, axis)


def split_dim(name: str) -> int | None:
    """The axis along which tensor ranks hold pieces, ours; all else is the same on every rank."""
    if name in ROWS:
        return ROWS[name].split_dim
    return 0 if name == "head" else None
