from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fourfold.metrics import Step


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """A plausible record; any field can be given."""

    def make(step: int = 1, **fields: Any) -> Step:
        values = {
            "step": step,
            "epoch": 0,
            "batch": step - 1,
            "loss": 11.0 - step / 10,
            "learning_rate": 1e-4,
            "grad_norm": 1.5,
            "loss_scale": None,
            "skipped": 0,
            "global_batch_size": 1,
            "samples": step,
            "tokens": step * 1024,
            "reader_seconds": 0.01,
            "batch_seconds": 0.5,
            "steps_per_second": 2.0,
            "ips_total": 2048.0,
            "ips": 1024.0,
            "mfu": None,
            "rss_bytes": 10,
            "peak_rss_bytes": 20,
            "device_bytes": None,
            "peak_device_bytes": None,
            "seconds": {"forward_backward": 0.3},
            "time": "2022-07-27T12:42:46.601+00:00",
        }
        return Step(**(values | fields))

    return make
