"""The planner: its error on published runs, its fit, and the time a search takes.

    python benchmarks/plan.py          # self-test, and the time of searches
    python benchmarks/plan.py --fit    # fit the coefficients anew and write them to the package

The fit uses the fit rows of published_runs.csv alone and takes a second. The sustained shares it
finds belong in PRESETS (fourfold/plan/cluster.py), the bands as well: the ninth decile of the
absolute error over the check rows of a device.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from fourfold.config import load_config
from fourfold.plan import parse_cluster, plan
from fourfold.plan.coefficients import load_coefficients, save_coefficients
from fourfold.plan.published import Evidence, fit_published, published_runs
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


def fit() -> None:
    evidence = Evidence.of(published_runs())
    coefficients, sustained = fit_published(evidence)
    save_coefficients(coefficients, "python benchmarks/plan.py --fit")
    print(f"sustained: {', '.join(f'{k} {v:.3f}' for k, v in sustained.items())}")
    errors = np.abs(evidence.errors(load_coefficients(), sustained))
    for kind in sorted(set(evidence.kind)):
        rows = errors[(evidence.kind == kind) & (evidence.part == "check")]
        decile = np.quantile(rows, 0.9)
        print(f"{kind}: {len(rows)} check rows, ninth decile of the error {decile:.2f}")


def time_searches() -> None:
    for name, cluster in SEARCHES:
        start = time.perf_counter()
        made = plan(load_config(CONFIGS / name), parse_cluster(cluster))
        took = time.perf_counter() - start
        looked = 0 if made.costs is None else len(made.costs)
        print(f"{Path(name).stem} on {cluster}: {looked:,} layouts in {took:.2f} s")


if __name__ == "__main__":
    main()
