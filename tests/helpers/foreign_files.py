"""Checkpoints as other tools write them, made from weights under our names."""

from __future__ import annotations

import argparse
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.convert import ForeignModel
from fourfold.errors import CheckpointError
from fourfold.model import GPT, ModelShape, table_of
from helpers.mutate import mutate

FLEETX_TINY = Path(__file__).parent.parent / "fixtures" / "fleetx_tiny"
HEADS, HIDDEN, LAYERS, VOCAB, POSITIONS = 4, 32, 4, 64, 24

FLEETX_NAMES = {
    "attn.qkv": "self_attn.qkv_proj",
    "attn.out": "self_attn.out_proj",
    "mlp.up": "linear1",
    "mlp.down": "linear2",
}
CLASSIC_NAMES = {
    "norm1": "input_layernorm",
    "attn.qkv": "self_attention.query_key_value",
    "attn.out": "self_attention.dense",
    "norm2": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
COLUMNS = ("attn.qkv.weight", "attn.qkv.bias", "mlp.up.weight", "mlp.up.bias")
ROWS = ("attn.out.weight", "mlp.down.weight")


def weights(
    seed: int = 0, dtype: torch.dtype = torch.float32, vocabulary: int = VOCAB
) -> dict[str, Tensor]:
    """A small model under our names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = table_of(ModelShape(vocabulary, HIDDEN, LAYERS, HEADS, 4 * HIDDEN, POSITIONS)).shapes
    return {
        name: (0.1 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def prompt() -> Tensor:
    """Two rows of ids, as long as the small model allows."""
    return torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(4))


def logits_of(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """What our own network says of `ids` with these weights."""
    shape = ModelShape(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN,
        max_position_embeddings=POSITIONS,
    )
    network = GPT(shape)
    network.load_state_dict(tensors)
    with torch.no_grad():
        return network.eval()(ids)


def assert_same(model: ForeignModel, expected: dict[str, Tensor]) -> None:
    found = dict(model.tensors())
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def layer_part(name: str) -> tuple[int, str] | None:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else None


def piece(part: str, tensor: Tensor, rank: int, of: int) -> Tensor:
    """What tensor rank `rank` holds of a tensor in torch's orientation."""
    if part in COLUMNS or part == "embeddings.word.weight":
        return tensor.chunk(of, 0)[rank].clone()
    return tensor.chunk(of, 1)[rank].clone() if part in ROWS else tensor.clone()


def attack(path: Path, sound: list[bytes], read: Callable[[Path], None], rounds: int) -> int:
    """How many mutants were read; every other one must be a CheckpointError."""
    rng, survived = random.Random(5), 0
    for number in range(rounds):
        path.write_bytes(mutate(sound[number % len(sound)], rng))
        try:
            read(path)
            survived += 1
        except CheckpointError:
            pass
    return survived


# --- FleetX -----------------------------------------------------------------------------------


def fleetx_arrays(
    tensors: dict[str, Tensor], *, fused: bool = True, pairs: bool = False, staged: bool = False
) -> dict[str, Any]:
    """The dictionary FleetX gives to `paddle.save`, as numpy arrays or (name, array) pairs."""
    arrays: dict[str, Any] = {}
    for name, tensor in tensors.items():
        inside = layer_part(name)
        if inside is None:
            arrays[_fleetx_outer(name, staged)] = tensor.numpy()
            continue
        layer, part = inside
        module, _, kind = part.rpartition(".")
        prefix = f"{layer + 1}." if staged else f"gpt.decoder.layers.{layer}."
        array = np.ascontiguousarray(tensor.mT.numpy() if tensor.ndim == 2 else tensor.numpy())
        if module == "attn.qkv" and not fused:
            heads = array.shape[-1] // (3 * HIDDEN // HEADS)
            split = array.reshape(*array.shape[:-1], heads, 3, HIDDEN // HEADS)
            for number, letter in enumerate("qkv"):
                whole = split[..., number, :].reshape(*array.shape[:-1], -1)
                arrays[f"{prefix}self_attn.{letter}_proj.{kind}"] = whole
        else:
            arrays[f"{prefix}{FLEETX_NAMES.get(module, module)}.{kind}"] = array
    if not pairs:
        return arrays | {"StructuredToParameterName@@": {name: name for name in arrays}}
    return {name: (f"p_{number}", a) for number, (name, a) in enumerate(arrays.items())}


def _fleetx_outer(name: str, staged: bool) -> str:
    kind = name.rpartition(".")[2]
    if name.startswith("norm."):
        return f"{LAYERS + 1}.{kind}" if staged else f"gpt.decoder.norm.{kind}"
    prefix = "shared_layers.embed." if staged else "gpt.embeddings."
    return f"{prefix}{name.split('.')[1]}_embeddings.weight"


def fleetx_tree(directory: Path, tensors: dict[str, Tensor], mp: int, pp: int, **how: Any) -> None:
    for stage in range(pp):
        mine = {}
        for name, tensor in tensors.items():
            inside = layer_part(name)
            first_and_last = name.startswith("embeddings.") and stage in (0, pp - 1)
            last = name.startswith("norm.") and stage == pp - 1
            if (inside and inside[0] * pp // LAYERS == stage) or first_and_last or last:
                mine[name] = tensor
        for rank in range(mp):
            leaf = directory / f"mp_{rank:02d}_sharding_00_pp_{stage:02d}"
            leaf.mkdir(parents=True)
            cut = {
                name: piece(inside[1] if (inside := layer_part(name)) else name, tensor, rank, mp)
                for name, tensor in mine.items()
            }
            arrays = fleetx_arrays(cut, staged=pp > 1, **how)
            (leaf / "model.pdparams").write_bytes(pickle.dumps(arrays, protocol=4))


# --- Megatron ---------------------------------------------------------------------------------


def megatron_arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "ffn_hidden_size": 4 * HIDDEN,
            "max_position_embeddings": POSITIONS,
            "padded_vocab_size": VOCAB,
            "params_dtype": torch.float16,
            "hidden_dropout": 0.1,
            "layernorm_epsilon": 1e-5,
            "bias_gelu_fusion": True,
            **changes,
        }
    )


def older(tensor: Tensor, version: float, heads: int) -> Tensor:
    """qkv in the order of an older checkpoint version."""
    split = tensor.reshape(heads, 3, HIDDEN // HEADS, *tensor.shape[1:])
    if version == 0:
        return split.transpose(0, 1).reshape(tensor.shape)
    return split.transpose(1, 2).reshape(tensor.shape) if version == 1 else tensor


def megatron_tree(
    directory: Path,
    tensors: dict[str, Tensor],
    tp: int = 1,
    pp: int = 1,
    *,
    version: float = 3.0,
    chunks: int = 1,
    legacy_file: bool = False,
    args: argparse.Namespace | None = None,
) -> None:
    """`directory/iter_0000005/mp_rank_TT_PPP/model_optim_rng.pt` in the classic naming."""
    step = directory / "iter_0000005"
    for stage in range(pp):
        for rank in range(tp):
            leaf = step / (f"mp_rank_{rank:02d}_{stage:03d}" if pp > 1 else f"mp_rank_{rank:02d}")
            leaf.mkdir(parents=True)
            content: dict[str, Any] = {
                "args": args or megatron_arguments(),
                "checkpoint_version": version,
                "iteration": 5,
                "rng_state": [{"np_rng_state": np.random.get_state()}],
            }
            for chunk in range(chunks):
                number = chunk * pp + stage
                key = f"model{chunk}" if chunks > 1 else "model"
                content[key] = _stage(tensors, number, chunks * pp, rank, tp, version)
            torch.save(
                content,
                leaf / "model_optim_rng.pt",
                _use_new_zipfile_serialization=not legacy_file,
            )
    (directory / "latest_checkpointed_iteration.txt").write_text("5")


def _stage(
    tensors: dict[str, Tensor], number: int, of: int, rank: int, tp: int, version: float
) -> dict[str, Any]:
    per_stage = LAYERS // of
    encoder: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inside = layer_part(name)
        if inside and inside[0] // per_stage == number:
            layer, part = inside
            module, _, kind = part.rpartition(".")
            mine = piece(part, tensor, rank, tp)
            if module == "attn.qkv":
                mine = older(mine, version, HEADS // tp).contiguous()
            encoder[f"layers.{layer % per_stage}.{CLASSIC_NAMES[module]}.{kind}"] = mine
        elif name.startswith("norm.") and number == of - 1:
            encoder[f"final_layer{name}"] = tensor
    word = piece("embeddings.word.weight", tensors["embeddings.word.weight"], rank, tp)
    positions = {"weight": tensors["embeddings.position.weight"]}
    language: dict[str, Any] = {"encoder": encoder}
    if number == 0:
        language["embedding"] = {
            "word_embeddings": {"weight": word},
            "position_embeddings": positions,
        }
    head = {"word_embeddings_for_head": {"weight": word}} if number == of - 1 and of > 1 else {}
    return {"language_model": language, **head}
