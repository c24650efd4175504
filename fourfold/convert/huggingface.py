"""Hugging Face directories, in: `config.json` and safetensors or `pytorch_model.bin` files.

Which families of networks there are, and what they call their tensors, is in families.py; what
they say in config.json, in family_config.py. GPT-2's Conv1D stores (in, out), the transpose of
ours, and the columns of `c_attn` as all q, all k, all v; its attention scaling by layer is folded
into the weights. Llama and its kin have three tensors where ours, if every head has its own keys
and values, is one.

Out: a complete directory that `transformers` loads as it is, with safetensors shards of bounded
size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fourfold.convert.families import family_named, family_of
from fourfold.convert.family_config import Described, Family
from fourfold.convert.imported import (
    ForeignModel,
    LazyTensor,
    assemble,
    blocks_from_heads,
    check_tied,
    find_tokenizer,
    heads_from_blocks,
    joined,
    multiplied,
    part_of_heads,
    queries_scaled,
    read_json,
    split_number,
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

# Of earlier versions: masks and frequencies that nobody trained.
_BUFFERS = re.compile(
    r".*\.(?:attn\.(?:bias|masked_bias)|attention\.(?:bias|masked_bias)|rotary_emb\.inv_freq)"
    r"|h\.\d+\.attn\.(?:bias|masked_bias)"
)
_HEADS = ("lm_head.weight", "embed_out.weight")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_huggingface(directory: Path) -> ForeignModel:
    path = directory / CONFIG
    config = read_json(path)
    family = family_named(path, config)
    described = family.read(path, config)
    notes = described.notes
    found = _by_our_names(directory, family, described, config)
    if config.get("scale_attn_by_inverse_layer_idx"):
        notes.append("scale_attn_by_inverse_layer_idx: the queries were divided by their layer")
    if config.get("scale_attn_weights") is False:
        notes.append("scale_attn_weights off: the queries were multiplied by sqrt(head size)")
    return assemble(
        "hf",
        directory,
        found,
        described.heads,
        declared=described.declared,
        options=described.options,
        tokenizer=find_tokenizer(directory),
        notes=notes,
    )


def _by_our_names(
    directory: Path, family: Family, described: Described, config: dict[str, Any]
) -> dict[str, LazyTensor]:
    ours = {theirs: module for module, theirs in family.names.items()}
    prefix = family.names["norm."].partition(".")[0] + "."  # which a bare network lacks
    heads, is_tied = described.heads, described.options["tie_word_embeddings"]
    found: dict[str, LazyTensor] = {}
    head = None
    for name, source in _weights(directory).items():
        if _BUFFERS.fullmatch(name):
            continue
        if name in _HEADS:
            head = source
            continue
        whole = name if name.startswith(prefix) else f"{prefix}{name}"
        pattern, layer = split_number(whole)
        module, _, kind = pattern.rpartition(".")
        if f"{module}." not in ours:
            found[name] = source
            continue
        if family.qkv == "blocks":
            source = _from_conv1d(ours[f"{module}."], source, config, heads, layer)
        found[ours[f"{module}."].replace("*", str(layer), 1) + kind] = source
    if head is not None and is_tied:
        check_tied(directory, _HEADS[0], head, found.get("embeddings.word.weight"))
    elif head is not None:
        found["head.weight"] = head
    is_grouped = described.options.get("num_key_value_heads", heads) != heads
    return _fused(directory, found, heads) if family.qkv == "apart" and not is_grouped else found


def _fused(path: Path, found: dict[str, LazyTensor], heads: int) -> dict[str, LazyTensor]:
    """Queries, keys and values of each layer in one tensor, head by head."""
    fused: dict[str, LazyTensor] = {}
    for name, source in found.items():
        before, apart, after = name.partition(".attn.in_proj.")
        if not apart:
            fused[name] = source
        elif after.startswith("q."):
            names = [f"{before}{apart}{letter}{after[1:]}" for letter in "qkv"]
            if not all(each in found for each in names):
                raise CheckpointError(f"{path} is not a complete GPT: some of {names} are missing")
            together = joined([found[each] for each in names], 0)
            fused[f"{before}.attn.qkv{after[1:]}"] = heads_from_blocks(together, heads)
        elif f"{before}{apart}q{after[1:]}" not in found:
            fused[name] = source  # reported as one too many
    return fused


def _from_conv1d(
    module: str, source: LazyTensor, config: dict[str, Any], heads: int, layer: int
) -> LazyTensor:
    if module in _CONV1D and len(source.shape) == 2:
        source = transposed(source)
    if module == _QKV:
        source = heads_from_blocks(source, heads)
        factor = _query_factor(config, layer, source.shape[0] // (3 * heads))
        if factor != 1.0:
            source = queries_scaled(source, heads, factor)
    return source


_QKV = "layers.*.attn.qkv."
_CONV1D = (_QKV, "layers.*.attn.out.", "layers.*.mlp.up.", "layers.*.mlp.down.")


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


def write_huggingface(
    model: ForeignModel,
    directory: Path,
    tokenizer: Tokenizer | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    model = _without_logit_scale(model)
    shape = model.shape
    family = family_of(shape, model.path)
    weights: dict[str, LazyTensor] = {}
    for name, source in model.stored.items():
        weights |= _by_their_names(family, name, source, shape.num_attention_heads)
    _write_shards(directory, weights, shard_bytes)
    ends = tokenizer.special_ids() if tokenizer else dict.fromkeys(("bos_token_id", "eos_token_id"))
    write_json(directory / CONFIG, _config(model, family) | ends)
    write_json(directory / "generation_config.json", {"pad_token_id": ends["eos_token_id"]} | ends)
    if tokenizer is not None:
        _write_tokenizer(directory, tokenizer, shape.max_position_embeddings)
    (directory / "README.md").write_text(_card(model, family, tokenizer))


def _without_logit_scale(model: ForeignModel) -> ForeignModel:
    """The same network with the factor of its logits (muP's too) in the last norm instead, since
    the families have none: the head multiplies what that gives."""
    scale = model.shape.output_scale
    if scale == 1.0:
        return model
    stored = dict(model.stored)
    for name in ("norm.weight", "norm.bias"):
        if name in stored:
            stored[name] = multiplied(stored[name], scale)
    kept = {k: v for k, v in model.model.items() if k not in ("logit_scale", "mup_base_width")}
    return replace(model, model=kept, stored=stored)


def _by_their_names(
    family: Family, ours: str, source: LazyTensor, heads: int
) -> dict[str, LazyTensor]:
    pattern, layer = split_number(ours)
    module, _, kind = pattern.rpartition(".")
    module += "."
    if module == "head.":
        return {family.head + kind: source}

    def theirs(module: str) -> str:
        return family.names[module].replace("*", str(layer), 1) + kind

    if module == _QKV and family.qkv == "apart":
        parts = {theirs(f"layers.*.attn.in_proj.{letter}."): letter for letter in "qkv"}
        return {
            name: part_of_heads(source, heads, "qkv".index(letter))
            for name, letter in parts.items()
        }
    if family.qkv == "blocks":
        if module == _QKV:
            source = blocks_from_heads(source, heads)
        if module in _CONV1D and len(source.shape) == 2:
            source = transposed(source)
    return {theirs(module): source}


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


def _config(model: ForeignModel, family: Family) -> dict[str, Any]:
    """Dropout and initial deviation are left out where the source does not say: both sides then
    have their own defaults."""
    named = {**family.dropouts, "initializer_range": "initializer_range"}
    if "resid_pdrop" in named:
        named["embd_pdrop"] = "hidden_dropout_prob"
    dtype = str(model.dtype).removeprefix("torch.")
    hidden = model.model.get("hidden_dropout_prob")
    if hidden and "hidden_dropout_prob" not in named.values():
        model.notes.append(
            f"hidden_dropout_prob={hidden} is not written: {family.model_type} has no such dropout"
        )
    if model.shape.activation == "geglu":
        model.notes.append(
            f"activation geglu: transformers has it for {family.model_type}, vLLM refuses it and "
            "llama.cpp would compute SwiGLU"
        )
    return {
        **family.describe(model.shape),
        "torch_dtype": dtype,
        "dtype": dtype,
        **{theirs: model.model[ours] for theirs, ours in named.items() if ours in model.model},
    }


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, positions: int) -> None:
    text, special = tokenizer.for_transformers()
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    write_json(directory / "tokenizer_config.json", about | special)
    write_json(directory / "special_tokens_map.json", special)
    write_pair(directory, tokenizer)


def _card(model: ForeignModel, family: Family, tokenizer: Tokenizer | None) -> str:
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
        sizes.key_value_heads,
        sizes.ffn_hidden_size,
        sizes.max_position_embeddings,
        sizes.vocab_size,
    )
    head = "a head tied to the embedding" if sizes.tie_word_embeddings else "a head of its own"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{family.model_type}, fourfold]
---

# GPT with {count_parameters(sizes):,} parameters

A network of the family `{family.model_type}` ({family.about}; {head}), converted
by Fourfold from a `{model.kind}` checkpoint.

| layers | width | heads | of keys and values | feed-forward | positions | vocabulary |
| --- | --- | --- | --- | --- | --- | --- |
| {" | ".join(map(str, numbers))} |

Tokenizer: {words}.

    from transformers import pipeline
    print(pipeline("text-generation", model="PATH")("Once")[0]["generated_text"])

Training data, intended use and limits are known to whoever trained it; describe them here.
"""
