"""How exactly a run computes: `Engine.matmul_precision` and `Engine.deterministic`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers.layout_runs import Runs, losses
from helpers.ranks import on_ranks

from fourfold.engine import build_engine


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_the_keys_are_set_before_the_model_is_built(runs: Runs) -> None:
    keys = ("Engine.matmul_precision=high", "Engine.deterministic=True")

    def work(rank: int) -> tuple[str, bool, str | None]:
        build_engine(runs.config("dp1", "run", *keys))
        return (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        )

    assert on_ranks(1, work) == [("high", True, ":4096:8")]
    assert not torch.are_deterministic_algorithms_enabled(), "in the process of its own alone"


@pytest.mark.parametrize("layout", ["dp1", "mp2 sp"])
def test_deterministic_kernels_exist_for_every_operation(layout: str, runs: Runs) -> None:
    """On a CPU they are the ones used anyway, so the numbers stay."""
    settings = ("Engine.max_steps=2", "Data.dataset.reset_attention_mask=True")
    plain = runs.fit(layout, "plain", *settings)
    bound = runs.fit(layout, "bound", *settings, "Engine.deterministic=True")
    assert losses(bound) == losses(plain)
