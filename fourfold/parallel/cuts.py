"""Where model parallelism cuts each parameter: a table by name, and nothing else needs to know.

Initial weights, checkpoints and the gradient norm all read it here.
"""

from __future__ import annotations

from fourfold.model.names import is_norm

# Ends of parameter names -> the dimension that is cut over the model-parallel ranks.
SPLIT_DIMS = {
    "embeddings.word.weight": 0,
    "attn.qkv.weight": 0,
    "attn.qkv.bias": 0,
    "attn.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
}


def split_dim(name: str) -> int | None:
    """Which dimension of the parameter is cut; None if every rank holds all of it."""
    return next((dim for end, dim in SPLIT_DIMS.items() if name.endswith(end)), None)


def own_range(size: int, rank: int, degree: int) -> tuple[int, int]:
    """The piece [start, stop) of `size` rows that `rank` holds; the first ones are the longer."""
    short, longer = divmod(size, degree)
    start = rank * short + min(rank, longer)
    return start, start + short + (rank < longer)


def has_partial_gradient(name: str, by_sequence: bool) -> bool:
    """Whether each rank's gradient is only of its own positions and must be summed.

    With sequence parallelism that is so for whatever is applied between the blocks.
    """
    between = is_norm(name) or name.endswith(("attn.out.bias", "mlp.down.bias"))
    return by_sequence and (between or name.endswith("embeddings.position.weight"))
