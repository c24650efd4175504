"""What a checkpoint holds of a run, as this rank sees it: rectangles of weights and moments."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fourfold.checkpoint import Piece, Tensors
from fourfold.optim import Optimizer
from fourfold.parallel import Runner
from fourfold.parallel.pieces import TIED, WORD, local


def to_write(runner: Runner, optimizer: Optimizer) -> Tensors:
    """What this rank saves: every rectangle is saved by one of the ranks that hold it."""
    return {
        name: piece for key, name, piece in _pieces(runner, optimizer) if runner.held[key].writes
    }


def bytes_to_write(runner: Runner, optimizer: Optimizer) -> int:
    """How much of a checkpoint is this rank's part."""
    pieces = _pieces(runner, optimizer)
    return sum(piece.tensor.nbytes for key, _, piece in pieces if runner.held[key].writes)


def to_fill(runner: Runner, optimizer: Optimizer) -> Tensors:
    """What this rank wants filled."""
    keys = runner.to_fill().keys()
    return {name: piece for key, name, piece in _pieces(runner, optimizer) if key in keys}


@torch.no_grad()
def settle(runner: Runner, optimizer: Optimizer) -> None:
    """After a fill: bring what was not filled in line with what was."""
    if WORD in runner.held and TIED in runner.held:
        moments = optimizer.named_moments()
        for moment in ("exp_avg", "exp_avg_sq"):
            moments[f"{TIED}.{moment}"].copy_(moments[f"{WORD}.{moment}"])
    runner.settle()


def _pieces(runner: Runner, optimizer: Optimizer) -> Iterator[tuple[str, str, Piece]]:
    """Everything of the run that is a tensor: the key it is held under, its name, and it."""
    moments = optimizer.named_moments()
    for key, held in runner.held.items():
        tensors = {
            f"model.{held.name}": local(held.parameter.data),
            f"optim.{held.name}.exp_avg": moments[f"{key}.exp_avg"],
            f"optim.{held.name}.exp_avg_sq": moments[f"{key}.exp_avg_sq"],
        }
        for name, tensor in tensors.items():
            yield key, name, Piece(tensor, held.shape, held.offsets)
