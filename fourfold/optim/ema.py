"""The exponential moving average of the weights, kept in fp32 of what each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fourfold.shards import Shard


class EMA:
    """The average of every parameter of this rank, by key."""

    def __init__(self, shards: Mapping[str, Shard], decay: float) -> None:
        """It begins as the weights are."""
        self.shards = dict(shards)
        self.decay = decay
        self.values = {key: shard.local.clone() for key, shard in shards.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the weights as they are now."""
        for key, shard in self.shards.items():
            self.values[key].copy_(shard.local)

    @torch.no_grad()
    def update(self, updates: int, found_inf: Tensor | None = None) -> None:
        """Take in the weights after `updates` updates; nothing where `found_inf` is one."""
        # Early on the average of few: a run is not to end with a memory of random weights.
        moves = 1 - min(self.decay, (1 + updates) / (10 + updates))
        filled = [key for key, value in self.values.items() if value.numel() > 0]
        averages = [self.values[key] for key in filled]
        weights = [self.shards[key].local for key in filled]
        if found_inf is None:
            torch._foreach_lerp_(averages, weights, moves)
            return
        share = moves * (1 - found_inf)
        for average, weight in zip(averages, weights):
            average.lerp_(weight, share.to(average.dtype))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are the average while this lasts; what was made of them is not."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for key, shard in self.shards.items():
            held = shard.local.clone()
            shard.local.copy_(self.values[key])
            self.values[key].copy_(held)
