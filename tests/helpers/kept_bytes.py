"""What a forward pass keeps for its backward pass, counted storage by storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from fourfold.model import ModelShape
from fourfold.parallel import recompute

LENGTH = 128


def shape_of(layers: int, dropout: float) -> ModelShape:
    """Small, and with the dimensions of GPT's in their usual ratios."""
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


def kept_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Bytes of distinct storages autograd keeps of one batch, the weights and their casts aside."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    shapes = {p.shape for p in model.parameters()} | {p.t().shape for p in _matrices(model)}
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        block = tensor.untyped_storage()._cdata  # which tensors without memory have too
        if block not in weights and tensor.shape not in shapes:
            seen[block] = tensor  # held, so that its memory is nobody else's
        return tensor

    real = recompute.saved_tensors_hooks

    def inner(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Of nested hooks autograd calls the innermost alone."""

        def packed(tensor: Tensor) -> Any:
            kept = pack(tensor)
            return keep(kept) if isinstance(kept, Tensor) else kept

        return real(packed, unpack)

    with patch.object(recompute, "saved_tensors_hooks", inner), real(keep, lambda tensor: tensor):
        loss = model(tokens, tokens)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
    del loss
    return kept


def _matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() == 2]
