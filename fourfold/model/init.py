"""Initial weights as a function of (seed, parameter name), so every layout starts the same.

Matrices are drawn in blocks of rows, each block from its own generator: a rank that holds a
slice of the rows draws just the blocks it needs and gets the very numbers one device would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold import heartbeat
from fourfold.model.gpt import GPT
from fourfold.model.params import Param, ParamTable
from fourfold.model.seeds import mix_seed
from fourfold.shards import Shard

ROWS_PER_BLOCK = 256


def initialize(model: GPT, seed: int) -> None:
    """Fill every parameter in place: normal matrices, zero biases, unit norm weights."""
    whole = {name: Shard.whole(parameter.data) for name, parameter in model.named_parameters()}
    initialize_shards(model.table, whole, seed)


def initialize_shards(table: ParamTable, shards: Mapping[str, Shard], seed: int) -> None:
    """The same for shards of parameters, by the name of the whole."""
    blocks: list[RowBlock] = []
    with torch.no_grad():
        for name, shard in shards.items():
            row = table[name]
            if row.init == "normal":
                blocks += _blocks(name, row, shard)
            else:
                shard.local.fill_(0.0 if row.init == "zeros" else 1.0)
        # Each block is independent and torch draws outside the interpreter lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(lambda block: block.fill(seed), blocks):
                heartbeat.alive()


@dataclass(frozen=True)
class RowBlock:
    """Rows of a shard that are drawn by one generator."""

    name: str
    row: Param
    start: int  # of the rows of the whole that the generator draws
    skip: int  # how many of them are another rank's
    rows: Tensor
    column: int  # where in the whole they begin

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        drawn = draw_block(self.name, self.row, self.start, seed=seed)
        size, width = self.rows.shape
        columns = slice(self.column, self.column + width)
        self.rows.copy_(drawn[self.skip : self.skip + size, columns])


def _blocks(name: str, row: Param, shard: Shard) -> Iterator[RowBlock]:
    first_row, first_column = shard.offsets
    stop = first_row + shard.local.shape[0]
    for start in range(first_row // ROWS_PER_BLOCK * ROWS_PER_BLOCK, stop, ROWS_PER_BLOCK):
        first = max(start, first_row)
        last = min(start + ROWS_PER_BLOCK, stop)
        rows = shard.local[first - first_row : last - first_row]
        yield RowBlock(name, row, start, first - start, rows, first_column)


def draw_block(name: str, row: Param, start: int, *, seed: int) -> Tensor:
    """The block of rows of the parameter `name` that begins at row `start`, all columns of it."""
    rows, columns = row.shape
    # Always an fp32 draw on the CPU: the numbers must not depend on the device.
    with torch.no_grad():
        generator = torch.Generator().manual_seed(mix_seed(seed, name, start))
        drawn = torch.empty((min(ROWS_PER_BLOCK, rows - start), columns), dtype=torch.float32)
        return drawn.normal_(0.0, row.init_std, generator=generator)


def untrained_loss(
    vocab_size: int, hidden_size: int, initializer_range: float, output_scale: float = 1.0
) -> float:
    """The loss a fresh GPT shows: ln V + h (σ s)² / 2, the variance of its logits halved."""
    return math.log(vocab_size) + hidden_size * (initializer_range * output_scale) ** 2 / 2
