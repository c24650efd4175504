"""Head and cross-entropy in one, in chunks of tokens: the full logits never exist.

The loss is a *sum* over tokens times a scale the caller chooses (one over the number of valid
tokens of the global batch, times the loss scale in fp16). One rule for every way of cutting a
batch: micro-batches, accumulation, data parallelism and masks agree by construction.

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
) -> Tensor:
    """`scale` · Σ mask · −log softmax(hidden · headᵀ)[label], as an fp32 scalar."""
    dtype = compute_dtype(hidden.device, head.dtype)
    weights = loss_mask.float() * scale  # (N,)
    return _HeadCrossEntropy.apply(hidden, head, labels, weights, chunk_tokens, dtype)


def compute_dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """What a linear layer here computes in: autocast's type where that is on."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return otherwise


class _HeadCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's probabilities are at hand.

    That costs no second product with the head, and keeps (N, D) + (V, D) numbers for the
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
    ) -> Tensor:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        low_head = head.to(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if wants_head else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)

        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            low_hidden = hidden[chunk].to(dtype)  # (C, D)
            logits = (low_hidden @ low_head.t()).float()  # (C, V)
            target = labels[chunk].unsqueeze(1)  # (C, 1)
            weight = weights[chunk].unsqueeze(1)  # (C, 1)
            target_logit = logits.gather(1, target)
            largest, where = logits.max(dim=1, keepdim=True)
            # In place: these are the largest tensors of the step and every pass over them counts.
            probabilities = torch.softmax(logits, dim=1, out=logits)
            # The largest probability is at least 1/V, so its logarithm is exact enough to give
            # back the normaliser; that of the target may have underflowed.
            logsumexp = largest - probabilities.gather(1, where).log()
            loss += torch.sum((logsumexp - target_logit) * weight)
            if not (wants_hidden or wants_head):
                continue
            # d loss / d logits = weight · (softmax − one-hot)
            grad = probabilities.mul_(weight).scatter_add_(1, target, -weight).to(dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ low_head
            if grad_head is not None:
                if dtype == torch.float32:
                    grad_head.addmm_(grad.t(), low_hidden)
                else:
                    grad_head += grad.t() @ low_hidden

        ctx.head_dtype = head.dtype
        ctx.save_for_backward(grad_hidden, grad_head)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * upstream.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = grad_head.mul_(upstream).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None, None
