"""How a text is continued: the keys of the `Generation` section, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError

# Below these, dividing logits leaves the range of float32.
LEAST_TEMPERATURE, LEAST_PENALTY = 1e-3, 1e-2

STRATEGIES = ("sampling", "greedy_search", "beam_search")


@dataclass(frozen=True)
class Options:
    """Lengths count new tokens. `alternatives` asks for the log-probability of each token
    and of that many of the most probable ones."""

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

        The sampling keys have defaults of their own there, which beam search does not object to;
        what was written down is another matter.
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
    """Keys a `Generation` section was given and that its strategy does not look at."""
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
