"""Megatron's `torch_dist` directories: written by torch itself on four ranks, and damaged."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.foreign_files import (
    LAYERS,
    assert_same,
    attack,
    layer_part,
    megatron_arguments,
    weights,
)
from helpers.ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fourfold.convert import convert, load_foreign
from fourfold.convert.distributed_files import METADATA
from fourfold.errors import CheckpointError

CORE_NAMES = {
    "norm1": "self_attention.linear_qkv.layer_norm_",
    "attn.qkv": "self_attention.linear_qkv.",
    "attn.out": "self_attention.linear_proj.",
    "norm2": "mlp.linear_fc1.layer_norm_",
    "mlp.up": "mlp.linear_fc1.",
    "mlp.down": "mlp.linear_fc2.",
}
OUTER = {
    "embeddings.word.weight": "embedding.word_embeddings.weight",
    "embeddings.position.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
}
COLUMNS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")


def sharded_state(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron Core's keys: one tensor for the same weight of all layers."""
    state = {OUTER[name]: tensor for name, tensor in ours.items() if name in OUTER}
    for name in ours:
        if (inside := layer_part(name)) and inside[0] == 0:
            module, _, kind = inside[1].rpartition(".")
            layers = [ours[f"layers.{number}.{inside[1]}"] for number in range(LAYERS)]
            state[f"decoder.layers.{CORE_NAMES[module]}{kind}"] = torch.stack(layers)
    return state


def save(step: Path, ours: dict[str, Tensor], ranks: int = 4) -> None:
    """As Megatron does on two stages of two tensor ranks, with its own common.pt."""

    def work(rank: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{step.parent / 'store'}", rank=rank, world_size=ranks
        )
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "tp"))
        state: dict[str, Any] = {"rng_state/shard_0.0_2.2": {"seed": 3}}
        for name, tensor in sharded_state(ours).items():
            by_stage = Shard(0) if ".layers." in name else Replicate()
            by_rank = Shard(1) if name.endswith(COLUMNS) else Replicate()
            if name.startswith("embedding.word"):
                by_rank = Shard(0)
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                by_rank = Shard(2)
            state[name] = distribute_tensor(tensor, mesh, [by_stage, by_rank])
            state[f"optimizer.state.exp_avg.{name}"] = distribute_tensor(
                torch.zeros_like(tensor), mesh, [by_stage, by_rank]
            )
        state["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4"] = {"none": 0}
        dcp.save(state, checkpoint_id=step)
        dist.barrier()
        dist.destroy_process_group()

    step.mkdir(parents=True)
    on_ranks(ranks, work)
    common = {"args": megatron_arguments(), "checkpoint_version": 3.0, "iteration": 5}
    torch.save(common, step / "common.pt")
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (step.parent / "latest_checkpointed_iteration.txt").write_text("5")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = tmp_path_factory.mktemp("run") / "iter_0000005"
    save(step, weights())
    return step


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "step")
    return tmp_path / "step"


def test_four_ranks_of_torch_are_read(saved: Path, tmp_path: Path) -> None:
    assert len(list(saved.glob("*.distcp"))) == 4
    for place in (saved, saved.parent, saved / "__0_0.distcp"):
        assert_same(load_foreign(place), weights())
    convert(saved.parent, tmp_path / "own", "fourfold")
    assert_same(load_foreign(tmp_path / "own"), weights())


def test_sixteen_bits_and_numbered_layers(tmp_path: Path) -> None:
    ours = weights(dtype=torch.bfloat16)
    numbered = {OUTER[name]: tensor for name, tensor in ours.items() if name in OUTER}
    for name, tensor in ours.items():
        if inside := layer_part(name):
            module, _, kind = inside[1].rpartition(".")
            numbered[f"decoder.layers.{inside[0]}.{CORE_NAMES[module]}{kind}"] = tensor
    dcp.save({"model": numbered}, checkpoint_id=tmp_path / "iter_0000001", no_dist=True)
    assert_same(load_foreign(tmp_path / "iter_0000001", 4), ours)
    with pytest.raises(CheckpointError, match="give --num-attention-heads"):
        load_foreign(tmp_path / "iter_0000001")


class Harmful:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_a_description_that_names_a_function_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / METADATA).write_bytes(pickle.dumps({"state_dict_metadata": Harmful(tmp_path / "x")}))
    with pytest.raises(CheckpointError, match=r"it names 'posix\.mkdir'"):
        load_foreign(copied)
    assert not (tmp_path / "x").exists()


def test_files_that_are_missing_or_cut_off(copied: Path) -> None:
    file = copied / "__2_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"__2_0.distcp is cut off"):
        load_foreign(copied)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__2_0.distcp is missing"):
        load_foreign(copied)


def rewritten(step: Path, change: Any) -> None:
    """Write the description again after `change` of what it holds."""
    metadata = pickle.loads((step / METADATA).read_bytes())  # noqa: S301  our own bytes
    change(metadata)
    (step / METADATA).write_bytes(pickle.dumps(metadata, protocol=4))


def test_pieces_that_do_not_fit(copied: Path, saved: Path) -> None:
    word = "embedding.word_embeddings.weight"

    def drop(metadata: Any) -> None:
        del metadata.state_dict_metadata[word].chunks[1]

    def elsewhere(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = "../../outside"

    def another(metadata: Any) -> None:
        places = {index: index.fqn for index in metadata.storage_data}
        mine = next(index for index, name in places.items() if name == word)
        other = next(index for index, name in places.items() if name.endswith("layernorm.bias"))
        metadata.storage_data[mine] = metadata.storage_data[other]

    for change, message in (
        (drop, "in no piece"),
        (elsewhere, "has an invalid location"),
        (another, "is not the one described"),
    ):
        shutil.copy(saved / METADATA, copied / METADATA)
        rewritten(copied, change)
        with pytest.raises(CheckpointError, match=message):
            load_foreign(copied)


@pytest.mark.parametrize(
    "rounds", [30, pytest.param(500, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_mutants_are_read_or_refused(copied: Path, rounds: int) -> None:
    def read(path: Path) -> None:
        for _, tensor in load_foreign(copied).tensors():
            assert tensor.numel() < 10_000

    for name in (METADATA, "__1_0.distcp", "common.pt"):
        file = copied / name
        sound = file.read_bytes()
        assert attack(file, [sound], read, rounds) < rounds
        file.write_bytes(sound)
