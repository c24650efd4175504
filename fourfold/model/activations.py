"""What the forward pass keeps for the backward pass, in bytes: an estimate from the code of gpt.py.

Counted per token of one layer, in values of the residual stream's width unless said:

    norm1's input 1, qkv's input 1, q k v 3, what attention gave 1, out's input 1,
    norm2's input 1, up's input 1, gelu's input and down's input ffn / hidden each

and a byte for each dropped value. With dropout torch's fused attention is not used and the
probabilities (heads x positions) are kept as well, about three times over.
"""

from __future__ import annotations

from fourfold.model.flops import Recompute
from fourfold.model.params import ModelShape


def layer_bytes(
    shape: ModelShape,
    tokens: int,
    seq_len: int,
    itemsize: int,
    recompute: Recompute | None = None,
    mp: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Kept by one layer for `tokens` tokens in sequences of `seq_len`, on one of `mp` ranks."""
    h, ffn, heads = shape.hidden_size, shape.ffn_hidden_size, shape.num_attention_heads
    between = mp if sequence_parallel else 1  # what stands between the blocks is cut by position
    mask = 1 if shape.hidden_dropout_prob > 0 else 0
    core = h / mp * itemsize
    if shape.attention_probs_dropout_prob > 0:
        core += heads / mp * seq_len * 3 * itemsize
    qkv_and_out = (3 + 1) * h / mp * itemsize
    attention_inputs = h / between * itemsize + h * itemsize
    mlp = h / between * itemsize + h * itemsize + 2 * ffn / mp * itemsize
    masks = 2 * mask * h / between
    kept = {
        None: attention_inputs + qkv_and_out + core + mlp + masks,
        "core_attn": attention_inputs + qkv_and_out + mlp + masks,
        "full_attn": 2 * h / between * itemsize + mlp + masks,
        "full": h / between * itemsize,
    }
    return tokens * kept[recompute]


def activation_bytes(
    shape: ModelShape,
    layers: int,
    tokens: int,
    seq_len: int,
    itemsize: int,
    *,
    in_flight: float = 1,
    holds_head: bool = True,
    recompute: Recompute | None = None,
    mp: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """The peak of one rank: `layers` layers for `in_flight` micro-batches of `tokens` tokens.

    Added to that: with recomputation one layer that is whole again, and at the end of the network
    a chunk of logits with the gradients the loss makes at once.
    """
    cut = (mp, sequence_parallel)
    total = in_flight * layers * layer_bytes(shape, tokens, seq_len, itemsize, recompute, *cut)
    if recompute is not None:
        total += layer_bytes(shape, tokens, seq_len, itemsize, None, *cut)
    if holds_head:
        chunk = min(tokens, shape.loss_chunk_tokens)
        total += chunk * shape.vocab_size / mp * (itemsize + 4)
        total += tokens * shape.hidden_size * itemsize
    return total
