"""How probable a model finds given tokens: the one question all measures here are made of.

Sequences are padded behind their end, where a causal network does not look, so a result does not
depend on what it was batched with. Logits are only made for the tokens that are asked about.

Letters: B sequences, T positions, D hidden, M tokens asked about, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fourfold.generate import Decoder

# Rows of logits held at a time.
LOGIT_ROWS = 512
# Batches made from the questions taken in at a time: the more, the more alike are the lengths
# within each, and the less is padding.
BATCHES_AT_ONCE = 64


@dataclass(frozen=True)
class Question:
    """How probable are the last `asked` tokens, each after all that stand before it?"""

    tokens: Sequence[int] | np.ndarray
    asked: int

    def __post_init__(self) -> None:
        assert 0 <= self.asked < len(self.tokens), (self.asked, len(self.tokens))


@dataclass(frozen=True)
class Answer:
    """One number for each token asked about."""

    logprobs: Tensor  # float64
    is_best: Tensor  # bool: no other token was more probable

    @property
    def total(self) -> float:
        return float(self.logprobs.sum())


class Scorer:
    """Answers questions in batches of similar length; the answers come as they were asked for."""

    def __init__(
        self,
        decoder: Decoder,
        batch_size: int,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._batch_size = batch_size
        self._on_batch = on_batch
        self.max_tokens = decoder.max_positions + 1

    def answer(self, questions: Iterable[Question]) -> Iterator[Answer]:
        """`on_batch` is told the number of batches so far after each."""
        remaining = iter(questions)
        batches = 0
        while taken := list(islice(remaining, self._batch_size * BATCHES_AT_ONCE)):
            # The longest first, so that a batch too large for the memory shows at once.
            order = sorted(range(len(taken)), key=lambda place: -len(taken[place].tokens))
            answers: dict[int, Answer] = {}
            for start in range(0, len(order), self._batch_size):
                places = order[start : start + self._batch_size]
                answers.update(zip(places, self._answer_batch([taken[place] for place in places])))
                batches += 1
                if self._on_batch is not None:
                    self._on_batch(batches)
            yield from (answers[place] for place in range(len(taken)))

    @torch.inference_mode()
    def _answer_batch(self, batch: list[Question]) -> list[Answer]:
        decoder = self._decoder
        lengths = [len(question.tokens) - 1 for question in batch]
        width = max(lengths)
        assert width < self.max_tokens, (width, self.max_tokens)
        padded = torch.zeros(len(batch), width + 1, dtype=torch.int64)
        asked = torch.zeros(len(batch), width, dtype=torch.bool)
        for row, (question, length) in enumerate(zip(batch, lengths)):
            padded[row, : length + 1] = torch.as_tensor(question.tokens)
            asked[row, length - question.asked : length] = True
        padded, asked = padded.to(decoder.device), asked.to(decoder.device)
        x = decoder.model.hidden(padded[:, :-1], None, None, 0)  # (B, T, D)
        logprobs, is_best = self._compare(x[asked], padded[:, 1:][asked])  # (M,) each
        counts = [question.asked for question in batch]
        return [
            Answer(*pair) for pair in zip(logprobs.cpu().split(counts), is_best.cpu().split(counts))
        ]

    def _compare(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, is_best = [], []
        for rows, wanted in zip(x.split(LOGIT_ROWS), labels.split(LOGIT_ROWS)):
            logits = self._decoder.logits(rows)  # (M, V)
            chosen = logits.gather(1, wanted.unsqueeze(1)).squeeze(1)
            logprobs.append((chosen - logits.logsumexp(dim=-1)).double())
            is_best.append(chosen >= logits.amax(dim=-1))
        return torch.cat(logprobs), torch.cat(is_best)
