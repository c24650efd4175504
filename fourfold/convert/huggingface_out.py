"""Hugging Face GPT-2 directories, out: what `transformers.AutoModelForCausalLM` loads.

config.json, generation_config.json
model.safetensors, or model-0000i-of-0000N.safetensors and the index
tokenizer.json, tokenizer_config.json, special_tokens_map.json; for GPT-2's kind of tokenizer also
vocab.json and merges.txt
README.md, the model card
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fourfold.convert.files import write_json, write_pair
from fourfold.convert.foreign import ROWS, ForeignModel, their_name
from fourfold.convert.huggingface import CONFIG, SAFETENSORS, SAFETENSORS_INDEX
from fourfold.convert.stored import Stored, blocks_from_heads, transposed
from fourfold.model import count_parameters
from fourfold.tokenizer import END_OF_TEXT, Tokenizer

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
    end = tokenizer.eos_id if tokenizer else None
    ends = {"bos_token_id": end, "eos_token_id": end}
    write_json(directory / CONFIG, _config(model) | ends)
    write_json(directory / "generation_config.json", ends | {"pad_token_id": end})
    if tokenizer is not None:
        _write_tokenizer(directory, tokenizer, model.shape.max_position_embeddings)
    (directory / "README.md").write_text(_card(model, tokenizer))


def _turned(ours: str, source: Stored, heads: int) -> Stored:
    row = ROWS[ours]
    if row.rows_by_head:
        source = blocks_from_heads(source, heads)
    return transposed(source) if row.is_matrix else source


def _write_shards(directory: Path, weights: dict[str, Stored], shard_bytes: int) -> None:
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


def _shards(weights: dict[str, Stored], shard_bytes: int) -> Iterator[list[str]]:
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
    tokenizer.save(directory / "tokenizer.json")
    # GPT-2 has no padding of its own; what stands behind the end is masked, whatever it is.
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    write_json(directory / "tokenizer_config.json", about | special)
    write_json(directory / "special_tokens_map.json", special)
    write_pair(directory, tokenizer)


def _kind(tokenizer: Tokenizer) -> str:
    if tokenizer.is_gpt2_like:
        return "byte-level BPE"
    return json.loads(tokenizer.to_json())["model"]["type"]


def _card(model: ForeignModel, tokenizer: Tokenizer | None) -> str:
    sizes = model.shape
    words = (
        f"{_kind(tokenizer)} of {tokenizer.vocab_size} tokens; documents end with `{END_OF_TEXT}`"
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
