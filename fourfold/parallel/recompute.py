"""Recomputation: keep less of the forward pass, compute it again in the backward pass.

`full` keeps only each layer's input, `full_attn` drops what attention (qkv, core, out) keeps,
`core_attn` only what softmax(q kᵀ) v keeps. Memory falls in the reverse order.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.model.gpt import GPT, Attention, Block, CoreAttention

WRAPPED = {"full": Block, "full_attn": Attention, "core_attn": CoreAttention}


def apply_recompute(model: GPT, granularity: str) -> None:
    """Replace the forward of every module of the chosen kind; parameter names stay as they are."""
    for module in model.modules():
        if isinstance(module, WRAPPED[granularity]):
            _recompute(module)


def _recompute(module: nn.Module) -> None:
    forward = module.forward

    # A function and not a `partial`, of which the compiler would make a graph of its own for every
    # layer, and none after the eighth.
    def recomputed(*given: Any) -> Any:
        # The generator's state is kept and restored, so a repeated dropout drops the same numbers.
        return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=True)

    module.forward = recomputed
