"""Published step times side by side with predictions: the fit, and what is left over.

Fitted are the coefficients and, per kind of device, the sustained share of the peak. Links,
latencies and memory bandwidths are measured or stated figures and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.cost.terms import Floats
from fourfold.cost.workload import Network, Software, Spread, columns
from fourfold.plan.coefficients import NAMES, Coefficients
from fourfold.plan.fitting import fit_numbers
from fourfold.plan.machine import Machine, machine_columns
from fourfold.plan.published import FITTED_FAMILIES, Run
from fourfold.plan.steptime import step_time_of

# What each family weighs in the fit, however many rows it has.
WEIGHTS = {"vtrain single": 150, "vtrain multi": 60, "llm-foundry a100": 60, "llm-foundry h100": 40}
KINDS = ("A100", "H100")
START = {"A100": 0.8, "H100": 0.65}


@dataclass(frozen=True)
class Evidence:
    """Runs whose step time is known, as columns."""

    runs: tuple[Run, ...]
    network: Network
    spread: Spread
    software: Software
    machine: Machine
    seconds: Floats
    family: Any
    part: Any
    kind: Any

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Evidence:
        timed = tuple(run for run in runs if np.isfinite(run.seconds))
        return cls(
            runs=timed,
            network=columns([run.network for run in timed]),
            spread=columns([run.spread for run in timed]),
            software=columns([run.software for run in timed]),
            machine=machine_columns([run.machine for run in timed]),
            seconds=np.array([run.seconds for run in timed]),
            family=np.array([run.family for run in timed]),
            part=np.array([run.part for run in timed]),
            kind=np.array([run.device.split("-")[0] for run in timed]),
        )

    def where(self, mask: Any) -> Evidence:
        return Evidence.of([run for run, chosen in zip(self.runs, mask, strict=True) if chosen])

    def errors(self, coefficients: Coefficients, sustained: dict[str, float]) -> Floats:
        """Predicted over measured, less one."""
        return self.predicted(coefficients, sustained) / self.seconds - 1

    def predicted(self, coefficients: Coefficients, sustained: dict[str, float]) -> Floats:
        share = np.array(self.machine.sustained, dtype=float)
        for kind, value in sustained.items():
            share = np.where(self.kind == kind, value, share)
        machine = replace(self.machine, sustained=share)
        return np.asarray(
            step_time_of(self.network, self.spread, self.software, machine, coefficients).total
        )


def fit_published(
    evidence: Evidence, families: Sequence[str] = FITTED_FAMILIES
) -> tuple[Coefficients, dict[str, float]]:
    """Coefficients and sustained shares from the fit rows of these families alone."""
    chosen = (evidence.part == "fit") & np.isin(evidence.family, list(families))
    rows = evidence.where(chosen)
    counts = {family: int((rows.family == family).sum()) for family in families}
    weights = np.array([WEIGHTS[family] / counts[family] for family in rows.family])
    start = Coefficients()
    numbers = np.array([getattr(start, name) for name in NAMES] + [START[kind] for kind in KINDS])

    def residuals(point: Floats) -> Floats:
        coefficients, sustained = _unpack(point)
        return np.log(rows.predicted(coefficients, sustained) / rows.seconds)

    return _unpack(fit_numbers(residuals, numbers, weights))


def _unpack(numbers: Floats) -> tuple[Coefficients, dict[str, float]]:
    values = dict(zip(NAMES, (float(number) for number in numbers), strict=False))
    shares = {kind: float(n) for kind, n in zip(KINDS, numbers[len(NAMES) :], strict=True)}
    return Coefficients(**values), shares
