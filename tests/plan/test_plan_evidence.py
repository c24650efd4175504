"""The published runs: how they are read and split, and that the fit is what the package holds."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.errors import UserError
from fourfold.plan.cluster import PRESETS
from fourfold.plan.coefficients import load_coefficients
from fourfold.plan.published import FILE, FITTED_FAMILIES, Evidence, fit_published, published_runs

EVIDENCE = Evidence.of(published_runs())


def test_the_split_is_by_what_was_run_and_nearly_even() -> None:
    parts: dict[tuple[object, ...], set[str]] = {}
    for run in EVIDENCE.runs:
        if run.family in FITTED_FAMILIES:
            key = (run.network, run.spread, run.device, run.global_batch)
            parts.setdefault(key, set()).add(run.part)
    assert all(len(found) == 1 for found in parts.values())
    fitted = sum(found == {"fit"} for found in parts.values())
    assert 0.4 < fitted / len(parts) < 0.6


def test_only_fit_rows_of_four_families_are_fitted() -> None:
    assert set(EVIDENCE.family[EVIDENCE.part == "fit"]) == set(FITTED_FAMILIES)


def test_the_packaged_coefficients_are_the_fit() -> None:
    coefficients, sustained = fit_published(EVIDENCE)
    packaged = load_coefficients()
    for name, value in asdict(coefficients).items():
        assert getattr(packaged, name) == pytest.approx(value, rel=0.02), name
    for kind, value in sustained.items():
        assert PRESETS[f"{kind}-80G"].sustained == pytest.approx(value, rel=0.01)


def test_check_rows_do_not_move_the_fit() -> None:
    doubled = [
        replace(run, seconds=2 * run.seconds) if run.part == "check" else run
        for run in EVIDENCE.runs
    ]
    assert fit_published(Evidence.of(doubled))[0] == fit_published(EVIDENCE)[0]


def test_every_family_left_out_is_still_predicted() -> None:
    for family in FITTED_FAMILIES:
        others = [name for name in FITTED_FAMILIES if name != family]
        errors = EVIDENCE.errors(*fit_published(EVIDENCE, others))
        assert np.abs(errors[EVIDENCE.family == family]).mean() < 0.15, family


def test_a_table_of_other_runs_is_read(tmp_path: Path) -> None:
    head, first, *_ = FILE.read_text().splitlines()
    path = tmp_path / "rows.csv"
    path.write_text(f"{head}\n{first}\n")
    assert len(published_runs(path)) == 1
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="not a table of runs"):
        published_runs(other)
