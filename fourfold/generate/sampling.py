"""Sampling: from the logits of the last position to the next token, in FleetX's order.

    forbid_eos, penalise_repetition, force_token      the processors, on logits
    softmax(logits / temperature)
    keep_top_k, keep_top_p                            filters, on probabilities
    draw

`choose` is all of that but the processors, for rows with rules of their own; where it is compiled
(fourfold/native/sample.c) that is used. The filters drop tokens and do not renormalise: with both,
`top_p` is a share of the full distribution, not of what `top_k` left. `draw` renormalises.
Functions are pure and work on whole batches; B is the batch, V the vocabulary, T the tokens so far,
C the candidates left.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fourfold import native
from fourfold.errors import UserError

# With top_p alone the most probable tokens are looked at first, and mostly suffice.
FIRST_LOOK = 1024


# top_k, top_p, temperature; a temperature of 0 takes the largest logit.
Rule = tuple[int, float, float]
GREEDY: Rule = (0, 1.0, 0.0)


def choose(logits: Tensor, rules: Sequence[Rule], uniforms: Sequence[float]) -> list[int]:
    """One token per row of logits (B, V), each by its rule and its uniform number in [0, 1); -1
    where the logits are not finite."""
    library = native.library("sample") if logits.device.type == "cpu" else None
    if library is None or logits.dtype != torch.float32 or logits.stride(-1) != 1:
        return _choose_by_torch(logits, rules, uniforms)
    rows, size = logits.shape
    threads, int64 = torch.get_num_threads(), ctypes.c_int64
    library.choose_scratch_bytes.restype = int64
    needed = library.choose_scratch_bytes(int64(size), int64(min(threads, rows)))
    scratch = getattr(_kept, "scratch", None)
    if scratch is None or len(scratch) < needed:
        # Kept, since fresh memory of this size costs more than the choice itself.
        scratch = _kept.scratch = torch.empty(needed, dtype=torch.uint8)
    given = (_RuleStruct * rows)(*(_RuleStruct(*one, u) for one, u in zip(rules, uniforms)))
    chosen = (int64 * rows)()
    library.choose(
        ctypes.c_void_p(logits.data_ptr()),
        *map(int64, (rows, logits.stride(0), size)),
        given,
        chosen,
        ctypes.c_void_p(scratch.data_ptr()),
        int64(threads),
    )
    return list(chosen)


_kept = threading.local()


class _RuleStruct(ctypes.Structure):
    _fields_ = [
        ("top_k", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("top_p", "temperature", "uniform")),
    ]


def _choose_by_torch(logits: Tensor, rules: Sequence[Rule], uniforms: Sequence[float]) -> list[int]:
    chosen = [0] * len(rules)
    # Rows with the same rule are sampled together.
    numbered = sorted(enumerate(rules), key=lambda pair: pair[1])
    for rule, members in groupby(numbered, key=lambda pair: pair[1]):
        rows = [row for row, _ in members]
        part = logits if len(rows) == len(rules) else logits[rows]
        if rule[-1] == 0.0:
            ids = part.argmax(dim=-1)
        else:
            drawn = torch.tensor([uniforms[row] for row in rows], dtype=torch.float64)
            top_k, top_p, temperature = rule
            ids = sample(part, top_k, top_p, temperature, drawn.to(part.device))
        ids = ids.where(part.amax(dim=-1).isfinite(), -1)
        for row, token_id in zip(rows, ids.tolist()):
            chosen[row] = token_id
    return chosen


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
    """Make `token_id` certain. (B, V) -> (B, V)"""
    forced = torch.full_like(logits, -torch.inf)
    forced[:, token_id] = 0.0
    return forced


def keep_top_k(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest and their ties, in the order of their ids. (B, V) -> (B, C) and ids (B, C)

    Rows with fewer than others are filled up with zeros.
    """
    vocabulary = probabilities.shape[-1]
    k = min(k, vocabulary)
    # One more than requested shows whether there are ties.
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
    """Nucleus sampling: the most probable tokens, up to the one that takes their sum beyond `p`.

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
    else is in the batch. Rows need not sum to one. (B, V), (B,) -> (B,)
    """
    cumulative = probabilities.double().cumsum(dim=-1)  # (B, V)
    targets = uniforms.double().unsqueeze(1) * cumulative[:, -1:]  # (B, 1)
    # The first place where the sum exceeds the target: never one of probability zero.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


# -- the keys of the `Generation` section ---------------------------------------------------------


# Below these, dividing logits leaves the range of float32.
LEAST_TEMPERATURE, LEAST_PENALTY = 1e-3, 1e-2

