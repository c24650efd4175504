"""Hugging Face GPT-2 directories, in: `config.json` and safetensors or `pytorch_model.bin` files.

GPT-2's Conv1D stores (in, out), the transpose of ours, and the columns of `c_attn` as all q, all k,
all v. Options that our model does not have are refused by name; attention scaling by layer is
folded into the weights instead.

Out: a complete directory that `transformers` loads as it is, with safetensors shards of bounded
size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fourfold.convert.imported import (
    ROWS,
    ForeignModel,
    LazyTensor,
    assemble,
    blocks_from_heads,
    check_tied,
    count_of,
    find_tokenizer,
    heads_from_blocks,
    our_names,
    queries_scaled,
    read_json,
    split_number,
    their_name,
    transposed,
    write_json,
    write_pair,
)
from fourfold.convert.torch_files import read_torch_file
from fourfold.errors import CheckpointError
from fourfold.model import count_parameters
from fourfold.tokenizer import Tokenizer

CONFIG = "config.json"
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_FILES = (SAFETENSORS, SAFETENSORS_INDEX, TORCH, TORCH_INDEX)

# The same function under three names.
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")

_OURS = our_names("huggingface")
_PREFIX = "transformer."
_MASKS = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Settings of a network that ours is not: key, the values that are ours.
_REFUSED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("model_type", ("gpt2",)),
    ("activation_function", TANH_GELU),
    ("layer_norm_epsilon", (1e-5,)),
    ("tie_word_embeddings", (True,)),
    ("add_cross_attention", (False,)),
    ("auto_map", ()),
    ("quantization_config", ()),
)


def read_huggingface(directory: Path) -> ForeignModel:
    path = directory / CONFIG
    config = read_json(path)
    if "model_type" not in config:
        raise CheckpointError(f"{path} names no model_type; Fourfold reads gpt2")
    for key, ours in _REFUSED:
        if config.get(key) not in (*ours, None):
            allowed = f"; it has {' or '.join(map(repr, ours))}" if ours else ""
            raise CheckpointError(
                f"{path}: {key}={_short(config[key])} is not what Fourfold's GPT has{allowed}"
            )
    heads = count_of(path, "n_head", config.get("n_head"))
    found, notes = _by_our_names(directory, heads, config)
    width = config.get("n_inner") or 4 * count_of(path, "n_embd", config.get("n_embd"))
    named = {"vocab_size": "vocab_size", "n_embd": "hidden_size", "n_layer": "num_layers"}
    named |= {"n_positions": "max_position_embeddings"}
    return assemble(
        "hf",
        directory,
        found,
        heads,
        declared={
            "ffn_hidden_size": width,
            **{ours: config[key] for key, ours in named.items() if config.get(key) is not None},
        },
        options=_options(config, notes),
        tokenizer=find_tokenizer(directory),
        notes=notes,
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _options(config: dict[str, Any], notes: list[str]) -> dict[str, float]:
    named = {
        "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob",
        "initializer_range": "initializer_range",
    }
    options = {
        ours: float(config[key])
        for key, ours in named.items()
        if isinstance(config.get(key), int | float) and 0 <= config[key] < 1
    }
    embedding = config.get("embd_pdrop", config.get("resid_pdrop"))
    if embedding != config.get("resid_pdrop"):
        notes.append(
            f"embd_pdrop={_short(embedding)} differs from resid_pdrop; hidden_dropout_prob is the "
            "latter, for both"
        )
    return options


def _by_our_names(
    directory: Path, heads: int, config: dict[str, Any]
) -> tuple[dict[str, LazyTensor], list[str]]:
    found, notes, head = {}, [], None
    for name, source in _weights(directory).items():
        if _MASKS.fullmatch(name):
            continue
        if name == "lm_head.weight":
            head = source
            continue
        pattern, layer = split_number(f"{_PREFIX}{name.removeprefix(_PREFIX)}")
        if pattern not in _OURS:
            found[name] = source
            continue
        row = ROWS[_OURS[pattern]]
        if row.kind == "linear" and len(source.shape) == 2:
            source = transposed(source)
        if row.rows_by_head:
            source = heads_from_blocks(source, heads)
            factor = _query_factor(config, layer, source.shape[0] // (3 * heads))
            if factor != 1.0:
                source = queries_scaled(source, heads, factor)
        found[row.of_layer(layer)] = source
    if head is not None:
        check_tied(directory, "lm_head.weight", head, found.get("embeddings.word.weight"))
    if config.get("scale_attn_by_inverse_layer_idx"):
        notes.append("scale_attn_by_inverse_layer_idx: the queries were divided by their layer")
    if config.get("scale_attn_weights") is False:
        notes.append("scale_attn_weights off: the queries were multiplied by sqrt(head size)")
    return found, notes


def _query_factor(config: dict[str, Any], layer: int, head_size: int) -> float:
    """What makes our attention, always scaled by 1/sqrt(head size), that of the configuration."""
    factor = 1.0
    if config.get("scale_attn_weights") is False:
        factor *= math.sqrt(head_size)
    if config.get("scale_attn_by_inverse_layer_idx"):
        factor /= layer + 1
    return factor


# --- files ------------------------------------------------------------------------------------


def _weights(directory: Path) -> dict[str, LazyTensor]:
    """Every tensor of the directory by its name there; safetensors before pickles."""
    for whole, index in ((SAFETENSORS, SAFETENSORS_INDEX), (TORCH, TORCH_INDEX)):
        read = _read_safetensors if whole == SAFETENSORS else _read_torch
        if (directory / index).is_file():
            return _indexed(directory / index, read)
        if (directory / whole).is_file():
            return read(directory / whole)
    raise CheckpointError(f"{directory} holds none of {', '.join(WEIGHT_FILES)}")


def _indexed(index: Path, read: Any) -> dict[str, LazyTensor]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in files.values()
    ):
        raise CheckpointError(f"{index} is damaged: its weight_map must name files beside it")
    held = {file: read(index.parent / file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in held[file]:
            raise CheckpointError(f"{index} says that {name[:100]!r} is in {file}, where it is not")
    return {name: held[file][name] for name, file in files.items()}


def _read_safetensors(path: Path) -> dict[str, LazyTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from error

    def stored(name: str) -> LazyTensor:
        dtype = _DTYPES.get(slices[name].get_dtype(), torch.int64)

        def read() -> Tensor:
            return file.get_tensor(name)

        return LazyTensor(tuple(slices[name].get_shape()), dtype, read)

    return {name: stored(name) for name in slices}


def _read_torch(path: Path) -> dict[str, LazyTensor]:
    content = read_torch_file(path)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, LazyTensor) for name, value in content.items()
    ):
        raise CheckpointError(f"{path} holds no dictionary of tensors")
    return content


# -- out ------------------------------------------------------------------------------------------


SHARD_BYTES = 2 << 30

# Left out where the source does not say: both sides then have their own defaults.
_OPTIONS = {
    "embd_pdrop": "hidden_dropout_prob",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
}


def write_huggingface(
    model: ForeignModel,
    directory: Path,
    tokenizer: Tokenizer | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    heads = model.shape.num_attention_heads
    weights = {
        their_name("huggingface", name): _turned(name, source, heads)
        for name, source in model.stored.items()
    }
    _write_shards(directory, weights, shard_bytes)
    ends = tokenizer.special_ids() if tokenizer else dict.fromkeys(("bos_token_id", "eos_token_id"))
    write_json(directory / CONFIG, _config(model) | ends)
    write_json(directory / "generation_config.json", {"pad_token_id": ends["eos_token_id"]} | ends)
    if tokenizer is not None:
        _write_tokenizer(directory, tokenizer, model.shape.max_position_embeddings)
    (directory / "README.md").write_text(_card(model, tokenizer))


def _turned(ours: str, source: LazyTensor, heads: int) -> LazyTensor:
    row = ROWS[ours]
    if row.rows_by_head:
        source = blocks_from_heads(source, heads)
    return transposed(source) if row.is_matrix else source


def _write_shards(directory: Path, weights: dict[str, LazyTensor], shard_bytes: int) -> None:
    shards = list(_shards(weights, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = SAFETENSORS if len(shards) == 1 else file
        tensors: dict[str, Tensor] = {name: weights[name].read().contiguous() for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        # safetensors makes files private; they should be as readable as their directory.
        (directory / file).chmod(directory.stat().st_mode & 0o666)
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(source.nbytes for source in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_json(directory / SAFETENSORS_INDEX, index)


def _shards(weights: dict[str, LazyTensor], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    room = shard_bytes
    for name, source in weights.items():
        if names and source.nbytes > room:
            yield names
            names, room = [], shard_bytes
        names.append(name)
        room -= source.nbytes
    yield names


def _config(model: ForeignModel) -> dict[str, Any]:
    sizes = model.shape
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes.vocab_size,
        "n_positions": sizes.max_position_embeddings,
        "n_embd": sizes.hidden_size,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_attention_heads,
        "n_inner": sizes.ffn_hidden_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        **{theirs: model.model[ours] for theirs, ours in _OPTIONS.items() if ours in model.model},
    }


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, positions: int) -> None:
    text, special = tokenizer.for_transformers()
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    write_json(directory / "tokenizer_config.json", about | special)
    write_json(directory / "special_tokens_map.json", special)
    write_pair(directory, tokenizer)


def _card(model: ForeignModel, tokenizer: Tokenizer | None) -> str:
    sizes = model.shape
    words = (
        f"{tokenizer.kind} of {tokenizer.vocab_size} tokens; documents end with "
        f"`{tokenizer.eos_token}`"
        if tokenizer
        else "none was given; add the one the model was trained with"
    )
    numbers = (
        sizes.num_layers,
        sizes.hidden_size,
        sizes.num_attention_heads,
        sizes.ffn_hidden_size,
        sizes.max_position_embeddings,
        sizes.vocab_size,
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2, fourfold]
---

# GPT with {count_parameters(sizes):,} parameters

A GPT-2 architecture (pre-LayerNorm, learned positions, tanh GELU, tied head), converted by
Fourfold from a `{model.kind}` checkpoint.

| layers | width | heads | feed-forward | positions | vocabulary |
| --- | --- | --- | --- | --- | --- |
| {" | ".join(map(str, numbers))} |

Tokenizer: {words}.

    from transformers import pipeline
    print(pipeline("text-generation", model="PATH")("Once")[0]["generated_text"])

Training data, intended use and limits are known to whoever trained it; describe them here.
"""
