"""Packed products: the numbers of the formats, for any size, the same whatever the batch.

Both ways of the source are compiled, for this processor and for one with AVX2 alone.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from helpers.networks import small_model
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import native
from fourfold.generate import Decoder, packed
from fourfold.generate.packed import KINDS, PackedMatrix
from fourfold.model import GPT, ModelShape, initialize

pytestmark = pytest.mark.skipif(
    native.why_not("decode") is not None, reason="no kernels can be built here"
)

# The relative error of a product against the same product of the rounded weights in float64:
# that of the sum, and of activations where they are rounded (to 8 bits of mantissa, to 255 steps).
ALLOWED = {"float32": 2e-6, "float16": 2e-6, "bfloat16": 5e-3, "int8": 2e-2, "int4": 5e-3}
# What rounding the weights costs.
ROUNDING = {"float32": 0.0, "float16": 5e-4, "bfloat16": 4e-3, "int8": 1.5e-2, "int4": 0.12}


@pytest.fixture(params=["native", "haswell"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    library = native.library("decode", request.param)
    assert library is not None, native.why_not("decode", request.param)
    for name in ("scratch_bytes", "linear_scratch_bytes"):
        getattr(library, name).restype = ctypes.c_int64
    monkeypatch.setattr(packed, "kernels", lambda: library)
    return request.param


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 32), (1, 1), (37, 45), (130, 77), (64, 200), (15, 31)])
def test_products_of_any_size(build: str, kind: Any, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    weight, bias = torch.randn(*shape, generator=generator), torch.randn(shape[0])
    matrix = PackedMatrix(kind, weight, bias)
    rounded = matrix.rows(torch.arange(shape[0]))
    assert relative(rounded, weight) <= ROUNDING[kind]
    x = torch.randn(29, shape[1], generator=generator)
    expected = x.double() @ rounded.double().T + bias.double()
    assert relative(matrix.linear(x) - bias, expected - bias.double()) < ALLOWED[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_to_the_bit_in_any_batch(build: str, kind: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = PackedMatrix(kind, torch.randn(70, 100, generator=generator), torch.randn(70))
    x = torch.randn(40, 100, generator=generator)
    alone = torch.cat([matrix.linear(row.unsqueeze(0)) for row in x])
    for rows in (2, 3, 4, 7, 8, 12, 13, 23, 40):
        assert torch.equal(matrix.linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(build: str, threads: int) -> None:
    matrix = PackedMatrix("int4", torch.randn(300, 96, generator=torch.Generator().manual_seed(2)))
    x = torch.randn(5, 96)
    expected = matrix.linear(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(matrix.linear(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_nan_stays_nan(build: str, kind: Any) -> None:
    weight = torch.randn(20, 40)
    weight[3] = 0.0
    matrix = PackedMatrix(kind, weight, torch.ones(20))
    x = torch.randn(3, 40)
    x[1] = 0.0
    y = matrix.linear(x)
    assert torch.equal(y[1], torch.ones(20)) and torch.equal(y[:, 3], torch.ones(3))
    x[2, 5] = float("nan")
    assert matrix.linear(x)[2].isnan().all()
    assert torch.equal(matrix.linear(x)[:2], y[:2])


# On weights far wilder than a trained model's.
NETWORK = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 8e-2, "int4": 0.7}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_network_is_the_models(build: str, kind: Any) -> None:
    model, tokens = small_model(), [7, 3, 150, 9, 9, 21, 4, 88, 61, 17, 2, 30, 5, 6, 7, 8, 1, 40]
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[0, -1:]
    network = Decoder(small_model(), kind)
    assert network.fused is not None
    network.reserve(2, 32)
    read = network.read([tokens])
    assert relative(read, expected) < NETWORK[kind]
    network.reserve(2, 32)
    network.read([tokens[:5]])
    for token in tokens[5:]:
        written = network.advance([token])
    assert torch.equal(written, read)


@pytest.mark.parametrize("heads, hidden, ffn", [(1, 20, 33), (3, 51, 70), (2, 130, 64), (5, 5, 1)])
def test_networks_of_odd_sizes(build: str, heads: int, hidden: int, ffn: int) -> None:
    shape = ModelShape(
        vocab_size=37,
        hidden_size=hidden,
        num_layers=2,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        max_position_embeddings=40,
        initializer_range=0.3,
    )
    models = [GPT(shape), GPT(shape)]
    for model in models:
        initialize(model, seed=1)
    tokens = [(7 * place) % 37 for place in range(35)]
    with torch.no_grad():
        expected = models[0].eval()(torch.tensor([tokens]))[0, -1:]
    network = Decoder(models[1])
    network.reserve(1, 40)
    assert relative(network.read([tokens]), expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 30), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_random_sizes(kind: Any, outputs: int, inputs: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    matrix = PackedMatrix(kind, weight)
    x = torch.randn(rows, inputs, generator=generator)
    rounded = matrix.rows(torch.arange(outputs)).double()
    size = x.double().norm(dim=1, keepdim=True) * rounded.norm(dim=1)
    error = (matrix.linear(x) - x.double() @ rounded.T).abs()
    assert bool((error <= ALLOWED[kind] * 2 * size + 1e-30).all())


def test_int4_finds_a_better_scale_than_the_largest_weight_gives() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(64, 256, generator=generator)
    found = PackedMatrix("int4", weight).rows(torch.arange(64))
    groups = weight.view(64, -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / scale).round().clamp(-8, 7) * scale).view(64, 256)
    assert relative(found, weight) < 0.95 * relative(plain, weight)
