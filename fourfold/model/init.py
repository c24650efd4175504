"""Initial weights as a function of (seed, parameter name), so every layout starts the same.

Matrices are drawn in blocks of rows, each block from its own generator: a rank that holds a
slice of the rows draws just the blocks it needs and gets the very numbers one device would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fourfold.model.gpt import GPT
from fourfold.model.names import is_bias, is_norm
from fourfold.model.seeds import mix_seed

ROWS_PER_BLOCK = 256


def initialize(model: GPT, seed: int) -> None:
    """Fill every parameter in place: normal matrices, zero biases, unit LayerNorm weights."""
    normal: list[tuple[str, Tensor, float]] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_bias(name):
                parameter.zero_()
            elif is_norm(name):
                parameter.fill_(1.0)
            else:
                normal.append((name, parameter, _std(model, name)))
        blocks = [block for item in normal for block in _blocks(*item)]
        # Each block is independent and torch draws outside the interpreter lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(lambda block: fill_normal(*block, seed=seed), blocks))


def _std(model: GPT, name: str) -> float:
    """FleetX draws all matrices alike; GPT-2's depth scaling of residual outputs is optional."""
    std = model.shape.initializer_range
    if model.shape.depth_scaled_init and name.endswith(("attn.out.weight", "mlp.down.weight")):
        return std / (2 * model.shape.num_layers) ** 0.5
    return std


def _blocks(name: str, parameter: Tensor, std: float) -> Iterator[tuple[str, int, Tensor, float]]:
    for start in range(0, parameter.shape[0], ROWS_PER_BLOCK):
        yield name, start, parameter[start : start + ROWS_PER_BLOCK], std


def fill_normal(name: str, start: int, rows: Tensor, std: float, *, seed: int) -> None:
    """Draw the block of rows of `name` that begins at row `start` into `rows`."""
    # Always an fp32 draw on the CPU: the numbers must not depend on the device.
    with torch.no_grad():
        generator = torch.Generator().manual_seed(mix_seed(seed, name, start))
        drawn = torch.empty(rows.shape, dtype=torch.float32)
        rows.copy_(drawn.normal_(0.0, std, generator=generator))


def untrained_loss(vocab_size: int, hidden_size: int, initializer_range: float) -> float:
    """The loss a fresh tied GPT shows: ln V + h σ² / 2, the variance of its logits halved."""
    return math.log(vocab_size) + hidden_size * initializer_range**2 / 2
