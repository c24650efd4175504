"""The same weights write the same tokens as `transformers`, where the rules agree; and the
differences that are documented, each shown."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from helpers.networks import Recomputing
from model.test_transformers_parity import SHAPE, to_ours
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen3Config,
)

from fourfold.generate import Decoder, Options, generate
from fourfold.generate.session import stream_seed
from fourfold.model import GPT, ModelShape
from fourfold.model.params import RopeScaling

EOS = 7
PROMPTS = [[5, 9, 13], [200, 4, 77, 5, 5, 31, 8], [999]]


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, GPT2LMHeadModel]:
    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=SHAPE.vocab_size,
        n_positions=SHAPE.max_position_embeddings,
        n_embd=SHAPE.hidden_size,
        n_layer=SHAPE.num_layers,
        n_head=SHAPE.num_attention_heads,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        initializer_range=0.2,
    )
    peer = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        # A final norm that lifts the end of text's logit, so that some texts end early.
        peer.transformer.ln_f.bias += 2.6 * peer.transformer.wte.weight[EOS]
    ours = GPT(SHAPE)
    weights = to_ours(dict(peer.named_parameters()), SHAPE.num_attention_heads)
    ours.load_state_dict({name: tensor.detach().clone() for name, tensor in weights.items()})
    return Decoder(ours), peer


def theirs(peer: GPT2LMHeadModel, prompt: list[int], **options: Any) -> list[list[int]]:
    tokens = torch.tensor([prompt])
    out = peer.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return [without_padding(row[len(prompt) :]) for row in out.tolist()]


def without_padding(row: list[int]) -> list[int]:
    return row[: row.index(EOS)] if EOS in row else row


def ours(decoder: Any, prompts: list[list[int]], **options: Any) -> list[list[list[int]]]:
    results = generate(decoder, prompts, Options(**options), eos_id=EOS)
    return [[one.ids for one in continuations] for continuations in results]


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("min_new", [0, 6])
def test_greedy_is_equal(pair: Any, penalty: float, min_new: int) -> None:
    decoder, peer = pair
    results = ours(
        decoder,
        PROMPTS,
        max_dec_len=32,
        min_dec_len=min_new,
        decode_strategy="greedy_search",
        repetition_penalty=penalty,
    )
    for prompt, [ids] in zip(PROMPTS, results):
        [expected] = theirs(
            peer,
            prompt,
            do_sample=False,
            max_new_tokens=32,
            min_new_tokens=min_new,
            repetition_penalty=penalty,
        )
        assert ids == expected


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_beam_search_is_equal(
    pair: Any, num_beams: int, length_penalty: float, early_stopping: bool
) -> None:
    decoder, peer = pair
    results = ours(
        decoder,
        PROMPTS,
        max_dec_len=16,
        min_dec_len=2,
        decode_strategy="beam_search",
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    assert len({len(ids) for found in results for ids in found}) > 1
    for prompt, found in zip(PROMPTS, results):
        assert found == theirs(
            peer,
            prompt,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=16,
            min_new_tokens=2,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )


def test_beam_search_with_repetition_penalty_is_equal(pair: Any) -> None:
    decoder, peer = pair
    keys = {"num_beams": 3, "repetition_penalty": 1.3}
    [found] = ours(decoder, PROMPTS[1:2], max_dec_len=12, decode_strategy="beam_search", **keys)
    assert found == theirs(
        peer, PROMPTS[1], do_sample=False, max_new_tokens=12, min_new_tokens=1, **keys
    )


def test_beams_are_the_same_without_a_cache(pair: Any) -> None:
    decoder, _ = pair
    keys: dict[str, Any] = {"decode_strategy": "beam_search", "num_beams": 4, "max_dec_len": 12}
    plain = Recomputing(decoder.model, SHAPE.max_position_embeddings)
    assert ours(plain, PROMPTS, **keys) == ours(decoder, PROMPTS, **keys)


def with_our_numbers(monkeypatch: pytest.MonkeyPatch, seed: int, prompt: list[int]) -> None:
    """`torch.multinomial` inverts the cumulative distribution with our stream of numbers."""
    import random

    source = random.Random(stream_seed(seed, prompt, 0))

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert probabilities.shape[0] == num_samples == 1
        cumulative = probabilities.double().cumsum(-1)
        target = torch.tensor([[source.random()]], dtype=torch.float64) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True)

    monkeypatch.setattr(torch, "multinomial", multinomial)


@pytest.mark.parametrize(
    "keys",
    [
        {"top_k": 0},
        {"top_k": 20},
        {"top_k": 0, "temperature": 0.6},
        {"top_k": 9, "temperature": 1.7, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_sampling_is_equal_given_the_same_random_numbers(
    pair: Any, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, peer = pair
    for seed, prompt in enumerate(PROMPTS):
        [[found]] = ours(decoder, [prompt], max_dec_len=24, min_dec_len=3, seed=seed, **keys)
        with_our_numbers(monkeypatch, seed, prompt)
        [expected] = theirs(
            peer, prompt, do_sample=True, max_new_tokens=24, min_new_tokens=3, **keys
        )
        monkeypatch.undo()
        assert found == expected


# Documented differences


class Fixed:
    """The same distribution at every step."""

    def __init__(self, probabilities: list[float]) -> None:
        self.logits = torch.tensor(probabilities).log()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def drawn(probabilities: list[float], **keys: Any) -> set[int]:
    options = Options(max_dec_len=50, min_dec_len=0, **keys)
    [[result]] = generate(Recomputing(Fixed(probabilities)), [[0]], options, eos_id=None)
    return set(result.ids)


def their_kept(probabilities: list[float], *warpers: Any) -> set[int]:
    scores = torch.tensor([probabilities]).log()
    for warper in warpers:
        scores = warper(torch.tensor([[0]]), scores)
    return set(scores[0].isfinite().nonzero().flatten().tolist())


def test_top_p_is_a_share_of_the_full_distribution_here() -> None:
    """They renormalise after top_k, so their top_p is a share of what top_k left."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    spread = [0.3, 0.2, 0.18, 0.17, 0.15]
    assert drawn(spread, top_k=2, top_p=0.45) == {0, 1}
    assert their_kept(spread, TopKLogitsWarper(2), TopPLogitsWarper(0.45)) == {0}


