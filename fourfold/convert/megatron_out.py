"""Megatron checkpoints of the `torch` format, out: a `release`, weights to start a run from.

    latest_checkpointed_iteration.txt            "release"
    release/mp_rank_TT[_PPP]/model_optim_rng.pt  one file for each tensor and pipeline rank
    vocab.json, merges.txt                       for --tokenizer-type GPT2BPETokenizer

There are three namings, each for what will read it:

    core         Megatron Core with Transformer Engine, the default of Megatron-LM: a norm belongs
                 to the linear layer after it
    core-local   Megatron Core with --transformer-impl local
    classic      Megatron-DeepSpeed, and Megatron-LM before it removed the classic model

Megatron-LM ignores names it does not know and continues with random weights, so the naming, the
arguments in the files and the flags of the command must all agree: `write_megatron` returns the
flags.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fourfold.convert.imported import (
    ROWS,
    ForeignModel,
    require_gpt2,
    split_number,
    their_name,
    write_pair,
)
from fourfold.convert.megatron import FILES, OPTIONS, TRACKER
from fourfold.convert.scratch import disk_tensor
from fourfold.errors import CheckpointError
from fourfold.tokenizer import Tokenizer

Names = Literal["core", "core-local", "classic"]

# The column of the table of parameters that has each naming.
_COLUMNS: dict[Names, str] = {"core": "core", "core-local": "core_local", "classic": "classic"}


@dataclass(frozen=True)
class MegatronLayout:
    """How the files are named inside and cut: `tp` tensor ranks, `pp` pipeline stages."""

    names: Names = "core"
    tp: int = 1
    pp: int = 1


def write_megatron(
    model: ForeignModel,
    directory: Path,
    target: Path,
    layout: MegatronLayout,
    words: Tokenizer | None,
) -> list[str]:
    """Write into `directory`, which will be `target`; returns the flags Megatron must be given."""
    _check(model, layout)
    vocabulary = _Vocabulary.of(model, layout, words)
    arguments = _arguments(model, layout, vocabulary)
    for stage in range(layout.pp):
        _write_stage(model, directory, layout, stage, vocabulary.padded, arguments)
    (directory / TRACKER).write_text("release")
    files: list[str] = []
    if words is not None:
        words.save(directory / "tokenizer.json")
    if words is not None and (pair := write_pair(directory, words)):
        files = [f"--vocab-file {target / pair[0].name}", f"--merge-file {target / pair[1].name}"]
    return _flags(arguments, layout, target, files)


def _check(model: ForeignModel, layout: MegatronLayout) -> None:
    require_gpt2(model, "Megatron")
    sizes = model.shape
    for count, what, parts, option in (
        (sizes.num_layers, "layers", layout.pp, "--pp"),
        (sizes.num_attention_heads, "attention heads", layout.tp, "--tp"),
        (sizes.ffn_hidden_size, "feed-forward columns", layout.tp, "--tp"),
    ):
        if count % parts:
            raise CheckpointError(
                f"{option} {parts} does not divide the {count} {what} of {model.path}; choose a "
                "divisor"
            )


@dataclass(frozen=True)
class _Vocabulary:
    """Megatron rounds the tokenizer's size up to a multiple of `divisible_by` times `tp`."""

    padded: int
    divisible_by: int

    @classmethod
    def of(
        cls, model: ForeignModel, layout: MegatronLayout, words: Tokenizer | None
    ) -> _Vocabulary:
        """The model's own rows if tensor ranks can share them, and the rule that gives them."""
        rows, tp = model.shape.vocab_size, layout.tp
        padded = -(-rows // tp) * tp
        if padded > rows:
            model.notes.append(
                f"vocabulary padded from {rows} to {padded} rows for {tp} tensor ranks, by copies "
                "of the last; Megatron's softmax counts them"
            )
        tokens = words.vocab_size if words is not None else rows
        # Megatron's default first; the last fits whatever the tokenizer.
        for candidate in (128, 64, 32, 16, 8, 4, 2, 1, padded // tp):
            if -(-tokens // (candidate * tp)) * candidate * tp == padded:
                break
        return cls(padded, candidate)


def _write_stage(
    model: ForeignModel,
    directory: Path,
    layout: MegatronLayout,
    stage: int,
    rows: int,
    arguments: argparse.Namespace,
) -> None:
    """The files of one pipeline stage. Each tensor is read once and cut for all tensor ranks;
    the pieces wait on the disk, since a file is written as a whole."""
    ranks: list[dict[str, Tensor]] = [{} for _ in range(layout.tp)]
    for ours, theirs in _held(model, layout, stage):
        tensor = model.stored[ours].read()
        if ROWS[ours].tied_to_head and rows > len(tensor):
            tensor = torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), -1)])
        axis = ROWS[ours].split_dim
        pieces = [tensor] * layout.tp if axis is None else tensor.chunk(layout.tp, axis)
        for held, piece in zip(ranks, pieces):
            held[theirs] = disk_tensor(directory, tuple(piece.shape), piece.dtype).copy_(piece)
    for rank, held in enumerate(ranks):
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if layout.pp > 1 else "")
        leaf = directory / "release" / name
        leaf.mkdir(parents=True)
        content = {
            "args": arguments,
            "checkpoint_version": 3.0,
            "iteration": 0,
            "model": _nested(held) if layout.names == "classic" else held,
        }
        with (leaf / FILES[0]).open("wb") as stream:  # whose errors say what is wrong
            torch.save(content, stream)


