"""FleetX and PaddleNLP files: every form and tree they come in, and back out."""

from __future__ import annotations

import builtins
import copyreg
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import (
    FLEETX_TINY,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    assert_same,
    fleetx_arrays,
    fleetx_tree,
    logits_of,
    megatron_tree,
    prompt,
    weights,
)
from helpers.peers import in_peers, needs_peers

from fourfold.convert import convert, load_foreign
from fourfold.convert.fleetx import read_pdparams
from fourfold.errors import CheckpointError
from fourfold.model import GPT


def write(directory: Path, arrays: dict[str, Any], protocol: int = 4) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "model.pdparams").write_bytes(pickle.dumps(arrays, protocol=protocol))
    return directory


def test_golden_checkpoint_gives_its_logits() -> None:
    model = load_foreign(FLEETX_TINY, num_attention_heads=4)
    network = GPT(model.shape).eval()
    network.load_state_dict(dict(model.tensors()))
    expected = np.load(FLEETX_TINY / "expected.npz", allow_pickle=False)
    with torch.no_grad():
        logits = network(torch.from_numpy(expected["input_ids"]))
    assert np.abs(logits.numpy() - expected["logits"]).max() < 1e-5


def test_golden_checkpoint_exported_is_what_paddle_saved(tmp_path: Path) -> None:
    convert(FLEETX_TINY, tmp_path / "out", "fleetx", num_attention_heads=4)
    file = tmp_path / "out" / "mp_00_sharding_00_pp_00" / "model.pdparams"
    # The way paddle.load reads it.
    exported = pickle.loads(file.read_bytes(), encoding="latin1")  # noqa: S301
    golden = pickle.loads((FLEETX_TINY / "model.pdparams").read_bytes())  # noqa: S301
    table = "StructuredToParameterName@@"
    assert exported.pop(table) == golden.pop(table)
    assert exported.keys() == golden.keys()
    for name, array in golden.items():
        assert exported[name].dtype == array.dtype and exported[name].flags["C_CONTIGUOUS"]
        assert np.array_equal(exported[name], array), name
    again = load_foreign(tmp_path / "out")
    assert_same(again, dict(load_foreign(FLEETX_TINY, 4).tensors()))


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
def test_every_form_of_file(tmp_path: Path, protocol: int, fused: bool, pairs: bool) -> None:
    ours = weights()
    place = write(tmp_path / "in", fleetx_arrays(ours, fused=fused, pairs=pairs), protocol)
    assert_same(load_foreign(place, HEADS), ours)


