"""Shared by all tests: one thread per worker, small models, data made on the spot."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from fourfold.model import GPT, ModelShape, initialize

torch.set_num_threads(1)


def matrix_units_work() -> bool:
    """Whether bfloat16 products run here at all.

    Some virtual machines announce AMX, and then end a process that uses it.
    """
    if not torch.cpu._is_amx_tile_supported():
        return True
    pid = os.fork()
    if pid == 0:
        ones = torch.ones(64, 64, dtype=torch.bfloat16)
        (ones @ ones).sum().item()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


if not matrix_units_work():
    # Read by torch's oneDNN before its first product, here and in every process started here.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


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
