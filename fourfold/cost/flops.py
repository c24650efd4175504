"""FLOPs: the one place they are defined.

Convention: a multiply-add is two FLOPs; only matrix products count (linear layers, head, the two
products of attention); the backward pass costs twice the forward one. *Model* FLOPs leave out what
recomputation repeats, *hardware* FLOPs include it. Attention counts all T × T pairs unless `causal`
is set, which halves it; with a sliding window of W tokens, W × T pairs, or with `causal` those a
token before the end of the window has not. MFU uses model FLOPs, full attention, as most papers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fourfold.model import ModelShape, table_of

RecomputeMode = Literal["full", "ops", "full_attn", "core_attn"]


class ForwardFlops(NamedTuple):
    """Forward FLOPs of one token: in one layer, and in the head."""

    core: Any  # softmax(q kᵀ) v
    projections: Any  # qkv and out
    mlp: Any
    head: Any

    @property
    def layer(self) -> Any:
        return self.core + self.projections + self.mlp


def forward_flops(
    hidden: Any,
    ffn: Any,
    vocab: Any,
    seq_len: Any,
    *,
    query_share: Any = 1.0,
    kv_share: Any = 1.0,
    mlp_matrices: Any = 2,
    causal: bool = False,
) -> ForwardFlops:
    """The parts; sizes are numbers or arrays of them.

    `query_share` is the width of all heads of queries over that of the stream, `kv_share` the width
    of keys over that of queries (grouped-query attention), and `mlp_matrices` is 3 for gated
    feed-forward blocks: other people's models are planned too.
    """
    return ForwardFlops(
        core=4 * seq_len * hidden * query_share * (0.5 if causal else 1.0),
        projections=4 * hidden**2 * query_share * (1 + kv_share),
        mlp=2 * mlp_matrices * hidden * ffn,
        head=2 * vocab * hidden,
    )


def _forward_flops_of(shape: ModelShape, seq_len: int, causal: bool) -> ForwardFlops:
    """Of a network of ours: every matrix of its table multiplies each token once."""
    matrices = [row for row in table_of(shape).layer() if row.is_matrix]
    by_place = {
        inside: 2 * sum(row.numel for row in matrices if row.in_attention is inside)
        for inside in (True, False)
    }
    width = shape.num_attention_heads * shape.head_size
    return ForwardFlops(
        core=4 * width * _attended(shape, seq_len, causal),
        projections=by_place[True],
        mlp=by_place[False],
        head=2 * shape.vocab_size * shape.hidden_size,
    )


def _attended(shape: ModelShape, seq_len: int, causal: bool) -> float:
    """Tokens that one attends to, over all layers and positions the mean."""
    seen = []
    for layer in range(shape.num_layers):
        window = min(shape.window_of(layer) or seq_len, seq_len)
        seen.append(window - window**2 / (2 * seq_len) if causal else window)
    return sum(seen) / len(seen)


def flops_per_token(
    shape: ModelShape,
    seq_len: int,
    *,
    recompute: RecomputeMode | None = None,
    recomputed_layers: int | None = None,
    keep: Sequence[str] = ("products", "attention"),
    causal: bool = False,
) -> float:
    """Training FLOPs (forward and backward) of one token in a sequence of `seq_len`.

    `recompute` given counts hardware FLOPs: the forward parts that run a second time, in all layers
    or in so many. `ops` repeats what it does not `keep`; that with model parallelism it repeats the
    product of `out` is left out.
    """
    parts = _forward_flops_of(shape, seq_len, causal)
    operations = (0.0 if "products" in keep else parts.projections + parts.mlp) + (
        0.0 if "attention" in keep else parts.core
    )
    repeated = {
        None: 0.0,
        "ops": operations,
        "core_attn": parts.core,
        "full_attn": parts.core + parts.projections,
        "full": parts.layer,
    }
    layers = shape.num_layers
    again = layers if recomputed_layers is None else recomputed_layers
    return 3 * (layers * parts.layer + parts.head) + again * repeated[recompute]


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Of one of Muon's iterations for a matrix: x xT, its square, and their product with x."""
    short, long = sorted((rows, columns))
    return 4 * short**2 * long + 2 * short**3


def megatron_deepspeed_flops_per_token(
    shape: ModelShape, seq_len: int, *, recomputes: bool
) -> float:
    """What the TFLOPs of Megatron-DeepSpeed's log count, for figures to be compared with it.

    All T × T pairs of attention, and all four passes when anything is recomputed. Its head counts
    for three quarters of its three passes where nothing is, which no setting of `flops_per_token`
    reproduces; with four passes and a feed-forward width of 4 h it is that of recompute "full".
    It knows one block, of 12 h² in products; any other, of gates, shared keys and values or heads
    of another width, counts with what it has.
    """
    h, layers = shape.hidden_size, shape.num_layers
    width = shape.num_attention_heads * shape.head_size
    if shape.is_gated or shape.key_value_heads < shape.num_attention_heads or width != h:
        parts = _forward_flops_of(shape, seq_len, causal=False)
        return (4 if recomputes else 3) * (layers * parts.layer + 0.75 * parts.head)
    attention, head = seq_len / (6 * h), shape.vocab_size / (16 * layers * h)
    return 24 * (4 if recomputes else 3) * layers * h**2 * (1 + attention + head)
