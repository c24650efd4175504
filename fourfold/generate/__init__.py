"""Text out of a model: sampling and greedy search.

`generate` continues one prompt any number of times; `complete_text` does it with text. The model is
any callable from tokens (B, T) to logits (B, T, V), already in evaluation mode. Results depend on
the seed and the prompt alone: each returned sequence draws from a generator of its own, so asking
for more sequences does not change the first ones.

Lengths count new tokens. Where prompt and continuation together exceed the model's positions, the
model sees a window that slides over the last `max_positions` tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.generate import sampling
from fourfold.tokenizer import Tokenizer

Model = Callable[[Tensor], Tensor]

STRATEGIES = ("sampling", "greedy_search")


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: list[int],
    *,
    max_dec_len: int,
    min_dec_len: int = 1,
    top_k: int = 50,
    top_p: float = 1.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    decode_strategy: str = "sampling",
    num_return_sequences: int = 1,
    eos_id: int | None,
    seed: int,
    max_positions: int,
    force_eos: bool = False,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """The new ids of `num_return_sequences` continuations, each with its end of text if reached.

    An empty prompt starts from `eos_id`, the border between documents. `eos_id` = None never ends
    early. With `force_eos` a sequence that reaches `max_dec_len` ends with `eos_id`.
    """
    _check_lengths(max_dec_len, min_dec_len, num_return_sequences, max_positions)
    _check_choice(decode_strategy, top_k, top_p, temperature, repetition_penalty)
    if force_eos and eos_id is None:
        raise UserError("force_eos needs an end-of-text id, and eos_id is None; give one")
    if not prompt_ids:
        if eos_id is None:
            raise UserError(
                "the prompt is empty and eos_id is None, so there is nothing to start from; "
                "give a prompt or an end-of-text id"
            )
        prompt_ids = [eos_id]
    tokens = torch.tensor([prompt_ids] * num_return_sequences, device=device)  # (B, T)
    generators = [_generator(seed, number) for number in range(num_return_sequences)]
    finished = torch.zeros(num_return_sequences, dtype=torch.bool, device=device)  # (B,)
    for new_tokens in range(max_dec_len):
        logits = _last_logits(model, tokens[:, -max_positions:])  # (B, V)
        if eos_id is not None and new_tokens < min_dec_len:
            logits = sampling.forbid_eos(logits, eos_id)
        if repetition_penalty != 1.0:
            logits = sampling.penalise_repetition(logits, tokens, repetition_penalty)
        if eos_id is not None and force_eos and new_tokens == max_dec_len - 1:
            logits = sampling.force_token(logits, eos_id)
        if decode_strategy == "greedy_search":
            chosen = logits.argmax(dim=-1)  # (B,)
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            probabilities = sampling.keep_top_k(probabilities, top_k)
            probabilities = sampling.keep_top_p(probabilities, top_p)
            chosen = sampling.draw(probabilities, _uniforms(generators).to(device))
        if eos_id is not None:
            finished |= chosen == eos_id
        tokens = torch.cat([tokens, chosen.unsqueeze(1)], dim=1)  # (B, T + 1)
        if finished.all():
            break
    # A finished sequence went on while others were not; what follows its end is dropped.
    return [_until(eos_id, row) for row in tokens[:, len(prompt_ids) :].tolist()]


def complete_text(model: Model, tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    """`text` with each of its continuations; `options` are those of `generate`.

    The end-of-text marker is not part of the result, and ids beyond the tokenizer's vocabulary
    (the padding of a model's) are never produced.
    """
    options.setdefault("eos_id", tokenizer.eos_id)

    def without_padding(tokens: Tensor) -> Tensor:
        return model(tokens)[..., : tokenizer.vocab_size]

    continuations = generate(without_padding, tokenizer.encode(text), **options)
    return [text + tokenizer.decode(_without(options["eos_id"], ids)) for ids in continuations]


def _last_logits(model: Model, window: Tensor) -> Tensor:
    logits = model(window)[:, -1].float()  # (B, V)
    if not logits.logsumexp(dim=-1).isfinite().all():
        raise UserError(
            "the model's logits are not finite, so no token can be chosen; the checkpoint is "
            "damaged or its training diverged"
        )
    return logits


def _generator(seed: int, number: int) -> torch.Generator:
    """Unrelated for every (seed, sequence); on the CPU, so that every device draws the same."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _uniforms(generators: list[torch.Generator]) -> Tensor:
    return torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])


def _until(eos_id: int | None, ids: list[int]) -> list[int]:
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids


def _without(eos_id: int | None, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] == eos_id else ids


def _check_lengths(
    max_dec_len: int, min_dec_len: int, num_return_sequences: int, max_positions: int
) -> None:
    if max_dec_len < 0:
        raise UserError(f"max_dec_len={max_dec_len} is negative; give the number of new tokens")
    # The default min_dec_len=1 must not forbid asking for nothing.
    if not 0 <= min_dec_len <= max(max_dec_len, 1):
        raise UserError(
            f"min_dec_len={min_dec_len} does not lie between 0 and max_dec_len={max_dec_len}; "
            "no sequence could satisfy both"
        )
    if num_return_sequences < 1:
        raise UserError(f"num_return_sequences={num_return_sequences}: choose 1 or more")
    if max_positions < 1:
        raise UserError(f"max_positions={max_positions}: a model has at least one position")


def _check_choice(
    decode_strategy: str, top_k: int, top_p: float, temperature: float, repetition_penalty: float
) -> None:
    if decode_strategy not in STRATEGIES:
        known = " or ".join(STRATEGIES)
        what = "not available" if decode_strategy == "beam_search" else "unknown"
        raise UserError(f"decode_strategy={decode_strategy!r} is {what}; choose {known}")
    if top_k < 0:
        raise UserError(f"top_k={top_k} is negative; choose 0 (all tokens) or more")
    if not 0.0 <= top_p <= 1.0:
        raise UserError(f"top_p={top_p} is not a probability; choose a number from 0 to 1")
    # Written so that NaN is refused as well.
    if not 0.0 < temperature < float("inf"):
        raise UserError(
            f"temperature={temperature} cannot divide logits; choose a positive number, "
            "or decode_strategy='greedy_search' for the most probable token"
        )
    if not 0.0 < repetition_penalty < float("inf"):
        raise UserError(f"repetition_penalty={repetition_penalty}: choose a positive number")
