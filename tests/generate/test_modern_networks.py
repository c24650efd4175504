"""Every option of the `Model` section is generated with: a cache changes nothing but the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import native
from fourfold.generate import Decoder
from fourfold.model import GPT, ModelShape, initialize
from fourfold.model.params import RopeScaling

# Llama's block; three layers of heads that are wider than hidden / heads.
LLAMA = ModelShape(
    vocab_size=160,
    hidden_size=48,
    num_layers=3,
    num_attention_heads=4,
    ffn_hidden_size=80,
    max_position_embeddings=64,
    initializer_range=0.3,
    num_key_value_heads=2,
    head_dim=16,
    activation="swiglu",
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    bias="none",
    tie_word_embeddings=False,
    position_embedding="rotary",
)
GPT2 = ModelShape(160, 48, 3, 4, 96, 64, initializer_range=0.3)


def scaled(kind: str, **values: Any) -> ModelShape:
    scaling = RopeScaling(kind, 4.0, original_max_position_embeddings=16, **values)
    return replace(LLAMA, rope_scaling=scaling)


SHAPES = {
    "llama": LLAMA,
    "multi-query": replace(LLAMA, num_key_value_heads=1),
    "no sharing": replace(LLAMA, num_key_value_heads=4),
    "three queries a key": replace(LLAMA, num_attention_heads=6),
    "odd head size": replace(LLAMA, head_dim=10),
    "large head": replace(LLAMA, head_dim=72),
    "partial rotary": replace(LLAMA, partial_rotary_factor=0.25),
    "partial rotary of an odd half": replace(LLAMA, partial_rotary_factor=0.4),
    "linear": scaled("linear"),
    "llama3": scaled("llama3"),
    "yarn": scaled("yarn"),
    "yarn with a factor": scaled("yarn", attention_factor=1.3),
    "no positions": replace(LLAMA, position_embedding="none"),
    "learned positions": replace(LLAMA, position_embedding="learned"),
    "window": replace(LLAMA, sliding_window=7),
    "window of one": replace(LLAMA, sliding_window=1),
    "window of a panel": replace(LLAMA, sliding_window=16),
    "windows by layer": replace(LLAMA, sliding_window=9, sliding_window_layers=(0, 2)),
    "qwen3": replace(LLAMA, qk_norm="per_head", tie_word_embeddings=True),
    "qwen2": replace(LLAMA, bias="qkv", tie_word_embeddings=True),
    "olmo2": replace(LLAMA, qk_norm="all_heads", norm_placement="post"),
    "neox": replace(
        GPT2,
        activation="gelu",
        parallel_residual=True,
        position_embedding="rotary",
        partial_rotary_factor=1 / 3,
        tie_word_embeddings=False,
    ),
    "layer norm of heads": replace(GPT2, qk_norm="per_head", activation="relu_squared"),
    "post layer norm": replace(GPT2, norm_placement="post", bias="qkv"),
    "gelu gate with biases": replace(GPT2, activation="geglu", num_key_value_heads=2),
    "scales": replace(
        LLAMA, embedding_scale=3.0, logit_scale=0.4, logit_softcap=5.0, attention_scale=0.7
    ),
    "gpt2 with scales": replace(
        GPT2, embedding_scale=0.5, logit_scale=1.5, logit_softcap=9.0, sliding_window=20
    ),
    "gpt2 apart": replace(GPT2, head_dim=24, bias="none", num_attention_heads=3),
}
PROMPTS = [[5], list(range(20, 60)), [5, 6, 7, 150, 3], [150] * 17]
NEW = [list(range(100, 108)), list(range(80, 88)), [9, 8, 7, 6, 5, 4, 3, 2], [33] * 8]


def model_of(shape: ModelShape) -> GPT:
    model = GPT(shape)
    initialize(model, seed=5)
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled kernels, and as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr("fourfold.generate.weights.kernels", lambda: None)
    elif native.why_not("decode"):
        pytest.skip("no kernels can be built here")
    return request.param


def step_by_step(decoder: Decoder) -> Tensor:
    """Logits (steps, rows, V): after the prompts, which are of different lengths, and after each
    of some tokens."""
    decoder.reserve(len(PROMPTS), 64)
    steps = [decoder.read(PROMPTS[:2]), decoder.read(PROMPTS[2:])]
    found = [torch.cat(steps)]
    found += [decoder.advance(tokens) for tokens in zip(*NEW)]
    return torch.stack(found)


def in_one_go(model: GPT) -> Tensor:
    """The same by the network itself, each row alone."""
    rows = []
    for prompt, new in zip(PROMPTS, NEW):
        with torch.no_grad():
            rows.append(model(torch.tensor([[*prompt, *new]]))[0, len(prompt) - 1 :])
    return torch.stack(rows, dim=1)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", SHAPES)
def test_step_by_step_is_the_network_itself(name: str, way: str) -> None:
    expected = in_one_go(model_of(SHAPES[name]))
    decoder = Decoder(model_of(SHAPES[name]))
    found = step_by_step(decoder)
    assert relative(found, expected) < 1e-5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert (decoder.fused is not None) == (way == "kernels")
