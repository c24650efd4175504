"""Head and cross-entropy in one, in chunks of tokens: the full logits never exist.

The loss is a *sum* over tokens times a scale the caller chooses (one over the number of valid
tokens of the global batch, times the loss scale in fp16). One rule for every way of cutting a
batch: gradient accumulation, data parallelism and masks agree by construction.

Letters: N tokens, D hidden, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def head_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    scale: float | Tensor,
    chunk_tokens: int,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """`scale` · Σ mask · −log softmax(hidden · headᵀ)[label], as a scalar in fp32 or wider."""
    dtype = compute_dtype(hidden.device, head.dtype)
    weights = loss_mask.to(_wide(dtype)) * scale  # (N,)
    vocabulary = vocabulary or Vocabulary()
    # Asked here, for inside the function gradients are always off.
    trains = torch.is_grad_enabled()
    return _HeadCrossEntropy.apply(
        hidden, head, labels, weights, chunk_tokens, dtype, vocabulary, trains
    )


def compute_dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """The dtype a linear layer computes in: autocast's where that is on."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return otherwise


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over the vocabulary."""
    return dtype if dtype == torch.float64 else torch.float32


class Vocabulary:
    """How logits become probabilities if the head is whole.

    If each process holds some rows of the head, another class with this method takes its place.
    """

    def normalize(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn logits (C, V) into probabilities, in place, for targets (C, 1).

        Returns the token losses (C, 1) as well, and what to subtract from the probabilities at
        `target` for the gradient: 1, or 0 where the target's row is not here.
        """
        target_logit = logits.gather(1, target)
        largest, where = logits.max(dim=1, keepdim=True)
        probabilities = torch.softmax(logits, dim=1, out=logits)
        # The largest probability is at least 1/V, so its logarithm is exact enough to give
        # back the normaliser; that of the target may have underflowed.
        logsumexp = largest - probabilities.gather(1, where).log()
        return logsumexp - target_logit, target, torch.ones_like(target_logit)


class _HeadCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's probabilities are available.

    That saves a second product with the head, and keeps (N, D) + (V, D) numbers for the
    backward pass where plain autograd would keep (N, V) several times over.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, D)
        head: Tensor,  # (V, D)
        labels: Tensor,  # (N,)
        weights: Tensor,  # (N,) mask times scale
        chunk_tokens: int,
        dtype: torch.dtype,
        vocabulary: Vocabulary,
        trains: bool,
    ) -> Tensor:
        # A parameter counts as needing a gradient even where none will be requested.
        wants_hidden, wants_head = (trains and needed for needed in ctx.needs_input_grad[:2])
        low_head, wide = head.to(dtype), _wide(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = torch.zeros_like(head, dtype=wide) if wants_head else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)

        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            low_hidden = hidden[chunk].to(dtype)  # (C, D)
            weight = weights[chunk].unsqueeze(1)  # (C, 1)
            # In place: these are the largest tensors of the step and every pass over them counts.
            probabilities = (low_hidden @ low_head.t()).to(wide)  # (C, V), logits until normalized
            losses, target, here = vocabulary.normalize(probabilities, labels[chunk].unsqueeze(1))
            loss += torch.sum(losses * weight)
            if not (wants_hidden or wants_head):
                continue
            # d loss / d logits = weight · (softmax − one-hot)
            grad = probabilities.mul_(weight).scatter_add_(1, target, -weight * here).to(dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ low_head
            if grad_head is not None:
                if dtype == wide:
                    grad_head.addmm_(grad.t(), low_hidden)
                else:
                    grad_head += grad.t() @ low_hidden

        # Not `save_for_backward`: these are ours alone, and changed in place by the backward pass.
        ctx.gradients = [grad_hidden, grad_head]
        ctx.dtypes = [hidden.dtype, head.dtype]
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # A pipeline schedule that splits the backward pass comes here twice with one upstream.
        if not hasattr(ctx, "multiplied"):
            for gradient in ctx.gradients:
                if gradient is not None:
                    gradient.mul_(upstream.to(gradient.dtype))
            ctx.multiplied = True
        grad_hidden, grad_head = (
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes)
        )
        return grad_hidden, grad_head, None, None, None, None, None, None
