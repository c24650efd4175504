"""Initial weights, counts, dropout and the switches that must not change the numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fourfold.cost.flops import flops_per_token
from fourfold.model import GPT, ModelShape, count_parameters, initialize, kernels
from fourfold.model.init import ROWS_PER_BLOCK, initialize_shards, untrained_loss
from fourfold.model.layers import Linear
from fourfold.shards import Shard

PUBLISHED = {  # (hidden, layers, heads, vocabulary): parameters, reference figures
    (1024, 24, 16, 50304): 354_871_296,
    (2048, 24, 16, 50304): 1_313_722_368,
    (4096, 32, 32, 50304): 6_654_402_560,
    (12288, 96, 96, 51200): 174_603_264_000,
}


def shape_of(hidden: int, layers: int, heads: int, vocabulary: int) -> ModelShape:
    return ModelShape(vocabulary, hidden, layers, heads, 4 * hidden, 1024)


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameter_counts_are_the_published_ones(size: tuple[int, int, int, int]) -> None:
    shape = shape_of(*size)
    assert count_parameters(shape) == PUBLISHED[size]
    with torch.device("meta"):
        model = GPT(shape)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[size]


@pytest.mark.slow
def test_initial_loss_of_the_345m_model() -> None:
    """ln V + h σ²/2 = 11.03, all 24 layers; 1,024 random tokens give a standard error of 0.02."""
    model = GPT(shape_of(1024, 24, 16, 50304))
    initialize(model, seed=1024)
    tokens = torch.randint(0, 50304, (2, 513), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:], loss_scale=1 / 1024)
    assert untrained_loss(50304, 1024, 0.02) == pytest.approx(11.03, abs=0.005)
    assert loss.item() == pytest.approx(11.03, abs=0.05)


def test_weights_are_a_function_of_seed_and_name(tiny_shape: ModelShape) -> None:
    first, second, other = GPT(tiny_shape), GPT(tiny_shape), GPT(tiny_shape)
    torch.manual_seed(1)
    initialize(first, seed=7)
    torch.manual_seed(2)
    initialize(second, seed=7)
    initialize(other, seed=8)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        if a.ndim == 2:
            assert not torch.equal(a, c), name
    up = [first.layers[str(i)].mlp.up.weight for i in range(2)]
    assert not torch.equal(*up), "layers must not start alike"


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((ROWS_PER_BLOCK, 2 * ROWS_PER_BLOCK), (0, 16)),
        ((3, ROWS_PER_BLOCK + 5), (4, 9)),
        ((2 * ROWS_PER_BLOCK + 1, 2 * ROWS_PER_BLOCK + 7), (15, 16)),
        ((5, 5), (0, 16)),
    ],
)
def test_a_rectangle_is_drawn_without_the_rest(
    rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    shape = ModelShape(2 * ROWS_PER_BLOCK + 7, 16, 1, 2, 32, 8)
    model = GPT(shape)
    initialize(model, seed=1)
    own = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
    shard = Shard(own, (shape.vocab_size, 16), (rows[0], columns[0]))
    initialize_shards(model.table, {"embeddings.word.weight": shard}, seed=1)
    assert torch.equal(own, model.embeddings.word.weight[slice(*rows), slice(*columns)])


def test_depth_scaled_init_shrinks_residual_outputs_only(tiny_shape: ModelShape) -> None:
    plain, scaled = GPT(tiny_shape), GPT(dataclasses.replace(tiny_shape, depth_scaled_init=True))
    initialize(plain, seed=1)
    initialize(scaled, seed=1)
    factor = 1 / math.sqrt(2 * tiny_shape.num_layers)
    for (name, a), b in zip(plain.named_parameters(), scaled.parameters()):
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        torch.testing.assert_close(b, a * factor if residual else a, msg=name)


def test_unfused_linear_gives_the_same_numbers(tiny_shape: ModelShape, tiny_model: GPT) -> None:
    unfused = GPT(dataclasses.replace(tiny_shape, fused_linear=False))
    unfused.load_state_dict(tiny_model.state_dict())
    tokens = torch.arange(20).view(2, 10)
    torch.testing.assert_close(unfused(tokens), tiny_model(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_an_unfused_linear_gives_the_same_type(autocast: bool) -> None:
    x = torch.randn(3, 8)
    given = []
    for fused in (True, False):
        layer = Linear(8, 6, fused)
        torch.nn.init.ones_(layer.weight), torch.nn.init.ones_(layer.bias)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            given.append(layer(x))
    assert given[0].dtype == given[1].dtype == (torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(*given, rtol=0.02, atol=0.02)


def test_dropout_depends_on_its_seed_and_place_alone(tiny_shape: ModelShape) -> None:
    shape = dataclasses.replace(
        tiny_shape, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3
    )
    model = GPT(shape)
    initialize(model, seed=3)
    tokens = torch.arange(20).view(2, 10)

    def loss(seed: int) -> float:
        torch.rand(17)  # the generator's past must not matter
        return model(tokens, tokens, dropout_seed=seed).item()

    assert loss(1) == loss(1) != loss(2)
    model.eval()
    assert loss(1) == loss(2)


def test_flops_equal_torchs_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(512, 64, 3, 4, 256, 64, loss_chunk_tokens=64)
    model = GPT(shape)
    tokens = torch.zeros(2, 64, dtype=torch.long)
    # torch counts neither products that add in place nor CPU kernels of attention; the
    # plain formulation of attention it does.
    monkeypatch.setattr(kernels, "usable", lambda device, dtype: False)
    uncounted = {torch.ops.aten.addmm_: lambda _, a, b, **shapes: 2 * a[0] * a[1] * b[1]}
    with (
        FlopCounterMode(display=False, custom_mapping=uncounted) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(tokens, tokens).backward()
    ours = flops_per_token(shape, 64) * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(ours, rel=1e-9)


def test_flops_of_recomputation_are_ordered() -> None:
    shape = shape_of(1024, 24, 16, 50304)
    plain = flops_per_token(shape, 1024)
    core, attn, full = (
        flops_per_token(shape, 1024, recompute=mode) for mode in ("core_attn", "full_attn", "full")
    )
    assert plain < core < attn < full < plain * 4 / 3
    assert flops_per_token(shape, 1024, causal=True) < plain
