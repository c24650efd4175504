"""Shared by all tests: one thread per worker, small models, data made on the spot."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Here and not in every child that a test forks: what a run imports when it first needs it.
import pytest
import sympy  # noqa: F401
import torch
import torch.fx.experimental.symbolic_shapes
import torch.profiler
from hypothesis import settings

from fourfold.device import spare_missing_matrix_units
from fourfold.model import GPT, ModelShape, initialize

torch.set_num_threads(1)

# How long an example takes says what else the machine is doing.
settings.register_profile("fourfold", deadline=None)
settings.load_profile("fourfold")

spare_missing_matrix_units()


@pytest.fixture
def tiny_shape() -> ModelShape:
    return ModelShape(
        vocab_size=96,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=64,
        max_position_embeddings=24,
        loss_chunk_tokens=7,
    )


@pytest.fixture
def tiny_model(tiny_shape: ModelShape) -> GPT:
    model = GPT(tiny_shape)
    initialize(model, seed=3)
    return model
