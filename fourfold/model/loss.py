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

from fourfold.model import kernels


def head_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    scale: float | Tensor,
    chunk_tokens: int | None = None,
    vocabulary: Vocabulary | None = None,
    tied: TiedGradient | None = None,
) -> Tensor:
    """`scale` · Σ mask · −log softmax(hidden · headᵀ)[label], as a scalar in fp32 or wider."""
    dtype = compute_dtype(hidden.device, head.dtype)
    weights = loss_mask.to(_wide(dtype)) * scale  # (N,)
    vocabulary = vocabulary or Vocabulary()
    chunk_tokens = chunk_tokens or default_chunk_tokens(
        on_cpu=hidden.is_cpu, low=dtype.itemsize < 4
    )
    # Asked here, for inside the function gradients are always off.
    trains = torch.is_grad_enabled()
    return _HeadCrossEntropy.apply(
        hidden, head, labels, weights, chunk_tokens, dtype, vocabulary, trains, tied
    )


def default_chunk_tokens(*, on_cpu: bool, low: bool) -> int:
    """Large enough that adding a chunk's gradient to the head's, a pass over (V, D) in fp32, costs
    little beside its products: a GPU makes the products faster, by more than it has faster memory.
    Products of `low` precision are faster too, and cannot add up in fp32 as they go.
    """
    if on_cpu:
        return 1024 if low else 512
    return 4096


def compute_dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """The dtype a linear layer computes in: autocast's where that is on."""
    # Torch knows of no autocast on the device without memory.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return otherwise


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over the vocabulary."""
    return dtype if dtype == torch.float64 else torch.float32


class Vocabulary:
    """How logits become losses and gradients if the head is whole.

    If each process holds some rows of the head, another class with these methods takes its place.
    """

    def __init__(self, softcap: float | None = None, z_loss: float = 0.0) -> None:
        self.softcap = softcap
        self.z_loss = z_loss

    def cap(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, weights: Tensor, trains: bool
    ) -> tuple[Tensor, Tensor]:
        """Token losses (C,) of logits (C, V), and if `trains` the gradient of their weighted sum,
        weight · (softmax − one-hot), in the memory of the logits where it can be."""
        if kernels.usable(logits.device, logits.dtype) and self.softcap is None and not self.z_loss:
            return kernels.cross_entropy_(logits, labels, weights, trains), logits
        return self._by_passes(logits, labels, weights.unsqueeze(1), trains)

    def _by_passes(
        self, logits: Tensor, labels: Tensor, weight: Tensor, trains: bool
    ) -> tuple[Tensor, Tensor]:
        # In place: these are the largest tensors of the step and every pass over them counts.
        probabilities = logits.to(weight.dtype)
        slope: Tensor | None = None
        if self.softcap is not None:
            probabilities = (probabilities / self.softcap).tanh_()
            slope = 1 - probabilities.square() if trains else None
            probabilities.mul_(self.softcap)
        normalizer, target_logit, target, here = self.normalize(probabilities, labels.unsqueeze(1))
        losses = normalizer - target_logit
        if trains:
            factor = weight
            if self.z_loss:
                losses = losses + self.z_loss * normalizer.square()
                factor = weight * (1 + 2 * self.z_loss * normalizer)
            probabilities.mul_(factor).scatter_add_(1, target, -weight * here)
            if slope is not None:
                probabilities.mul_(slope)
        return losses.squeeze(1), probabilities.to(logits.dtype)

    def normalize(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Turn logits (C, V) into probabilities, in place, for targets (C, 1).

        Returns the logarithm of the softmax's denominator and the logit of the target, (C, 1) each,
        whose difference is the token's loss; then the target's place, and what to subtract from the
        probability there for the gradient: 1, or 0 where the target's row is not here.
        """
        target_logit = logits.gather(1, target)
        largest, where = logits.max(dim=1, keepdim=True)
        probabilities = torch.softmax(logits, dim=1, out=logits)
        # The largest probability is at least 1/V, so its logarithm is exact enough to give
        # back the normaliser; that of the target may have underflowed.
        logsumexp = largest - probabilities.gather(1, where).log()
        return logsumexp, target_logit, target, torch.ones_like(target_logit)


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
        tied: TiedGradient | None,
    ) -> Tensor:
        # A parameter counts as needing a gradient even where none will be requested.
        wants_hidden, wants_head = (trains and needed for needed in ctx.needs_input_grad[:2])
        low_head, wide = head.to(dtype), _wide(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head: Tensor | None = None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        tokens, words = hidden.shape[0], head.shape[0]
        logits = hidden.new_empty(min(chunk_tokens, tokens), words, dtype=dtype)

        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            low_hidden, weight = hidden[chunk].to(dtype), weights[chunk]  # (C, D), (C,)
            made = torch.mm(low_hidden, low_head.t(), out=logits[: len(weight)])  # (C, V)
            losses, grad = vocabulary.cross_entropy(
                made, labels[chunk], weight, wants_hidden or wants_head
            )
            loss += torch.sum(losses * weight)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ low_head
            if not wants_head:
                continue
            if grad_head is None:
                grad_head = (grad.t() @ low_hidden).to(wide)
            elif dtype == wide:
                grad_head.addmm_(grad.t(), low_hidden)
            else:
                grad_head += grad.t() @ low_hidden

        # Not `save_for_backward`: these are ours alone, and changed in place by the backward pass.
        ctx.gradients = [grad_hidden, grad_head]
        ctx.dtypes = [hidden.dtype, head.dtype]
        ctx.tied = tied
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # A pipeline schedule that splits the backward pass comes here twice with one upstream.
        if not hasattr(ctx, "multiplied"):
            for gradient in ctx.gradients:
                if gradient is not None:
                    gradient.mul_(upstream.to(gradient.dtype))
            ctx.multiplied = True
        if ctx.tied is not None:
            ctx.tied.gradient, ctx.gradients[1] = ctx.gradients[1], None
        grad_hidden, grad_head = (
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes)
        )
        return grad_hidden, grad_head, *[None] * 7


class TiedGradient:
    """The head's gradient of a weight that is also the word embedding, on its way to the lookup.

    The lookup's backward pass, which comes last, adds its rows and returns the sum. Otherwise it
    would fill a second table of that size with zeros, and a third would hold the sum.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def look_up(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """F.embedding of tokens (B, T) in the head's own weight (V, D)."""
        return _TiedLookup.apply(tokens, weight, self)


class _TiedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, tied: TiedGradient) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.tied, ctx.shape, ctx.dtype = tied, weight.shape, weight.dtype
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        table, ctx.tied.gradient = ctx.tied.gradient, None
        if table is None:  # the head gave logits, and autograd has its gradient
            table = gradient.new_zeros(ctx.shape, dtype=_wide(gradient.dtype))
        rows = gradient.flatten(0, 1).to(table.dtype)
        return None, table.index_add_(0, tokens.flatten(), rows).to(ctx.dtype), None
