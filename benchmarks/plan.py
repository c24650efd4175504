"""The planner: its error on published runs, its fit, and the time a search takes.

    python benchmarks/plan.py          # self-test, and the time of searches
    python benchmarks/plan.py --fit    # fit the coefficients anew and write them to the package

The fit uses the fit rows of published_runs.csv alone and takes a few seconds: once with all fitted
families, and once without each of them (leave-one-out cross-validation). The sustained shares it
finds belong in PRESETS (fourfold/plan/cluster.py), the bands as well: the ninth decile of the
absolute error over the check rows of a device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from fourfold.config import load_config
from fourfold.cost.terms import Floats
from fourfold.plan import parse_cluster, plan
from fourfold.plan.calibrate import fit_numbers
from fourfold.plan.machine import COEFFICIENTS_FILE, CoefficientFit, Coefficients
from fourfold.plan.published import FITTED_FAMILIES, Evidence, published_runs
from fourfold.plan.selftest import FITTED_KINDS, self_test_lines

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
FIRST_SUSTAINED = {"A100": 0.8, "H100": 0.65}
NAMES = tuple(field.name for field in fields(Coefficients))


def fit() -> None:
    evidence = Evidence.of(published_runs())
    found = fit_published(evidence)
    write_fits(found, {family: fit_without(evidence, family) for family in FITTED_FAMILIES})
    print(f"sustained: {', '.join(f'{k} {v:.3f}' for k, v in found.sustained.items())}")
    errors = np.abs(evidence.errors(found.coefficients, found.sustained))
    for kind in sorted(set(evidence.kind)):
        rows = errors[(evidence.kind == kind) & (evidence.part == "check")]
        decile = np.quantile(rows, 0.9)
        print(f"{kind}: {len(rows)} check rows, ninth decile of the error {decile:.2f}")


def fit_without(evidence: Evidence, family: str) -> CoefficientFit:
    return fit_published(evidence, [name for name in FITTED_FAMILIES if name != family])


def fit_published(evidence: Evidence, families: Sequence[str] = FITTED_FAMILIES) -> CoefficientFit:
    """Coefficients and sustained shares from the fit rows of these families alone."""
    rows = evidence.where((evidence.part == "fit") & np.isin(evidence.family, list(families)))
    counts = {family: int((rows.family == family).sum()) for family in families}
    weights = np.array([WEIGHTS[family] / counts[family] for family in rows.family])
    first = [*asdict(Coefficients()).values(), *(FIRST_SUSTAINED[kind] for kind in FITTED_KINDS)]

    def residuals(numbers: Floats) -> Floats:
        trial = as_fit(numbers)
        return np.log(rows.predicted(trial.coefficients, trial.sustained) / rows.seconds)

    return as_fit(fit_numbers(residuals, np.array(first), weights))


def as_fit(numbers: Floats) -> CoefficientFit:
    values = [float(number) for number in numbers]
    coefficients = Coefficients(**dict(zip(NAMES, values, strict=False)))
    return CoefficientFit(coefficients, dict(zip(FITTED_KINDS, values[len(NAMES) :], strict=True)))


def write_fits(
    found: CoefficientFit, without: dict[str, CoefficientFit], path: Path = COEFFICIENTS_FILE
) -> None:
    content = {
        "origin": "python benchmarks/plan.py --fit",
        "values": asdict(found.coefficients),
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
