"""Options of the decoder block: what each computes, against plain torch and `transformers`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fourfold.model import GPT, ModelShape, initialize, kernels, table_of
from fourfold.model.params import RopeScaling
from fourfold.model.positions import amplitude, frequencies, rotate, rotation

SHAPE = ModelShape(
    vocab_size=96,
    hidden_size=48,
    num_layers=3,
    num_attention_heads=4,
    ffn_hidden_size=80,
    max_position_embeddings=64,
    initializer_range=0.2,
)
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": {
        "num_key_value_heads": 2,
        "position_embedding": "rotary",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": "none",
        "tie_word_embeddings": False,
    },
    "one key-value head": {"num_key_value_heads": 1, "head_dim": 20, "bias": "qkv"},
    "norm of each head": {"qk_norm": "per_head", "activation": "geglu"},
    "norm of all heads": {
        "qk_norm": "all_heads",
        "normalization": "RMSNorm",
        "norm_placement": "post",
        "num_key_value_heads": 2,
    },
    "neox": {
        "parallel_residual": True,
        "activation": "gelu",
        "position_embedding": "rotary",
        "partial_rotary_factor": 0.5,
    },
    "scaled": {
        "activation": "relu_squared",
        "position_embedding": "none",
        "logit_softcap": 3.0,
        "z_loss": 0.05,
        "logit_scale": 0.5,
        "embedding_scale": 2.0,
        "attention_scale": 0.4,
    },
    "window": {
        "sliding_window": 5,
        "sliding_window_layers": (0, 2),
        "position_embedding": "rotary",
    },
}


def tokens(rows: int = 2, length: int = 24) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(3))


def built(options: dict[str, Any]) -> GPT:
    model = GPT(replace(SHAPE, **options))
    initialize(model, seed=5)
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_the_table_lists_what_the_network_has(name: str) -> None:
    model = built(NETWORKS[name])
    held = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(held.items()) == list(table_of(model.shape).shapes.items())


@pytest.mark.parametrize("name", NETWORKS)
def test_the_loss_is_that_of_the_logits(name: str) -> None:
    """In double precision, with the gradients autograd finds for logits that are kept."""
    model = built(NETWORKS[name]).double()
    ids = tokens()
    inputs, labels = ids[:, :-1], ids[:, 1:]
    model(inputs, labels).backward()
    given = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss + model.shape.z_loss * torch.logsumexp(logits, -1).square().sum()
    loss.backward()
    assert len(given) == len(table_of(model.shape).shapes)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(given[key], parameter.grad, rtol=1e-9, atol=1e-11), key
    with torch.no_grad():  # evaluation has no z-loss
        plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        assert math.isclose(float(model(inputs, labels)), float(plain), rel_tol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_kernels_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(NETWORKS[name])
    ids = tokens()
    documents = torch.arange(ids.shape[1] - 1).floor_divide(9).expand(2, -1)
    losses, gradients = [], []
    for usable in (kernels.usable, lambda device, dtype: False):
        monkeypatch.setattr(kernels, "usable", usable)
        model.zero_grad()
        loss = model(ids[:, :-1], ids[:, 1:], document_ids=documents)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert math.isclose(*losses, rel_tol=1e-5)
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max().clamp_min(1))


def test_a_window_hides_what_is_before_it() -> None:
    """With one layer, a token depends on the window's tokens and on none before them."""
    shape = replace(SHAPE, num_layers=1, sliding_window=5, position_embedding="rotary")
    model = GPT(shape)
    initialize(model, seed=5)
    ids = tokens(1, 20)
    before = model(ids)
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 96
    moved = (model(changed) - before).abs().amax(-1)[0] > 0
    assert moved.tolist() == [7 <= place < 12 for place in range(20)]


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_frequencies_are_those_of_transformers(kind: str, share: float) -> None:
    shape = replace(
        SHAPE,
        hidden_size=128,
        position_embedding="rotary",
        partial_rotary_factor=share,
        max_position_embeddings=256,
        rope_theta=500.0,
        rope_scaling=RopeScaling(kind, 4.0, 64, beta_fast=8.0),
    )
    parameters = {
        "rope_type": kind,
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "beta_fast": 8.0,
        "partial_rotary_factor": share,
    }
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert torch.allclose(frequencies(shape), expected, rtol=1e-6, atol=0)
    assert amplitude(shape) == pytest.approx(factor)


def test_scores_depend_on_distance_alone() -> None:
    shape = replace(SHAPE, position_embedding="rotary", partial_rotary_factor=0.5)
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 4, 1, 12, dtype=torch.float64, generator=generator)

    def score(query: int, key: int) -> Tensor:
        at = [rotation(shape, torch.tensor([place])).double() for place in (query, key)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum(-1)

    assert torch.allclose(score(9, 4), score(31, 26), atol=1e-5)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-3)


def test_documents_with_restarting_positions_are_as_if_alone() -> None:
    model = built(NETWORKS["llama"]).eval()
    ids = tokens(1, 20)
    documents = torch.tensor([[0] * 8 + [1] * 12])
    positions = torch.tensor([[*range(8), *range(12)]])
    packed = model(ids, position_ids=positions, document_ids=documents)
    alone = torch.cat([model(ids[:, :8]), model(ids[:, 8:])], dim=1)
    assert torch.allclose(packed, alone, atol=1e-5)
