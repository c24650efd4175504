"""Megatron checkpoints, in: trees of ranks, older qkv orders, both namings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_files import (
    HEADS,
    assert_same,
    megatron_arguments,
    megatron_tree,
    weights,
)

from fourfold.convert import load_foreign
from fourfold.errors import CheckpointError


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_trees_and_versions(tmp_path: Path, version: float, tp: int, pp: int) -> None:
    ours = weights(dtype=torch.float16)
    megatron_tree(tmp_path, ours, tp, pp, version=version)
    model = load_foreign(tmp_path)
    assert_same(model, ours)
    assert model.model["num_attention_heads"] == HEADS
    assert model.model["hidden_dropout_prob"] == 0.1


def test_virtual_stages_and_the_older_layout_of_torch(tmp_path: Path) -> None:
    ours = weights()
    megatron_tree(tmp_path / "virtual", ours, 2, 2, chunks=2)
    assert_same(load_foreign(tmp_path / "virtual"), ours)
    megatron_tree(tmp_path / "old", ours, 2, 2, version=0, legacy_file=True)
    assert_same(load_foreign(tmp_path / "old"), ours)


def test_every_place_in_the_tree_is_understood(tmp_path: Path) -> None:
    ours = weights()
    megatron_tree(tmp_path / "run", ours, 2)
    step = tmp_path / "run" / "iter_0000005"
    leaf = step / "mp_rank_00"
    for place in (step, leaf, leaf / "model_optim_rng.pt"):
        assert_same(load_foreign(place), ours)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match="'7', which is not there"):
        load_foreign(tmp_path / "run")


def core_names(content: dict[str, Any]) -> dict[str, Any]:
    """The flat names of megatron.core with Transformer Engine, norms inside linear layers."""
    language = content["language_model"]
    flat = {
        f"embedding.{name}.weight": about["weight"] for name, about in language["embedding"].items()
    }
    for name, tensor in language["encoder"].items():
        for old, new in (
            ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
            ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
            ("query_key_value", "linear_qkv"),
            ("dense_h_to_4h", "linear_fc1"),
            ("dense_4h_to_h", "linear_fc2"),
            ("self_attention.dense", "self_attention.linear_proj"),
        ):
            name = name.replace(old, new)
        flat[f"decoder.{name}"] = tensor
    flat["output_layer.weight"] = flat["embedding.word_embeddings.weight"]
    return flat | {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}


def test_names_of_megatron_core(tmp_path: Path) -> None:
    ours = weights()
    megatron_tree(tmp_path, ours)
    file = tmp_path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"] = core_names(content["model"])
    torch.save(content, file)
    assert_same(load_foreign(tmp_path), ours)
    content["model"]["output_layer.weight"] = torch.zeros(64, 32)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="tied"):
        load_foreign(tmp_path)


def test_rank_missing_or_file_cut_off(tmp_path: Path) -> None:
    megatron_tree(tmp_path, weights(), 2, 2)
    leaf = tmp_path / "iter_0000005" / "mp_rank_01_001"
    file = leaf / "model_optim_rng.pt"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="mp_rank_01_001"):
        load_foreign(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="neither of"):
        load_foreign(tmp_path)
    leaf.rmdir()
    with pytest.raises(CheckpointError, match="2 x 2 ranks 3 are there"):
        load_foreign(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("swiglu", True, "SwiGLU"),
        ("normalization", "RMSNorm", "LayerNorm"),
        ("layernorm_epsilon", 1e-6, "layernorm_epsilon"),
        ("position_embedding_type", "rope", "positions"),
        ("untie_embeddings_and_output_weights", True, "head of its own"),
        ("num_experts", [8], "experts"),
        ("bias_gelu_fusion", False, "exact GELU"),
        ("num_layers", 24, "num_layers=24"),
        ("num_attention_heads", "4", "not a valid number"),
    ],
)
def test_other_networks_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    megatron_tree(tmp_path, weights(), args=megatron_arguments(**{key: value}))
    with pytest.raises(CheckpointError, match=message):
        load_foreign(tmp_path)
