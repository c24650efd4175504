"""Log-probabilities of given tokens: the computation behind every measure, and behind echo with
`logprobs` of the server.

Sequences are padded after their end, where a causal network does not look, so a result does not
depend on what it was batched with. Logits are only made for the tokens that are scored.

Letters: B sequences, T positions, D hidden, M scored tokens, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fourfold.generate import Decoder

# Rows of logits in memory at a time.
LOGIT_ROWS = 512
# Batches made from the requests taken in at a time: the more, the more alike are the lengths
# within each, and the less is padding.
BATCHES_AT_ONCE = 64


@dataclass(frozen=True)
class ScoreRequest:
    """A request to score the last `scored` tokens, each after all tokens before it."""

    tokens: Sequence[int] | np.ndarray
    scored: int

    def __post_init__(self) -> None:
        assert 0 <= self.scored < len(self.tokens), (self.scored, len(self.tokens))


@dataclass(frozen=True)
class Score:
    """One row for each scored token."""

    logprobs: Tensor  # (M,) float64
    is_best: Tensor  # (M,) bool: no other token was more probable
    top_ids: Tensor  # (M, K) the most probable tokens there, best first
    top_logprobs: Tensor  # (M, K)

    @property
    def total(self) -> float:
        return float(self.logprobs.sum())


class Scorer:
    """Scores requests in batches of similar length; scores come in the order of the requests.

    `alternatives` is the number of most probable tokens reported beside each scored one. With a
    `vocab_size`, ids beyond it, which pad the model's table, have no part in the probabilities.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch_size: int,
        on_batch: Callable[[int], None] | None = None,
        *,
        alternatives: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._batch_size = batch_size
        self._on_batch = on_batch
        self._alternatives = alternatives
        self._vocab_size = vocab_size
        self.max_tokens = decoder.max_positions + 1

    def score(self, requests: Iterable[ScoreRequest]) -> Iterator[Score]:
        """`on_batch` is called after each batch with the number of batches so far."""
        remaining = iter(requests)
        batches = 0
        while taken := list(islice(remaining, self._batch_size * BATCHES_AT_ONCE)):
            # The longest first, so that a batch too large for the memory shows at once.
            order = sorted(range(len(taken)), key=lambda index: -len(taken[index].tokens))
            starts = range(0, len(order), self._batch_size)
            given = [[taken[i] for i in order[s : s + self._batch_size]] for s in starts]
            scored: list[Score] = []
            for of_batch in self._score_batches(given):
                scored += of_batch
                batches += 1
                if self._on_batch is not None:
                    self._on_batch(batches)
            scores = dict(zip(order, scored, strict=True))
            yield from (scores[index] for index in range(len(taken)))

    def _score_batches(self, batches: list[list[ScoreRequest]]) -> Iterator[list[Score]]:
        return map(self._score_batch, batches)

    @torch.inference_mode()
    def _score_batch(self, batch: list[ScoreRequest]) -> list[Score]:
        decoder = self._decoder
        padded, scored = (one.to(decoder.device) for one in padded_batch(batch, self.max_tokens))
        x = decoder.model.hidden(padded[:, :-1], None, None, 0)  # (B, T, D)
        columns = self._compare(x[scored], padded[:, 1:][scored])
        counts = [request.scored for request in batch]
        return [Score(*parts) for parts in zip(*(column.cpu().split(counts) for column in columns))]

    def _compare(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        """The fields of a `Score` for M rows of hidden values and their labels."""
        chunks = [
            self._compare_rows(*rows) for rows in zip(x.split(LOGIT_ROWS), labels.split(LOGIT_ROWS))
        ]
        return [torch.cat(columns) for columns in zip(*chunks)]

    def _compare_rows(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = self._decoder.logits(x)[:, : self._vocab_size]  # (rows, V)
        normalizer = logits.logsumexp(dim=-1)
        chosen = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
        top, top_ids = logits.topk(min(self._alternatives, logits.shape[1]), dim=-1)
        return (
            (chosen - normalizer).double(),
            chosen >= logits.amax(dim=-1),
            top_ids,
            top - normalizer.unsqueeze(1),
        )


def padded_batch(batch: Sequence[ScoreRequest], max_tokens: int) -> tuple[Tensor, Tensor]:
    """The tokens of requests (B, T + 1), and which of the T after the first are scored."""
    lengths = [len(request.tokens) - 1 for request in batch]
    width = max(lengths)
    assert width < max_tokens, (width, max_tokens)
    padded = torch.zeros(len(batch), width + 1, dtype=torch.int64)
    scored = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (request, length) in enumerate(zip(batch, lengths)):
        padded[row, : length + 1] = torch.as_tensor(request.tokens)
        scored[row, length - request.scored : length] = True
    return padded, scored
