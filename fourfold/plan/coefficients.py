"""Coefficients of the time model that physics does not give: fitted once, on published runs.

All are dimensionless or seconds, shared by every device and program; what differs between devices
is in cluster.py. The values come from `python benchmarks/plan.py --fit`, which uses only the fit
half of published_runs.csv (see published.py); docs/planning.md says how well they do on the rest.
The file also holds what the fit gives without one family of runs, by which `--self-test` predicts
that family (leave-one-out cross-validation).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("coefficients.json")


@dataclass(frozen=True)
class Coefficients:
    wave: float = 0.5  # of a wave of tiles that a product wastes, on average
    inner: float = 64.0  # inner dimension at which a product runs at half speed
    traffic: float = 1.5  # element-wise bytes over those a fused program would move
    scores: float = 1.0  # the same for the table of attention scores
    flash_forward: float = 0.5  # share of the sustained rate
    flash_backward: float = 0.4
    kernels: float = 40.0  # issued per layer and forward pass, without fusion
    collective_kernels: float = 1.5  # more for each rank that two all-reduces wait for
    host_sharpness: float = 4.0  # how sharply the slower of host and device decides
    send: float = 1.0  # pipeline messages: seconds over the link's own
    step_seconds: float = 0.01  # once per step: clipping, logging, the optimizer's launch
    micro_batch_seconds: float = 0.001
    optimizer: float = 1.5  # optimizer bytes over the least possible
    exposed: float = 0.3  # of communication behind compute: how much longer both take
    jitter: float = 0.02  # slowdown per doubling of the number of nodes


@dataclass(frozen=True)
class Fit:
    """What one fit finds: the coefficients, and by kind of device the share of its peak that large
    products reach. Those of the fit to all families stand in cluster.PRESETS, rounded."""

    coefficients: Coefficients
    sustained: dict[str, float]


def load_coefficients(path: Path = FILE) -> Coefficients:
    return Coefficients(**_read(path)["values"])


def load_left_out(path: Path = FILE) -> dict[str, Fit]:
    """By family of published runs: the fit that saw none of its rows."""
    return {
        family: Fit(Coefficients(**fit["values"]), fit["sustained"])
        for family, fit in _read(path)["without"].items()
    }


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