@pytest.mark.parametrize(("mp", "pp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("fused", [True, False])
def test_trees_are_merged(tmp_path: Path, mp: int, pp: int, fused: bool) -> None:
    ours = weights()
    fleetx_tree(tmp_path / "step_100", ours, mp, pp, fused=fused)
    leaf = tmp_path / "step_100" / "mp_00_sharding_00_pp_00"
    for place in (tmp_path / "step_100", leaf, leaf / "model.pdparams", tmp_path):
        assert_same(load_foreign(place, HEADS), ours)


def test_missing_rank_is_named(tmp_path: Path) -> None:
    fleetx_tree(tmp_path / "step_1", weights(), 2, 2)
    for file in (tmp_path / "step_1" / "mp_01_sharding_00_pp_00").iterdir():
        file.unlink()
    (tmp_path / "step_1" / "mp_01_sharding_00_pp_00").rmdir()
    with pytest.raises(CheckpointError, match="mp_01_sharding_00_pp_00 is missing"):
        load_foreign(tmp_path / "step_1", HEADS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    ours = weights(dtype=dtype)
    bits = {name: tensor.view(torch.uint16) for name, tensor in ours.items()}
    arrays = fleetx_arrays(bits if dtype == torch.bfloat16 else ours)
    place = write(tmp_path / "in", arrays)
    assert_same(load_foreign(place, HEADS), ours)
    convert(place, tmp_path / "again", "fleetx", num_attention_heads=HEADS)
    assert_same(load_foreign(tmp_path / "again"), ours)
    convert(place, tmp_path / "own", "fourfold", num_attention_heads=HEADS)
    widened = {name: tensor.float() for name, tensor in ours.items()}
    assert_same(load_foreign(tmp_path / "own"), widened)


def test_tensors_as_paddle_reduces_them(tmp_path: Path) -> None:
    """Paddle pickles a tensor as tuple((name, array)) or eval("data", {"data": array})."""

    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

    ours = weights()
    for way in (
        lambda t: (builtins.tuple, (("linear_0.w_0", t.array),)),
        lambda t: (builtins.eval, ("data", {"data": t.array})),
    ):
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=4)
        pickler.dispatch_table = copyreg.dispatch_table.copy()
        pickler.dispatch_table[Tensor] = way
        arrays = fleetx_arrays(ours)
        arrays.pop("StructuredToParameterName@@")
        pickler.dump({name: Tensor(array) for name, array in arrays.items()})
        (tmp_path / "model.pdparams").write_bytes(stream.getvalue())
        assert_same(load_foreign(tmp_path, HEADS), ours)


def test_large_arrays_cut_into_slices(tmp_path: Path) -> None:
    ours = weights()
    arrays = fleetx_arrays(ours)
    name = "gpt.embeddings.word_embeddings.weight"
    flat = arrays.pop(name).reshape(-1)
    cut = {f"{name}@@.0": flat[:1000], f"{name}@@.1": flat[1000:]}
    about = {"OriginShape": (VOCAB, HIDDEN), "slices": list(cut)}
    place = write(tmp_path / "in", arrays | cut | {"UnpackBigParamInfor@@": {name: about}}, 2)
    assert_same(load_foreign(place, HEADS), ours)


def test_fortran_order_and_big_endian(tmp_path: Path) -> None:
    a = np.arange(6, dtype=">f4").reshape(2, 3)
    place = write(tmp_path, {"a": a, "b": np.asfortranarray(a), "c": a.astype("<f8")})
    read = read_pdparams(place / "model.pdparams")
    assert all(read[name].read().tolist() == a.tolist() for name in "abc")


def test_heads_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--num-attention-heads"):
        load_foreign(FLEETX_TINY)
    with pytest.raises(CheckpointError, match="5 attention heads do not divide"):
        load_foreign(FLEETX_TINY, 5)
    place = write(tmp_path / "nlp", fleetx_arrays(weights()))
    arguments = {"num_attention_heads": HEADS, "hidden_dropout_prob": 0.25}
    (place / "model_config.json").write_text(json.dumps({"init_args": [arguments]}))
    assert load_foreign(place).model["hidden_dropout_prob"] == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpt.decoder.norm.bias": None}, "norm.bias"),
        ({"gpt.decoder.layers.1.linear1.bias": np.zeros(7, np.float32)}, "layers.1.mlp.up.bias"),
        ({"gpt.decoder.layers.0.linear1.bias": np.zeros(128, np.int64)}, "layers.0.mlp.up.bias"),
        ({"gpt.decoder.layers.0.gate.weight": np.zeros((2, 2), np.float32)}, "gate.weight"),
        ({"gpt.decoder.layers.6.norm1.bias": np.zeros(32, np.float32)}, "layer 4 is missing"),
        ({"lm_head.weight": np.zeros((VOCAB, HIDDEN), np.float32)}, "tied"),
        ({"gpt.decoder.norm.bias": "text"}, "is no array"),
    ],
)
def test_what_is_no_gpt_of_ours_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    arrays = fleetx_arrays(weights()) | change
    arrays = {name: value for name, value in arrays.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        load_foreign(write(tmp_path / "in", arrays), HEADS)


# --- Paddle itself ----------------------------------------------------------------------------

# FleetX's network: rows times weights of (in, out), and q, k, v within each head.
PADDLE = """
import numpy as np, paddle
import paddle.nn.functional as F

file = given["file"]
loaded, plain = paddle.load(file), paddle.load(file, return_numpy=True)
names = list(loaded)
for name in names:
    assert isinstance(loaded[name], paddle.Tensor) and isinstance(plain[name], np.ndarray)
    assert np.array_equal(loaded[name].numpy(), plain[name])
np.savez(given["arrays"], **{name: plain[name] for name in names})

weights = {name.removeprefix("gpt."): loaded[name] for name in names}
layers, heads = given["layers"], given["heads"]


def linear(x, name):
    return F.linear(x, weights[name + ".weight"], weights[name + ".bias"])


def norm(x, name):
    scale, shift = weights[name + ".weight"], weights[name + ".bias"]
    return F.layer_norm(x, scale.shape, scale, shift, 1e-5)


ids = paddle.to_tensor(given["ids"])
batch, length = ids.shape
word = weights["embeddings.word_embeddings.weight"]
places = weights["embeddings.position_embeddings.weight"][:length]
x = F.embedding(ids, word) + places
mask = paddle.triu(paddle.full([length, length], -1e9), 1)
for number in range(layers):
    layer = f"decoder.layers.{number}."
    mixed = linear(norm(x, layer + "norm1"), layer + "self_attn.qkv_proj")
    q, k, v = mixed.reshape([batch, length, heads, -1]).transpose([0, 2, 1, 3]).split(3, -1)
    scores = paddle.matmul(q, k, transpose_y=True) / q.shape[-1] ** 0.5 + mask
    mixed = paddle.matmul(F.softmax(scores), v).transpose([0, 2, 1, 3])
    x = x + linear(mixed.reshape([batch, length, -1]), layer + "self_attn.out_proj")
    up = F.gelu(linear(norm(x, layer + "norm2"), layer + "linear1"), approximate=True)
    x = x + linear(up, layer + "linear2")
logits = paddle.matmul(norm(x, "decoder.norm"), word, transpose_y=True)
np.save(given["logits"], logits.numpy())
answer = names
"""


@needs_peers
def test_paddle_loads_the_export_and_gives_our_logits(tmp_path: Path) -> None:
    ours = weights()
    megatron_tree(tmp_path / "source", ours)
    convert(tmp_path / "source", tmp_path / "out", "fleetx")
    ids = prompt()
    names = in_peers(
        PADDLE,
        file=tmp_path / "out" / "mp_00_sharding_00_pp_00" / "model.pdparams",
        arrays=tmp_path / "arrays.npz",
        logits=tmp_path / "logits.npy",
        ids=ids.tolist(),
        layers=LAYERS,
        heads=HEADS,
    )
    expected = fleetx_arrays(ours)
    del expected["StructuredToParameterName@@"]
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert set(arrays) == set(expected) == set(names)
        for name, array in expected.items():
            assert arrays[name].dtype == np.float32 and np.array_equal(arrays[name], array)
    logits = logits_of(ours, ids)
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert (theirs - logits).abs().max() <= 1e-5 * logits.abs().max()
