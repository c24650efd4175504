"""The families of networks that other programs know, one row each.

    family = family_named(path, config)     by the model_type of a config.json
    family = family_of(shape, path)         the family that has exactly this network

A row says which options of ours a family has, and how it spells them and its tensors. What a row
means is in family_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.convert.family_config import USES, Family, refusal
from fourfold.convert.imported import our_names
from fourfold.errors import CheckpointError
from fourfold.model.params import ModelShape

# Names in config.json -> ours; the first of each is the one we write.
_GELUS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu_squared",
}
_GATES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
}


def _llama_names(norm1: str, norm2: str) -> dict[str, str]:
    inside = {
        "norm1.": norm1,
        "attn.in_proj.q.": "self_attn.q_proj.",
        "attn.in_proj.k.": "self_attn.k_proj.",
        "attn.in_proj.v.": "self_attn.v_proj.",
        "attn.q_norm.": "self_attn.q_norm.",
        "attn.k_norm.": "self_attn.k_norm.",
        "attn.out.": "self_attn.o_proj.",
        "norm2.": norm2,
        "mlp.in_proj.gate.": "mlp.gate_proj.",
        "mlp.in_proj.up.": "mlp.up_proj.",
        "mlp.down.": "mlp.down_proj.",
    }
    outside = {"embeddings.word.": "model.embed_tokens.", "norm.": "model.norm."}
    return outside | {f"layers.*.{o}": f"model.layers.*.{t}" for o, t in inside.items()}


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
}
_MODERN = {"normalization": "RMSNorm", "position_embedding": "rotary"}
_ROTARY = ("norm_epsilon", "tie_word_embeddings", "rope_theta", "rope_scaling")
_GROUPED = (*_ROTARY, "num_key_value_heads", "head_dim")
_SAID = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_LAYERED = _SAID | {"num_key_value_heads": 32, USES: False, "sliding_window": 4096}


def _like_llama(model_type: str, architecture: str, about: str, **more: Any) -> Family:
    given: dict[str, Any] = {
        "names": _llama_names("input_layernorm.", "post_attention_layernorm."),
        "head": "lm_head.",
        "always": _MODERN,
        "free": _GROUPED,
        "biases": {"none": {}},
        "activations": _GATES,
        "sizes": _SIZES,
        "dropouts": {"attention_dropout": "attention_probs_dropout_prob"},
        "defaults": _SAID,
    }
    return Family(model_type, architecture, about, **given | more)


_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "LayerNorm before each block, learned positions, GELU",
    names={
        ours.rpartition(".")[0] + ".": theirs.rpartition(".")[0] + "."
        for theirs, ours in our_names("huggingface").items()
    },
    head="lm_head.",
    always={},
    free=("norm_epsilon", "tie_word_embeddings"),
    biases={"all": {}},
    activations=_GELUS,
    sizes={
        "vocab_size": "vocab_size",
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_hidden_size",
    },
    dropouts={
        "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob",
    },
    activation_key="activation_function",
    epsilon_key="layer_norm_epsilon",
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    qkv="blocks",
)
_NEOX_INSIDE = {
    "norm1.": "input_layernorm.",
    "attn.qkv.": "attention.query_key_value.",
    "attn.out.": "attention.dense.",
    "norm2.": "post_attention_layernorm.",
    "mlp.up.": "mlp.dense_h_to_4h.",
    "mlp.down.": "mlp.dense_4h_to_h.",
}
_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "LayerNorm before each block, rotary positions, GELU",
    names={"embeddings.word.": "gpt_neox.embed_in.", "norm.": "gpt_neox.final_layer_norm."}
    | {f"layers.*.{ours}": f"gpt_neox.layers.*.{name}" for ours, name in _NEOX_INSIDE.items()},
    head="embed_out.",
    always={"position_embedding": "rotary"},
    free=(*_ROTARY, "partial_rotary_factor", "parallel_residual"),
    biases={"all": {"attention_bias": True}},
    activations=_GELUS,
    sizes=_SIZES,
    dropouts={
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    epsilon_key="layer_norm_eps",
    theta_key="rotary_emb_base",
    share_key="rotary_pct",
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_parallel_residual": True,
        "rotary_pct": 0.25,
    },
    qkv="by_head",
    heads_divide_width=True,
)
_LLAMA = _like_llama(
    "llama",
    "LlamaForCausalLM",
    "RMSNorm before each block, rotary positions, a gated MLP",
    biases={
        "none": {"attention_bias": False, "mlp_bias": False},
        "all": {"attention_bias": True, "mlp_bias": True},
    },
    heads_divide_width=True,
)
_MISTRAL = _like_llama(
    "mistral",
    "MistralForCausalLM",
    "Llama's block with a sliding window",
    free=(*_GROUPED, "sliding_window"),
    windows="all",
    defaults=_SAID | {"num_key_value_heads": 8, "sliding_window": 4096},
)
_QWEN2 = _like_llama(
    "qwen2",
    "Qwen2ForCausalLM",
    "Llama's block with biases of queries, keys and values",
    biases={"qkv": {}},
    free=(*_GROUPED, "sliding_window", "sliding_window_layers"),
    windows="by_layer",
    defaults=_LAYERED | {"max_window_layers": 28},
)
_QWEN3 = _like_llama(
    "qwen3",
    "Qwen3ForCausalLM",
    "Llama's block with normalized queries and keys",
    always=_MODERN | {"qk_norm": "per_head"},
    biases={"none": {"attention_bias": False}},
    free=(*_GROUPED, "sliding_window", "sliding_window_layers"),
    windows="by_layer",
    defaults=_LAYERED | {"max_window_layers": 28, "head_dim": 128},
)
_OLMO2 = _like_llama(
    "olmo2",
    "Olmo2ForCausalLM",
    "RMSNorm after each block and of queries and keys, rotary positions, a gated MLP",
    names=_llama_names("post_attention_layernorm.", "post_feedforward_layernorm."),
    always=_MODERN | {"norm_placement": "post", "qk_norm": "all_heads"},
    biases={"none": {"attention_bias": False}},
    defaults=_SAID | {"rms_norm_eps": 1e-5},
)

FAMILIES = {
    family.model_type: family for family in (_GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _OLMO2, _NEOX)
}


def family_named(path: Path, config: Mapping[str, Any]) -> Family:
    known = ", ".join(FAMILIES)
    named = config.get("model_type")
    if named is None:
        raise CheckpointError(f"{path} names no model_type; Fourfold reads {known}")
    if not isinstance(named, str) or named not in FAMILIES:
        raise refusal(path, "model_type", named, f"; it has {known}")
    return FAMILIES[named]


def family_of(shape: ModelShape, path: Path) -> Family:
    """The family whose networks are of this kind; raises if it does not have all of it."""
    family = _nearest(shape)
    if odd := family.objection(shape):
        raise CheckpointError(
            f"{path}: {odd} is not what {family.model_type} has, the nearest of the families that "
            f"Hugging Face's files are written for ({', '.join(FAMILIES)}); keep it as a Fourfold "
            "checkpoint, or train with a family's settings (docs/networks.md)"
        )
    return family


def _nearest(shape: ModelShape) -> Family:
    if shape.position_embedding == "learned":
        return _GPT2
    if shape.normalization == "LayerNorm":
        return _NEOX
    if shape.norm_placement == "post" or shape.qk_norm == "all_heads":
        return _OLMO2
    if shape.qk_norm == "per_head":
        return _QWEN3
    if shape.bias == "qkv":
        return _QWEN2
    return _MISTRAL if shape.sliding_window is not None else _LLAMA
