"""The planner: its error on published runs, its fit, and the time a search takes.

    python benchmarks/plan.py          # self-test, and the time of searches
    python benchmarks/plan.py --fit    # fit the coefficients anew and write them to the package

The fit uses the fit rows of published_runs.csv alone and takes a few seconds: coefficients and two
shares from four families, once with all of them and once without each (leave-one-out
cross-validation); then, with these coefficients, one share each from four families more. The shares
of A100 and H100 belong in PRESETS (fourfold/plan/cluster.py), the bands as well: the ninth decile
of what check rows of a device took more than predicted, and less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np

from fourfold.config import load_config
from fourfold.cost.terms import Floats
from fourfold.plan import parse_cluster, plan
from fourfold.plan.calibrate import fit_numbers
from fourfold.plan.machine import COEFFICIENTS_FILE, CoefficientFit, Coefficients
from fourfold.plan.published import (
    FITTED_FAMILIES,
    FITTED_RATES,
    SHARE_FAMILIES,
    Evidence,
    published_runs,
)
from fourfold.plan.selftest import self_test_lines

CONFIGS = Path(__file__).parent.parent / "configs" / "gpt"
SEARCHES = (
    ("hybrid_parallel/configs_175B_mp8_pp16.yaml", "16x8xA100-80G"),
    ("hybrid_parallel/configs_175B_mp8_pp16.yaml", "128x8xA100-80G"),
    ("hybrid_parallel/configs_6.7B_sharding16.yaml", "128x8xH100-80G"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit and write the coefficients")
    if parser.parse_args().fit:
        fit()
    else:
        print("\n".join(self_test_lines()))
    time_searches()


# -- the fit --------------------------------------------------------------------------------------

# What each family weighs in the fit, however many rows it has.
WEIGHTS = {"vtrain single": 150, "vtrain multi": 60, "llm-foundry a100": 60, "llm-foundry h100": 40}
FIRST_SUSTAINED = {"A100": 0.8, "H100 in 2023": 0.65}
FIRST_SHARE = 0.6
NAMES = tuple(field.name for field in fields(Coefficients))


def fit() -> None:
    evidence = Evidence.of(published_runs())
    found = with_shares(evidence, fit_published(evidence))
    write_fits(found, {family: fit_without(evidence, family) for family in FITTED_FAMILIES})
    print(f"sustained: {', '.join(f'{k} {v:.3f}' for k, v in found.sustained.items())}")
    for kind in ("V100", "A100", "H100"):
        print(f"{kind}: {bands(evidence, found, kind)}")


def bands(evidence: Evidence, found: CoefficientFit, kind: str) -> str:
    """Of steps in 16 bits at the share of the preset, that is, of programs of today, each family
    weighing the same: the ninth decile of what they took more than predicted, and less."""
    rows = evidence.where(
        (evidence.kind == kind) & (evidence.part == "check") & (evidence.low_peak == 0)
    )
    rate = np.where(rows.rate == "H100 in 2023", "H100", rows.rate)
    errors = replace(rows, rate=rate).errors(found.coefficients, found.sustained)
    late = 1 / (1 + errors) - 1
    weight = np.array([1 / (rows.family == family).sum() for family in rows.family])

    def decile(sign: int) -> float:
        size = np.maximum(sign * late, 0.0)
        order = np.argsort(size)
        share = np.cumsum(weight[order]) / weight.sum()
        return float(size[order][np.searchsorted(share, 0.9)])

    return f"{len(late)} check rows, ninth decile +{decile(1):.2f} -{decile(-1):.2f}"


def fit_without(evidence: Evidence, family: str) -> CoefficientFit:
    return fit_published(evidence, [name for name in FITTED_FAMILIES if name != family])


def fit_published(evidence: Evidence, families: Sequence[str] = FITTED_FAMILIES) -> CoefficientFit:
    """Coefficients and sustained shares from the fit rows of these families alone."""
    rows = evidence.where((evidence.part == "fit") & np.isin(evidence.family, list(families)))
    counts = {family: int((rows.family == family).sum()) for family in families}
    weights = np.array([WEIGHTS[family] / counts[family] for family in rows.family])
    first = [*asdict(Coefficients()).values(), *(FIRST_SUSTAINED[kind] for kind in FITTED_RATES)]

    def residuals(numbers: Floats) -> Floats:
        trial = as_fit(numbers)
        return np.log(rows.predicted(trial.coefficients, trial.sustained) / rows.seconds)

    return as_fit(fit_numbers(residuals, np.array(first), weights))


def with_shares(evidence: Evidence, found: CoefficientFit) -> CoefficientFit:
    """And the shares of SHARE_FAMILIES, one after the other: products in 16 bits come first, since
    a run in fewer still has some."""
    shares = dict(found.sustained)
    for family, name in SHARE_FAMILIES.items():
        rows = evidence.where((evidence.part == "fit") & (evidence.family == family))

        def residuals(numbers: Floats, rows: Evidence = rows, name: str = name) -> Floats:
            trial = {**shares, name: float(numbers[0])}
            return np.log(rows.predicted(found.coefficients, trial) / rows.seconds)

        weights = np.full(len(rows.runs), 10.0 / len(rows.runs))
        shares[name] = float(fit_numbers(residuals, np.array([FIRST_SHARE]), weights)[0])
    return CoefficientFit(found.coefficients, shares)


def as_fit(numbers: Floats) -> CoefficientFit:
    values = [float(number) for number in numbers]
    coefficients = Coefficients(**dict(zip(NAMES, values, strict=False)))
    return CoefficientFit(coefficients, dict(zip(FITTED_RATES, values[len(NAMES) :], strict=True)))


def write_fits(
    found: CoefficientFit, without: dict[str, CoefficientFit], path: Path = COEFFICIENTS_FILE
) -> None:
    content = {
        "origin": "python benchmarks/plan.py --fit",
        "values": asdict(found.coefficients),
        "sustained": found.sustained,
        "without": {
            family: {"values": asdict(other.coefficients), "sustained": other.sustained}
            for family, other in without.items()
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- the search -----------------------------------------------------------------------------------


def time_searches() -> None:
    for name, cluster in SEARCHES:
        start = time.perf_counter()
        made = plan(load_config(CONFIGS / name), parse_cluster(cluster))
        took = time.perf_counter() - start
        looked = 0 if made.costs is None else len(made.costs)
        print(f"{Path(name).stem} on {cluster}: {looked:,} layouts in {took:.2f} s")


if __name__ == "__main__":
    main()
