"""Initial weights as a function of (seed, parameter name), so every layout starts the same.

Matrices are drawn in blocks of rows, each block from its own generator: a rank that holds a
slice of the rows draws just the blocks it needs and gets the very numbers one device would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from fourfold import heartbeat
from fourfold.model.gpt import GPT, ModelShape
from fourfold.model.names import is_bias, is_norm
from fourfold.model.seeds import mix_seed

ROWS_PER_BLOCK = 256


def initialize(model: GPT, seed: int) -> None:
    """Fill every parameter in place: normal matrices, zero biases, unit LayerNorm weights."""
    whole = {
        name: (parameter, (0,) * parameter.dim()) for name, parameter in model.named_parameters()
    }
    initialize_rectangles(model.shape, whole, seed)


def initialize_rectangles(
    shape: ModelShape, rectangles: Mapping[str, tuple[Tensor, tuple[int, ...]]], seed: int
) -> None:
    """The same for parts of parameters: by name, a tensor and where it begins in the whole."""
    whole = whole_shapes(shape)
    blocks: list[tuple[str, int, int, Tensor, int]] = []
    with torch.no_grad():
        for name, (tensor, offsets) in rectangles.items():
            if is_bias(name):
                tensor.zero_()
            elif is_norm(name):
                tensor.fill_(1.0)
            else:
                blocks += _blocks(name, whole[name], tensor, offsets)
        # Each block is independent and torch draws outside the interpreter lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(lambda block: _fill(shape, seed, whole, *block), blocks):
                heartbeat.alive()


@cache
def whole_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the whole model, by name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(shape).named_parameters()}


def _std(shape: ModelShape, name: str) -> float:
    """FleetX draws all matrices alike; GPT-2's depth scaling of residual outputs is optional."""
    std = shape.initializer_range
    if shape.depth_scaled_init and name.endswith(("attn.out.weight", "mlp.down.weight")):
        return std / (2 * shape.num_layers) ** 0.5
    return std


def _blocks(
    name: str, whole: tuple[int, ...], tensor: Tensor, offsets: tuple[int, ...]
) -> Iterator[tuple[str, int, int, Tensor, int]]:
    """The rows of `tensor` block by block: the block's first row, where in it to begin, rows of
    the tensor, and their first column."""
    stop = offsets[0] + tensor.shape[0]
    for start in range(offsets[0] // ROWS_PER_BLOCK * ROWS_PER_BLOCK, stop, ROWS_PER_BLOCK):
        first = max(start, offsets[0])
        last = min(start + ROWS_PER_BLOCK, stop)
        rows = tensor[first - offsets[0] : last - offsets[0]]
        yield name, start, first - start, rows, offsets[1]


@torch.no_grad()
def _fill(
    shape: ModelShape,
    seed: int,
    whole: dict[str, tuple[int, ...]],
    name: str,
    start: int,
    skip: int,
    rows: Tensor,
    column: int,
) -> None:
    drawn = draw_block(whole[name], name, start, _std(shape, name), seed=seed)
    rows.copy_(drawn[skip : skip + rows.shape[0], column : column + rows.shape[1]])


def draw_block(whole: tuple[int, ...], name: str, start: int, std: float, *, seed: int) -> Tensor:
    """The block of rows of the parameter `name` that begins at row `start`, all columns of it."""
    # Always an fp32 draw on the CPU: the numbers must not depend on the device.
    with torch.no_grad():
        generator = torch.Generator().manual_seed(mix_seed(seed, name, start))
        drawn = torch.empty((min(ROWS_PER_BLOCK, whole[0] - start), whole[1]), dtype=torch.float32)
        return drawn.normal_(0.0, std, generator=generator)


def untrained_loss(vocab_size: int, hidden_size: int, initializer_range: float) -> float:
    """The loss a fresh tied GPT shows: ln V + h σ² / 2, the variance of its logits halved."""
    return math.log(vocab_size) + hidden_size * initializer_range**2 / 2
