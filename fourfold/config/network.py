"""The sections that describe what is trained and how it is spread: Model, Distributed, Fused,
Optimizer."""

from __future__ import annotations

from typing import Literal

from fourfold.config.fields import (
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Probability,
    Section,
    derived,
    key,
    section,
)


class Model(Section):
    vocab_size: Count = key(
        50304,
        "Rows of the token embedding; at least the tokenizer's size, best a multiple of mp_degree.",
    )
    hidden_size: Count = key(2048, "Width of the residual stream.")
    num_layers: Count = key(24, "Transformer layers.")
    num_attention_heads: Count = key(16, "Attention heads; divides hidden_size.")
    ffn_hidden_size: Count = derived(
        "Width inside the feed-forward block. Null is 4 * hidden_size."
    )
    hidden_dropout_prob: BelowOne = key(
        0.1,
        "Dropout after the embeddings and on the output of each attention and feed-forward block.",
    )
    attention_probs_dropout_prob: BelowOne = key(0.1, "Dropout of the attention probabilities.")
    max_position_embeddings: Count = key(
        1024, "Learned positions: the longest sequence the model can read; at least max_seq_len."
    )
    type_vocab_size: Count = key(
        16, "Kept for the originals' files and without effect: a GPT has no token types."
    )
    initializer_range: NotNegative = key(
        0.02, "Standard deviation of the normal distribution of initial weights and embeddings."
    )
    depth_scaled_init: bool = key(
        False,
        "Divide the initial deviation of the two projections that write to the residual stream by "
        "sqrt(2 * num_layers), as GPT-2 does.",
    )
    use_recompute: bool = key(
        True,
        "Recompute activations in the backward pass instead of keeping them: less memory, more "
        "time.",
    )
    recompute_granularity: Literal["full", "full_attn", "core_attn"] | None = key(
        None,
        "What is recomputed: full is every layer, full_attn the attention block, core_attn only "
        "softmax(QK^T)V. Memory in that order, least first. Null is full with use_recompute.",
    )
    fused_linear: bool = key(
        True, "Compute each matrix product and its bias addition in one operation. Same numbers."
    )
    fuse_attn_qkv: bool = key(
        True,
        "One projection for query, key and value, stored head by head. This is always so; False "
        "is accepted and changes nothing.",
    )
    sequence_parallel: bool = key(
        False,
        "With mp_degree above 1, split the activations between the tensor-parallel blocks along "
        "the sequence too. Same numbers but for where dropout falls, less memory.",
    )
    loss_chunk_tokens: Count = key(
        1024, "Tokens whose logits exist at one time while the loss is computed; bounds its memory."
    )


class Sharding(Section):
    sharding_degree: Count = key(
        1, "Data ranks that share one copy of the state named by sharding_stage."
    )
    sharding_stage: Literal[1, 2, 3] = key(
        1,
        "What is divided: 1 the optimizer state, 2 the gradients as well, 3 the parameters too.",
    )
    sharding_offload: bool = key(
        False, "Keep the divided state in CPU memory and copy it to the device when needed."
    )


PipelineSchedule = Literal[
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "LoopedBFS",
    "DualPipeV",
]


class Distributed(Section):
    auto: bool = key(
        False,
        "Let fourfold train choose the layout for the processes it has, by its cost model; "
        "`Distributed: auto` says the same. Degrees above 1 and whatever -o sets are kept.",
    )
    dp_degree: Count = derived(
        "Copies of the model that each read their own samples. Null is what the number of "
        "processes leaves: processes / (mp_degree * pp_degree * sharding_degree)."
    )
    mp_degree: Count = key(
        1,
        "Ranks that share each layer (tensor parallel); divides the heads and the ffn width.",
    )
    pp_degree: Count = key(1, "Pipeline stages: ranks that each hold some of the layers.")
    pp_schedule: PipelineSchedule = key(
        "1F1B",
        "Order of forward and backward passes in the pipeline. 1F1B and GPipe hold one stage per "
        "rank, ZBVZeroBubble and DualPipeV two, the others virtual_pp_degree.",
    )
    virtual_pp_degree: Count = key(1, "Stages per pipeline rank, for the interleaved schedules.")
    pp_layers: list[Count] | None = key(
        None,
        "Layers of each pipeline stage, first stage first. Null shares them out as evenly as can "
        "be, with the longer stages in the middle.",
    )
    timeout_seconds: Positive = key(
        600.0,
        "How long a rank may wait for the others before the run is given up; the launcher takes "
        "a run for hung after as long without progress.",
    )
    sharding: Sharding = section(
        Sharding, "Group sharding (ZeRO). The world is dp * pp * sharding * mp processes."
    )


class Fused(Section):
    tensor_fusion: bool = key(
        False,
        "Keep parameters and gradients in a few flat buffers, so that the optimizer runs few large "
        "operations. Only on one device or with data parallelism alone.",
    )


class LearningRate(Section):
    decay_steps: Count = derived(
        "Step at which the learning rate reaches min_lr. Null is max_steps. (FleetX's default was "
        "360000.)"
    )
    warmup_rate: Probability = key(
        0.01, "The learning rate rises linearly over the first warmup_rate * decay_steps steps."
    )
    decay_samples: Count | None = key(
        None,
        "In place of decay_steps: the samples after which the learning rate is min_lr. The rate "
        "then follows the samples read before a step, as Megatron's does, so the first step of a "
        "warm-up has rate 0. Null with warmup_samples given is the samples of the whole run.",
    )
    warmup_samples: NotNegative | None = key(
        None,
        "The learning rate rises over this many samples. Null with decay_samples given is "
        "warmup_rate * decay_samples.",
    )
    decay_style: Literal["cosine", "linear", "constant"] = key(
        "cosine", "How the rate falls from max_lr to min_lr; constant stays at max_lr."
    )
    max_lr: NotNegative = key(
        5.0e-5,
        "Learning rate at the end of the warm-up. (FleetX's default, 1e-5, was below its min_lr.)",
    )
    min_lr: NotNegative = key(
        1.0e-5,
        "Learning rate at the end of the cosine decay and after. (FleetX's default was 5e-5.)",
    )


class Optimizer(Section):
    weight_decay: NotNegative = key(
        0.0, "Decoupled weight decay of matrices and embeddings; biases and norms have none."
    )
    adam_beta1: BelowOne = key(0.9, "Decay of AdamW's average of gradients.")
    adam_beta2: BelowOne = key(0.999, "Decay of AdamW's average of squared gradients.")
    adam_epsilon: Positive = key(1.0e-8, "Added to AdamW's denominator.")
    grad_clip: NotNegative = key(0.0, "Largest global norm of the gradient; 0 does not clip.")
    lr: LearningRate = section(LearningRate, "Linear warm-up, then cosine decay.")
