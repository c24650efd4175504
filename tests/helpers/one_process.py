"""A runner around a model in this process, without a configuration."""

from __future__ import annotations

import torch

from fourfold.mesh import Layout, Mesh
from fourfold.model import GPT
from fourfold.parallel import Precision, Runner

CPU = torch.device("cpu")


def runner_of(model: GPT, precision: Precision, micro: int, seed: int = 5) -> Runner:
    """For batches that are cut into micro-batches of `micro` rows."""
    precision.apply_autocast(model, CPU)
    return Runner(
        [model],
        Mesh(Layout()),
        precision=precision,
        device=CPU,
        micro_batch_size=micro,
        seed=seed,
    )
