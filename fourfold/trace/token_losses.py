"""The loss of every token of a step, as training computes it.

Training adds token losses up as it makes them, and never holds the logits (`fourfold.model.loss`).
`TokenLosses` stands between the head and its loss: it passes everything on and keeps the losses of
the step under way, four bytes a token, on the ranks on which the network ends. With `logits` it
also keeps the smallest and the largest logit of each micro-batch, which is another pass over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fourfold.data import Batch
from fourfold.model.gpt import GPT
from fourfold.model.loss import Vocabulary
from fourfold.parallel import Runner
from fourfold.trace.modules import MicroBatches


class WatchedVocabulary(Vocabulary):
    """Another's losses, kept as they pass."""

    def __init__(self, watched: Vocabulary, losses: TokenLosses) -> None:
        super().__init__(watched.softcap, watched.z_loss)
        self.watched = watched
        self.losses = losses

    def cap(self, logits: Tensor) -> Tensor:
        return self.watched.cap(logits)

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, weights: Tensor, trains: bool
    ) -> tuple[Tensor, Tensor]:
        self.losses.see_logits(logits)  # before they are overwritten
        made = self.watched.cross_entropy(logits, labels, weights, trains)
        self.losses.see_losses(made[0])
        return made


@dataclass
class StepLosses:
    """Of one step on one rank."""

    step: int
    parts: dict[int, list[Tensor]] = field(default_factory=dict)  # by micro-batch, in chunks
    logits: dict[int, list[Tensor]] = field(default_factory=dict)  # the same: least and largest


class TokenLosses:
    """Watches the steps of a runner; keeps the last `steps` of them.

    On a GPU the host learns a step late what a step came to, so there two are needed.
    """

    def __init__(self, runner: Runner, *, steps: int = 1, logits: bool = False) -> None:
        self.runner = runner
        self.kept: list[StepLosses] = []
        self._most = steps
        self._wants_logits = logits
        self._micro_batches = MicroBatches(runner)
        self._ends: list[GPT] = [part for part in runner.parts if part.is_last]
        self._handles: list[Any] = []

    def attach(self) -> None:
        for part in self.runner.parts:
            see = self._micro_batches.see
            self._handles.append(part.register_forward_pre_hook(see, with_kwargs=True))
        for part in self._ends:
            part.head.vocabulary = WatchedVocabulary(part.head.vocabulary, self)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for part in self._ends:
            if isinstance(part.head.vocabulary, WatchedVocabulary):
                part.head.vocabulary = part.head.vocabulary.watched

    @contextmanager
    def attached(self) -> Iterator[TokenLosses]:
        self.attach()
        try:
            yield self
        finally:
            self.detach()

    def begin(self, step: int, batch: Batch) -> None:
        """Before `Runner.run` of that step."""
        self._micro_batches.begin(step, len(batch.tokens))
        self.kept = [*self.kept, StepLosses(step)][-self._most :]

    def see_losses(self, losses: Tensor) -> None:
        number = self._micro_batches.current
        if number >= 0 and self.kept and torch.is_tensor(losses):
            self.kept[-1].parts.setdefault(number, []).append(losses.detach())

    def see_logits(self, logits: Tensor) -> None:
        number = self._micro_batches.current
        if self._wants_logits and number >= 0 and self.kept and logits.numel():
            ends = torch.stack(logits.detach().aminmax()).float()
            self.kept[-1].logits.setdefault(number, []).append(ends)

    def of_step(self, step: int) -> StepLosses | None:
        return next((one for one in self.kept if one.step == step), None)

    def table(self, step: int, seq_len: int) -> Tensor | None:
        """(rows of this rank, seq_len) on the host; None where the network does not end here."""
        kept = self.of_step(step)
        if kept is None or not kept.parts:
            return None
        rows = [torch.cat(kept.parts[number]).view(-1, seq_len) for number in sorted(kept.parts)]
        return torch.cat(rows).double().cpu()

    def logit_range(self, step: int) -> tuple[float, float] | None:
        """The smallest and the largest logit here."""
        kept = self.of_step(step)
        if kept is None or not kept.logits:
            return None
        ends = torch.stack([one for chunks in kept.logits.values() for one in chunks])
        return float(ends[:, 0].min()), float(ends[:, 1].max())
