"""Parameter counts and FLOPs: the one place they are defined.

Convention: a multiply-add is two FLOPs; only matrix products count (linear layers, head, the two
products of attention); the backward pass costs twice the forward one. *Model* FLOPs leave out
what recomputation repeats, *hardware* FLOPs include it. Attention counts all T × T pairs unless
`causal` is asked for, which halves it. MFU uses model FLOPs, full attention, as most papers do.
"""

from __future__ import annotations

from typing import Literal

from fourfold.model.gpt import ModelShape

Recompute = Literal["full", "full_attn", "core_attn"]


def count_parameters(shape: ModelShape) -> int:
    """Exact number of parameters; the head is tied to the word embedding and counted once."""
    h, ffn = shape.hidden_size, shape.ffn_hidden_size
    attention = 4 * h * h + 4 * h  # qkv and out, with biases
    mlp = 2 * h * ffn + ffn + h
    norms = 4 * h
    embeddings = (shape.vocab_size + shape.max_position_embeddings) * h
    return shape.num_layers * (attention + mlp + norms) + embeddings + 2 * h


def flops_per_token(
    shape: ModelShape,
    seq_len: int,
    *,
    recompute: Recompute | None = None,
    causal: bool = False,
) -> float:
    """Training FLOPs (forward and backward) of one token in a sequence of `seq_len`.

    `recompute` given counts hardware FLOPs: the forward parts that run a second time.
    """
    core = 4 * seq_len * shape.hidden_size * (0.5 if causal else 1.0)
    projections = 8 * shape.hidden_size**2
    mlp = 4 * shape.hidden_size * shape.ffn_hidden_size
    layer = core + projections + mlp
    head = 2 * shape.vocab_size * shape.hidden_size
    repeated = {None: 0.0, "core_attn": core, "full_attn": core + projections, "full": layer}
    return 3 * (shape.num_layers * layer + head) + shape.num_layers * repeated[recompute]
