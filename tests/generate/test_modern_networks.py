"""Every option of the `Model` section is generated with: a cache changes nothing but the time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from helpers.networks import Recomputing
from torch import Tensor

from fourfold import native
from fourfold.generate import Decoder, Options, generate
from fourfold.generate.packed import is_known
from fourfold.generate.sharing import RowPart
from fourfold.generate.weights import FORMATS
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


# Each with something of the kernels that the others do not have.
VARIED = ["llama", "windows by layer", "qwen3", "olmo2", "neox", "scales", "gelu gate with biases"]


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("weights", FORMATS)
def test_narrower_weights_stay_close(name: str, weights: Any, way: str) -> None:
    """The relative error of all logits together, on weights far wilder than a trained model's."""
    allowed = {"float32": 1e-5, "float16": 6e-3, "bfloat16": 6e-2, "int8": 0.2, "int4": 0.9}
    expected = in_one_go(model_of(SHAPES[name]))
    error = relative(step_by_step(Decoder(model_of(SHAPES[name]), weights)), expected)
    assert error < allowed[weights]
    assert weights == "float32" or error > 1e-6  # something was indeed rounded


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_token_has_the_same_logits_to_the_bit_however_it_is_computed(
    name: str, weights: Any
) -> None:
    """Alone or beside others, in a prompt, one at a time or in parts, whatever the threads."""
    network = Decoder(model_of(SHAPES[name]), weights)
    if network.fused is None:
        pytest.skip("no kernels can be built here")
    prompt = PROMPTS[1]
    network.reserve(8, 64)
    whole = network.read([prompt])
    network.reserve(8, 64)
    network.read([prompt[:1]])
    for token in prompt[1:]:
        single = network.advance([token])
    assert torch.equal(single, whole)
    network.reserve(8, 64)
    for start, stop in ((0, 3), (3, 5), (5, 38), (38, 40)):
        in_parts = network.take_in([RowPart(2, start, prompt[start:stop], 1)])
    assert torch.equal(in_parts, whole)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            network.reserve(8, 64)
            assert torch.equal(network.read([*PROMPTS, prompt])[[1, 4]], whole.expand(2, -1))
    finally:
        torch.set_num_threads(before)


OPTIONS = {
    "greedy": Options(max_dec_len=18, decode_strategy="greedy_search"),
    "sampling": Options(max_dec_len=18, top_k=12, seed=3, num_return_sequences=2),
    "beam": Options(max_dec_len=10, decode_strategy="beam_search", num_beams=3),
}


def texts(network: Any, options: Options, **named: Any) -> list[list[int]]:
    found = generate(network, PROMPTS, options, eos_id=None, **named)
    return [one.ids for continuations in found for one in continuations]


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("strategy", OPTIONS)
def test_texts_are_those_without_a_cache(name: str, strategy: str, way: str) -> None:
    """In batches whose rows come, go and move; prompts that begin alike; drafts."""
    options = OPTIONS[strategy]
    expected = texts(Recomputing(model_of(SHAPES[name])), options)
    decoder = Decoder(model_of(SHAPES[name]))
    assert texts(decoder, options) == expected
    if strategy != "beam":
        assert texts(decoder, options, max_slots=2, draft_tokens=4) == expected


@pytest.mark.parametrize("name", ["llama", "windows by layer"])
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_beginnings_and_drafts_change_no_text(name: str, weights: Any) -> None:
    network = Decoder(model_of(SHAPES[name]), weights)
    start = list(range(40, 60))
    prompts = [[*start, 3], [*start, 4, 5], [7, 8] * 6, start]
    options = Options(max_dec_len=12, decode_strategy="greedy_search")
    alone = [generate(network, [one], options, eos_id=None)[0][0].ids for one in prompts]
    for named in ({}, {"draft_tokens": 5}, {"max_slots": 1}):
        found = generate(network, prompts, options, eos_id=None, **named)
        assert [one.ids for [one] in found] == alone


@pytest.mark.parametrize("shared", [4, 2, 1])
def test_the_cache_holds_the_heads_that_differ(shared: int, way: str) -> None:
    decoder = Decoder(model_of(replace(LLAMA, num_key_value_heads=shared)))
    decoder.reserve(2, 32)
    numbers = 3 * 2 * shared * 32 * 16  # layers, rows, heads, positions, head size
    if decoder.fused is not None:
        assert decoder.fused.keys.numel() == decoder.fused.values.numel() == numbers
    else:
        assert sum(one.keys.numel() for one in decoder._caches.values()) == numbers


def test_an_option_the_kernels_do_not_know_runs_through_torch() -> None:
    """One that is added to the network some day is not computed as if it were not there."""

    @dataclass(frozen=True)
    class Later(ModelShape):
        twist: float = 0.0

    given = {field.name: getattr(LLAMA, field.name) for field in fields(LLAMA)}
    assert is_known(model_of(Later(**given)))
    assert not is_known(model_of(Later(**given, twist=0.5)))