STRATEGIES = ("sampling", "greedy_search", "beam_search")


@dataclass(frozen=True)
class Options:
    """Lengths count new tokens. `alternatives` requests the log-probability of each token and of
    that many of the most probable ones."""

    max_dec_len: int = 16
    min_dec_len: int = 1
    decode_strategy: str = "sampling"
    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    num_beams: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    force_eos: bool = False
    seed: int = 0
    alternatives: int | None = None

    @classmethod
    def of(cls, section: Any, default_seed: int) -> Options:
        """Those a `Generation` section describes.

        Beam search accepts the defaults of the sampling keys there, but not values that were
        written down.
        """
        given = {name: getattr(section, name) for name in _KEYS}
        if section.decode_strategy == "beam_search":
            for name, neutral in _SAMPLING.items():
                if name not in section.model_fields_set:
                    given[name] = neutral
        else:
            given["num_beams"] = 0
        return cls(**given, seed=default_seed if section.seed is None else section.seed)

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_choice()
        if self.decode_strategy == "beam_search":
            self._check_beams()
        elif self.num_beams > 1:
            raise UserError(
                f"num_beams={self.num_beams} does not go with "
                f"decode_strategy={self.decode_strategy!r}, which follows one text at a time; "
                "choose beam_search, or leave num_beams out"
            )
        if self.alternatives is not None and self.alternatives < 0:
            raise UserError(f"alternatives={self.alternatives} is negative; choose 0 or more")

    def _check_lengths(self) -> None:
        if self.max_dec_len < 1:
            raise UserError(
                f"max_dec_len={self.max_dec_len}: choose the most tokens to write, 1 or more"
            )
        if not 0 <= self.min_dec_len <= self.max_dec_len:
            raise UserError(
                f"min_dec_len={self.min_dec_len} does not lie between 0 and "
                f"max_dec_len={self.max_dec_len}; no text could satisfy both"
            )
        if self.num_return_sequences < 1:
            raise UserError(f"num_return_sequences={self.num_return_sequences}: choose 1 or more")

    def _check_choice(self) -> None:
        if self.decode_strategy not in STRATEGIES:
            raise UserError(
                f"decode_strategy={self.decode_strategy!r} is unknown; choose "
                f"{', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}"
            )
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} is negative; choose 0 (all tokens) or more")
        # Written so that NaN is refused as well.
        if not 0.0 <= self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} is not a probability; choose 0 to 1")
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(
                f"temperature={self.temperature} cannot divide logits; choose at least "
                f"{LEAST_TEMPERATURE}, or decode_strategy='greedy_search' for the most probable "
                "token"
            )
        if not LEAST_PENALTY <= self.repetition_penalty < math.inf:
            raise UserError(
                f"repetition_penalty={self.repetition_penalty}: choose at least {LEAST_PENALTY}"
            )

    def _check_beams(self) -> None:
        if self.num_beams < self.num_return_sequences:
            raise UserError(
                f"num_beams={self.num_beams} is too few for beam_search with "
                f"num_return_sequences={self.num_return_sequences}; choose at least "
                f"{self.num_return_sequences}"
            )
        if not math.isfinite(self.length_penalty):
            raise UserError(f"length_penalty={self.length_penalty}: choose a finite number")
        if self.alternatives is not None:
            raise UserError(
                "alternatives belong to single tokens, and beam_search compares whole texts; "
                "choose sampling or greedy_search for them"
            )
        for name, neutral in _SAMPLING.items():
            if getattr(self, name) != neutral:
                raise UserError(
                    f"{name}={getattr(self, name)} does not go with decode_strategy='beam_search', "
                    f"which draws nothing; set {name}={neutral}, or choose sampling"
                )


def without_effect(section: Any) -> list[str]:
    """Keys set in a `Generation` section that its strategy ignores."""
    idle: list[str] = []
    if section.decode_strategy != "beam_search":
        idle += _BEAMS
    if section.decode_strategy == "greedy_search":
        idle += _SAMPLING
    neutral = {"num_beams": (0, 1)}  # one beam is what any other strategy is
    defaults = {name: (field.default,) for name, field in type(section).model_fields.items()}
    allowed = defaults | neutral
    return [name for name in idle if getattr(section, name) not in allowed[name]]


_SAMPLING = {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
_BEAMS = ("num_beams", "length_penalty", "early_stopping")
_KEYS = (
    *("max_dec_len", "min_dec_len", "decode_strategy", "top_k", "top_p", "temperature"),
    *("repetition_penalty", "num_return_sequences", "num_beams", "length_penalty"),
    "early_stopping",
)
