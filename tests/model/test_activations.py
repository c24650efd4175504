"""The activation estimate against what torch really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fourfold.model import GPT, ModelShape, initialize
from fourfold.model.activations import layer_bytes
from fourfold.parallel.recompute import apply_recompute

TOKENS, LENGTH = 4 * 128, 128


def kept_by_a_layer(dropout: float, granularity: str | None) -> int:
    """Bytes of distinct storages autograd keeps for one more layer, its weights aside."""

    def kept(layers: int) -> int:
        shape = shape_of(dropout, layers)
        model = GPT(shape)
        initialize(model, seed=0)
        if granularity:
            apply_recompute(model, granularity)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens = torch.zeros(TOKENS // LENGTH, LENGTH, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, tokens)
        return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())

    return kept(3) - kept(2)


def shape_of(dropout: float, layers: int) -> ModelShape:
    return ModelShape(
        vocab_size=64,
        hidden_size=64,
        num_layers=layers,
        num_attention_heads=4,
        ffn_hidden_size=256,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_estimate_of_a_layer(dropout: float) -> None:
    expected = layer_bytes(shape_of(dropout, 1), TOKENS, LENGTH, itemsize=4)
    assert kept_by_a_layer(dropout, None) == pytest.approx(expected, rel=0.15)


def test_recomputation_keeps_less_in_the_order_of_the_estimate() -> None:
    modes = ("full", "full_attn", "core_attn", None)
    shape = shape_of(0.1, 1)
    estimates = [layer_bytes(shape, TOKENS, LENGTH, 4, mode) for mode in modes]
    assert estimates == sorted(estimates) and len(set(estimates)) == 4


def test_ranks_that_share_a_layer_keep_less() -> None:
    shape = shape_of(0.0, 1)
    alone = layer_bytes(shape, TOKENS, LENGTH, 2)
    shared = layer_bytes(shape, TOKENS, LENGTH, 2, mp=4)
    by_sequence = layer_bytes(shape, TOKENS, LENGTH, 2, mp=4, sequence_parallel=True)
    assert alone > shared > by_sequence
