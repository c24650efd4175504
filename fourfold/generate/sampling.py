"""From the logits of the last position to the next token, in FleetX's order.

    forbid_eos, penalise_repetition, force_token      the processors, on logits
    softmax(logits / temperature)
    keep_top_k, keep_top_p                            filters, on probabilities
    draw

The filters drop tokens and do not renormalise: with both, `top_p` is a share of the full
distribution, not of what `top_k` left. `draw` renormalises. Functions are pure and work on whole
batches; B is the batch, V the vocabulary, T the tokens so far, C the candidates left.
"""

from __future__ import annotations

import torch
from torch import Tensor

# With top_p alone the most probable tokens are looked at first, and mostly suffice.
FIRST_LOOK = 1024


def sample(
    logits: Tensor, top_k: int, top_p: float, temperature: float, uniforms: Tensor
) -> Tensor:
    """One token per row by one uniform number in [0, 1) per row. (B, V), (B,) -> (B,)"""
    if temperature != 1.0:
        logits = logits / temperature
    probabilities = torch.softmax(logits, dim=-1)
    if top_k > 0:
        probabilities, ids = keep_top_k(probabilities, top_k)
    elif top_p < 1.0:
        probabilities, ids = likely_enough(probabilities, top_p)
    else:
        return draw(probabilities, uniforms)
    chosen = draw(keep_top_p(probabilities, top_p), uniforms)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


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


def keep_top_k(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest and their ties, in the order of their ids. (B, V) -> (B, C) and ids (B, C)

    Rows with fewer than others are filled up with zeros.
    """
    vocabulary = probabilities.shape[-1]
    k = min(k, vocabulary)
    # One more than asked for shows whether there are ties.
    largest, ids = probabilities.topk(min(k + 1, vocabulary), dim=-1)
    smallest_kept = largest[:, k - 1 : k]  # (B, 1)
    if bool((largest[:, k:] == smallest_kept).any()):
        most = int((probabilities >= smallest_kept).sum(dim=-1).max())
        largest, ids = probabilities.topk(most, dim=-1)
    largest = largest.where(largest >= smallest_kept, 0.0)
    return _by_id(largest, ids)


def likely_enough(probabilities: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Candidates that hold all `keep_top_p` would keep: few where those reach `p`, else all."""
    vocabulary = probabilities.shape[-1]
    if vocabulary > FIRST_LOOK:
        largest, ids = probabilities.topk(FIRST_LOOK, dim=-1)
        # Of tokens equal to the last one some may be missing, so they do not count.
        certain = largest.where(largest > largest[:, -1:], 0.0).sum(dim=-1)
        if bool((certain > p).all()):
            return _by_id(largest, ids)
    return probabilities, torch.arange(vocabulary, device=probabilities.device).expand_as(
        probabilities
    )


def _by_id(probabilities: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    ids, order = ids.sort(dim=-1)
    return probabilities.gather(1, order), ids


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