def test_a_sum_that_just_reaches_top_p_takes_one_more_here() -> None:
    """FleetX drops what comes after the sum has exceeded p; they, after it has reached p."""
    from transformers import TopPLogitsWarper

    spread = [0.5, 0.25, 0.125, 0.125]
    assert drawn(spread, top_p=0.5) == {0, 1}
    assert their_kept(spread, TopPLogitsWarper(0.5)) == {0}


def test_repetition_penalty_comes_after_the_minimum_length_here() -> None:
    """The order does not matter to the result: what is forbidden stays so."""
    options = Options(max_dec_len=3, min_dec_len=3, repetition_penalty=0.01, seed=1)
    [[result]] = generate(Recomputing(Fixed([0.2, 0.7, 0.1])), [[1]], options, eos_id=1)
    assert 1 not in result.ids


# Modern networks, their weights copied by name

MODERN = ModelShape(
    vocab_size=160,
    hidden_size=48,
    num_layers=3,
    num_attention_heads=4,
    ffn_hidden_size=80,
    max_position_embeddings=64,
    num_key_value_heads=2,
    head_dim=16,
    activation="swiglu",
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    bias="none",
    tie_word_embeddings=False,
    position_embedding="rotary",
)
LLAMA3 = RopeScaling("llama3", 4.0, original_max_position_embeddings=16)
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=16)
PEERS = {
    "llama": (LlamaConfig, MODERN),
    "llama3": (LlamaConfig, replace(MODERN, rope_scaling=LLAMA3)),
    "yarn": (LlamaConfig, replace(MODERN, rope_scaling=YARN)),
    "mistral": (MistralConfig, replace(MODERN, sliding_window=6)),
    "qwen3": (Qwen3Config, replace(MODERN, qk_norm="per_head", tie_word_embeddings=True)),
    "olmo2": (Olmo2Config, replace(MODERN, qk_norm="all_heads", norm_placement="post")),
}
PARTS = {
    "model.embed_tokens.": "embeddings.word.",
    "model.norm.": "norm.",
    "lm_head.": "head.",
    "model.layers.": "layers.",
    "self_attn.o_proj.": "attn.out.",
    "self_attn.q_proj.": "attn.in_proj.q.",
    "self_attn.k_proj.": "attn.in_proj.k.",
    "self_attn.v_proj.": "attn.in_proj.v.",
    "self_attn.q_norm.": "attn.q_norm.",
    "self_attn.k_norm.": "attn.k_norm.",
    "mlp.gate_proj.": "mlp.in_proj.gate.",
    "mlp.up_proj.": "mlp.in_proj.up.",
    "mlp.down_proj.": "mlp.down.",
    "input_layernorm.": "norm1.",
}


def modern_pair(name: str) -> tuple[GPT, Any]:
    kind, shape = PEERS[name]
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling.type != "none":
        given = asdict(shape.rope_scaling)
        rope |= {key: value for key, value in given.items() if value is not None and key != "type"}
        rope["rope_type"] = shape.rope_scaling.type
    torch.manual_seed(11)
    config = kind(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.norm_epsilon,
        tie_word_embeddings=shape.tie_word_embeddings,
        rope_parameters=rope,
        sliding_window=shape.sliding_window,
        initializer_range=0.3,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    peer = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # What a pre-norm network calls the norm after attention is the one before its second block.
    is_post = shape.norm_placement == "post"
    norms = {"post_attention_layernorm.": "norm1." if is_post else "norm2."}
    norms["post_feedforward_layernorm."] = "norm2."
    weights = {}
    for theirs, tensor in peer.named_parameters():
        own = theirs
        for part, spelling in (PARTS | norms).items():
            own = own.replace(part, spelling)
        weights[own] = tensor.detach().clone()
    model = GPT(shape)
    model.load_state_dict(weights)
    return model, peer


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", PEERS)
def test_modern_networks_write_the_same(name: str, beams: int) -> None:
    """Beyond the first period of stretched positions, and beyond a window."""
    model, peer = modern_pair(name)
    prompts = [[5, 9, 13], list(range(40, 64)), [99]]
    search: dict[str, Any] = {"decode_strategy": "greedy_search"}
    if beams > 1:
        search = {"decode_strategy": "beam_search", "num_beams": beams}
    found = ours(Decoder(model), prompts, max_dec_len=32, **search)
    for prompt, [ids] in zip(prompts, found):
        kept = {"do_sample": False, "num_beams": beams, "max_new_tokens": 32}
        assert [ids] == theirs(peer, prompt, **kept)
