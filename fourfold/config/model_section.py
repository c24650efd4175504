"""The `Model` section: the network, and how much of it is kept for the backward pass.

One decoder block with options. As they stand here they make GPT-2 and GPT-3; docs/networks.md has
the settings of the other families.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Le

from fourfold.config.fields import (
    BelowOne,
    Count,
    CountOrZero,
    NotNegative,
    Number,
    Positive,
    Section,
    derived,
    key,
    section,
)

GATED = ("swiglu", "geglu")  # activations with a third matrix

Share = Annotated[float, Number, Gt(0), Le(1)]


class RopeScalingSection(Section):
    type: Literal["none", "linear", "llama3", "yarn"] = key(
        "none",
        "How rotary positions are stretched beyond the length a model was trained for: linear "
        "divides all positions by factor; llama3 and yarn stretch slow frequencies only, each by "
        "its own rule.",
    )
    factor: Positive = key(1.0, "How many times longer sequences become.")
    original_max_position_embeddings: Count | None = key(
        None, "The length before stretching. Null is max_position_embeddings / factor."
    )
    low_freq_factor: Positive = key(
        1.0, "With llama3: waves longer than the original length over this are stretched in full."
    )
    high_freq_factor: Positive = key(
        4.0, "With llama3: waves shorter than the original length over this are left alone."
    )
    beta_fast: Positive = key(
        32.0, "With yarn: what turns at least this often within the original length is left alone."
    )
    beta_slow: Positive = key(
        1.0, "With yarn: what turns at most this often within the original length is stretched."
    )
    attention_factor: Positive | None = key(
        None,
        "With yarn: what rotated queries and keys are multiplied by. Null is 0.1 ln(factor) + 1.",
    )
    truncate: bool = key(
        True, "With yarn: round the borders between those frequencies to whole dimensions."
    )


class ModelSection(Section):
    vocab_size: Count = key(
        50304,
        "Rows of the token embedding; at least the tokenizer's size, best a multiple of mp_degree.",
    )
    hidden_size: Count = key(2048, "Width of the residual stream.")
    num_layers: Count = key(24, "Transformer layers.")
    num_attention_heads: Count = key(
        16, "Attention heads; divides hidden_size unless head_dim is given."
    )
    num_key_value_heads: Count = derived(
        "Heads of keys and values, each shared by equally many attention heads (grouped-query "
        "attention; 1 is multi-query attention). Null is num_attention_heads."
    )
    head_dim: Count = derived(
        "Width of one attention head. Null is hidden_size / num_attention_heads."
    )
    ffn_hidden_size: Count = derived(
        "Width inside the feed-forward block. Null is 4 * hidden_size; with a gated activation "
        "8/3 of it, rounded up to a multiple of 256."
    )
    activation: Literal["gelu_tanh", "gelu", "relu_squared", "swiglu", "geglu"] = key(
        "gelu_tanh",
        "Of the feed-forward block: GELU in its tanh form (GPT-2) or exact (GPT-NeoX), squared "
        "ReLU, or gated, with a third matrix: swiglu is silu(gate) * up (Llama), geglu has GELU in "
        "its tanh form there.",
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = key(
        "LayerNorm", "RMSNorm divides by the root of the mean square, and has no bias (Llama)."
    )
    norm_epsilon: Positive = key(1.0e-5, "Added under the root of a norm.")
    norm_placement: Literal["pre", "post"] = key(
        "pre",
        "pre normalizes what goes into attention and the feed-forward block, post what comes out "
        "of them before it is added to the residual stream (OLMo 2).",
    )
    parallel_residual: bool = key(
        False,
        "Attention and the feed-forward block both read the layer's input, and their outputs are "
        "added together (GPT-NeoX); else the one reads what the other wrote.",
    )
    qk_norm: Literal["none", "per_head", "all_heads"] = key(
        "none",
        "Normalize queries and keys before their product: each head by itself (Qwen3), or all "
        "heads of a token together (OLMo 2, with RMSNorm only).",
    )
    bias: Literal["all", "none", "qkv"] = key(
        "all",
        "Which linear layers add a bias: all (GPT-2), none (Llama), or those of queries, keys and "
        "values alone (Qwen2). LayerNorm has one with all.",
    )
    tie_word_embeddings: bool = key(
        True, "The head is the word embedding; False gives it a matrix of its own."
    )
    position_embedding: Literal["learned", "rotary", "none"] = key(
        "learned",
        "How the network knows positions: a learned table (GPT-2), rotated queries and keys "
        "(RoPE), or not at all.",
    )
    rope_theta: Positive = key(10000.0, "Base of the rotary frequencies.")
    partial_rotary_factor: Share = key(
        1.0, "Share of each head that is rotated, from its first number on (GPT-NeoX: 0.25)."
    )
    rope_scaling: RopeScalingSection = section(
        RopeScalingSection, "Rotary positions beyond the length trained for."
    )
    sliding_window: Count | None = key(
        None,
        "A token attends to this many tokens at most, itself included (Mistral). Null is all "
        "before it.",
    )
    sliding_window_layers: list[CountOrZero] | None = key(
        None, "The layers, counted from 0, that sliding_window applies to. Null is all of them."
    )
    attention_scale: Positive | None = key(
        None, "What scores of attention are multiplied by. Null is 1 / sqrt(head_dim)."
    )
    embedding_scale: Positive = key(1.0, "What word embeddings are multiplied by.")
    logit_scale: Positive = key(1.0, "What the logits are multiplied by.")
    logit_softcap: Positive | None = key(
        None, "Logits are kept within this by a tanh: cap * tanh(logits / cap). Null does not."
    )
    z_loss: NotNegative = key(
        0.0,
        "While training, this times the square of the logarithm of the softmax's denominator is "
        "added to each token's loss, which keeps logits from drifting (PaLM: 1e-4).",
    )
    hidden_dropout_prob: BelowOne = key(
        0.1,
        "Dropout after the embeddings and on the output of each attention and feed-forward block.",
    )
    attention_probs_dropout_prob: BelowOne = key(0.1, "Dropout of the attention probabilities.")
    max_position_embeddings: Count = key(
        1024, "The longest sequence the model can read; at least max_seq_len."
    )
    initializer_range: NotNegative = key(
        0.02, "Standard deviation of the normal distribution of initial weights and embeddings."
    )
    mup_base_width: Count | None = key(
        None,
        "muP: the hidden_size that the learning rate and initializer_range were found at. In a "
        "network m times as wide the matrices of the layers then begin sqrt(m) times smaller and "
        "learn m times slower, and the logits are divided by m. Null is off.",
    )
    depth_scaled_init: bool = key(
        False,
        "Divide the initial deviation of the two projections that write to the residual stream by "
        "sqrt(2 * num_layers), as GPT-2 does.",
    )
    use_recompute: bool = key(
        True,
        "Recompute activations in the backward pass instead of keeping them (activation "
        "checkpointing): less memory, more time.",
    )
    recompute_granularity: Literal["full", "ops", "full_attn", "core_attn"] | None = key(
        None,
        "What is recomputed: full is a whole layer, ops all of it but the operations in "
        "recompute_keep, full_attn the attention block, core_attn only softmax(QK^T)V; full takes "
        "the least memory, core_attn the most. Null is full with use_recompute.",
    )
    recompute_method: Literal["uniform", "block"] = key(
        "uniform",
        "Which layers are recomputed: uniform is all of them, recompute_num_layers at a time; "
        "block is the first recompute_num_layers of each pipeline stage.",
    )
    recompute_num_layers: Count = key(
        1,
        "With uniform, layers recomputed together, of which only the first one's input is kept "
        "(above 1 with granularity full only); with block, layers of a stage that are recomputed.",
    )
    recompute_keep: list[Literal["products", "attention"]] = key(
        ["products", "attention"],
        "With granularity ops, what is kept and not recomputed: matrix products, what fused "
        "attention gives, or both. Norms, GELU and dropout are recomputed.",
    )
    offload_activations: bool = key(
        False,
        "On a GPU, keep what the layers hold for the backward pass in pinned host memory, and copy "
        "it back when it is needed: memory of one or two layers instead of all, for the time of "
        "the copies. Layers that are recomputed as a whole keep their input on the device.",
    )
    fused_linear: bool = key(
        True, "Compute each matrix product and its bias addition in one operation. Same numbers."
    )
    sequence_parallel: bool = key(
        False,
        "With mp_degree above 1, split the activations between the tensor-parallel blocks along "
        "the sequence too. Same numbers but for where dropout falls, less memory.",
    )
    loss_chunk_tokens: Count | None = key(
        None,
        "Tokens whose logits exist at one time while the loss is computed; bounds its memory. Null "
        "is 4096 on a GPU; on a CPU 512, or 1024 in bfloat16 and float16.",
    )
