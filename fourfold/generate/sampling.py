"""From the logits of the last position to the next token, in FleetX's order.

    forbid_eos, penalise_repetition, force_token      the processors, on logits
    softmax(logits / temperature)
    keep_top_k, keep_top_p                            filters, on probabilities
    draw

The filters set what they drop to zero and do not renormalise: with both, `top_p` is a share of the
full distribution, not of what `top_k` left. `draw` renormalises. Functions are pure and work on
whole batches; B is the batch, V the vocabulary, T the tokens so far.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forbid_eos(logits: Tensor, eos_id: int) -> Tensor:
    """No end of text: used while a sequence is shorter than its minimum. (B, V) -> (B, V)"""
    logits = logits.clone()
    logits[:, eos_id] = -torch.inf
    return logits


def penalise_repetition(logits: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Logits of all tokens so far, the prompt's too, divided by `penalty` (multiplied if negative).

    A token that occurs often is penalised once. (B, V), (B, T) -> (B, V)
    """
    seen = logits.gather(1, tokens)  # (B, T)
    return logits.scatter(1, tokens, torch.where(seen < 0, seen * penalty, seen / penalty))


def force_token(logits: Tensor, token_id: int) -> Tensor:
    """`token_id` becomes certain. (B, V) -> (B, V)"""
    forced = torch.full_like(logits, -torch.inf)
    forced[:, token_id] = 0.0
    return forced


def keep_top_k(probabilities: Tensor, k: int) -> Tensor:
    """Zero below the `k`-th largest; ties with it stay. `k` = 0 keeps all. (B, V) -> (B, V)"""
    if k == 0:
        return probabilities
    k = min(k, probabilities.shape[-1])
    smallest_kept = probabilities.topk(k, dim=-1).values[:, -1:]  # (B, 1)
    return probabilities.where(probabilities >= smallest_kept, 0.0)


def keep_top_p(probabilities: Tensor, p: float) -> Tensor:
    """The most probable tokens up to and including the one that carries their sum beyond `p`.

    The first is always kept; among equals the lower id goes first. (B, V) -> (B, V)
    """
    if p >= 1.0:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    sum_before = torch.nn.functional.pad(ordered.cumsum(dim=-1)[:, :-1], (1, 0))
    return torch.zeros_like(probabilities).scatter(1, order, ordered.where(sum_before <= p, 0.0))


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row, chosen by one uniform number in [0, 1) per row.

    Inverts the cumulative distribution, so that a row depends on its own number alone, whatever
    stands beside it in the batch. Rows need not sum to one. (B, V), (B,) -> (B,)
    """
    cumulative = probabilities.double().cumsum(dim=-1)  # (B, V)
    targets = uniforms.double().unsqueeze(1) * cumulative[:, -1:]  # (B, 1)
    # The first place where the sum exceeds the target: never one of probability zero.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)
