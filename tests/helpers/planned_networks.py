"""Networks to plan, by their sizes."""

from __future__ import annotations

from typing import Any

from fourfold.cost.workload import Network
from fourfold.model import ModelShape


def gpt(layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq: int) -> Network:
    """A GPT with dropout and as many positions as a sequence has tokens."""
    return Network.of(ModelShape(vocab, hidden, layers, heads, ffn, seq, 0.1, 0.1), seq)


LLAMA: dict[str, Any] = {
    "position_embedding": "rotary",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": "none",
    "tie_word_embeddings": False,
}
# Keys of the `Model` section that make small networks of each family; all have 8 heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 2": LLAMA,
    "Llama 3": {**LLAMA, "num_key_value_heads": 2},
    "multi-query": {**LLAMA, "num_key_value_heads": 1, "activation": "geglu"},
    "Qwen2": {**LLAMA, "num_key_value_heads": 4, "bias": "qkv", "tie_word_embeddings": True},
    "Qwen3": {**LLAMA, "num_key_value_heads": 2, "head_dim": 12, "qk_norm": "per_head"},
    "OLMo 2": {
        **LLAMA, "num_key_value_heads": 2, "qk_norm": "all_heads", "norm_placement": "post",
    },
    "GPT-NeoX": {
        "position_embedding": "rotary", "partial_rotary_factor": 0.5, "activation": "gelu",
        "parallel_residual": True, "tie_word_embeddings": False,
    },
    "nanoGPT speedrun": {
        "position_embedding": "rotary", "normalization": "RMSNorm", "activation": "relu_squared",
        "bias": "none", "qk_norm": "per_head", "attention_scale": 0.12,
    },
}  # fmt: skip