def _held(model: ForeignModel, layout: MegatronLayout, stage: int) -> list[tuple[str, str]]:
    """Our name and theirs for every tensor of a stage, whose layers are counted from 0."""
    column = _COLUMNS[layout.names]
    per_stage = model.shape.num_layers // layout.pp
    first, last = stage == 0, stage == layout.pp - 1
    held = []
    for ours in model.stored:
        row, number = ROWS[ours], split_number(ours)[1]
        if row.in_every_layer and number // per_stage == stage:
            held.append((ours, their_name(column, row.of_layer(number % per_stage))))
        elif (row.end == "first" and first) or (row.end == "last" and last):
            held.append((ours, their_name(column, ours)))
    if last and not first:  # the head is tied to the embedding, which is on another rank
        assert ROWS.tied is not None
        head = "word_embeddings_for_head" if column == "classic" else "output_layer"
        held.append((ROWS.tied, f"{head}.weight"))
    return held


def _nested(held: dict[str, Tensor]) -> dict[str, Any]:
    """The classic model's dictionaries: one for each of its three parts and each embedding."""
    language: dict[str, Any] = {"encoder": {}}
    content: dict[str, Any] = {"language_model": language}
    for name, tensor in held.items():
        if match := re.fullmatch(r"language_model\.embedding\.(\w+)\.weight", name):
            language.setdefault("embedding", {})[match[1]] = {"weight": tensor}
        elif name.startswith("language_model.encoder."):
            language["encoder"][name.removeprefix("language_model.encoder.")] = tensor
        else:
            content[name.removesuffix(".weight")] = {"weight": tensor}
    return content


def _arguments(
    model: ForeignModel, layout: MegatronLayout, vocabulary: _Vocabulary
) -> argparse.Namespace:
    """What Megatron compares on loading, what --use-checkpoint-args takes over, and what describes
    the network to its tools."""
    sizes = model.shape
    core = layout.names != "classic"
    return argparse.Namespace(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.ffn_hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_attention_heads,
        group_query_attention=False,
        multi_latent_attention=False,
        kv_channels=sizes.head_size,
        max_position_embeddings=sizes.max_position_embeddings,
        seq_length=sizes.max_position_embeddings,
        padded_vocab_size=vocabulary.padded,
        make_vocab_size_divisible_by=vocabulary.divisible_by,
        tokenizer_type="GPT2BPETokenizer",
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
        data_parallel_random_init=False,
        add_position_embedding=True,
        position_embedding_type="learned_absolute",
        use_rotary_position_embeddings=False,
        normalization="LayerNorm",
        layernorm_epsilon=1e-5,
        norm_epsilon=1e-5,
        apply_layernorm_1p=False,
        apply_residual_connection_post_layernorm=False,
        apply_query_key_layer_scaling=False,
        add_bias_linear=True,
        add_qkv_bias=False,
        swiglu=False,
        squared_relu=False,
        openai_gelu=False,
        onnx_safe=False,
        bias_gelu_fusion=True,
        untie_embeddings_and_output_weights=False,
        num_experts=None if core else [1],
        params_dtype=model.dtype,
        ckpt_format="torch",
        transformer_impl="transformer_engine" if layout.names == "core" else "local",
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        **{theirs: model.model[ours] for theirs, ours in OPTIONS.items() if ours in model.model},
    )


def _flags(
    arguments: argparse.Namespace, layout: MegatronLayout, target: Path, files: list[str]
) -> list[str]:
    """The flags of the command that loads this; the rest of Megatron's defaults fit."""
    keys = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length"]
    keys += ["max_position_embeddings", "tensor_model_parallel_size"]
    keys += ["pipeline_model_parallel_size", "make_vocab_size_divisible_by"]
    keys += ["tokenizer_type"] if files else []
    if layout.names != "classic":
        keys += ["position_embedding_type", "transformer_impl", "ckpt_format"]
    values = vars(arguments)
    given = [f"--{key.replace('_', '-')} {values[key]}" for key in keys]
    return [f"--load {target}", *given, *files]
