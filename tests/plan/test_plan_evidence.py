"""The published runs: how they are read and split, and that the fit is what the package holds."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fourfold.errors import UserError
from fourfold.plan.cluster import PRESETS
from fourfold.plan.machine import Coefficients, load_coefficients, load_left_out
from fourfold.plan.published import FILE, FITTED_FAMILIES, Evidence, published_runs

EVIDENCE = Evidence.of(published_runs())


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    """The fit is no part of the package."""
    path = Path(__file__).parents[2] / "benchmarks" / "plan.py"
    spec = importlib.util.spec_from_file_location("benchmarks_plan", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_packaged_coefficients_are_the_fit(fitting: ModuleType) -> None:
    fit = fitting.fit_published(EVIDENCE)
    assert_near(load_coefficients(), fit.coefficients)
    for kind, value in fit.sustained.items():
        assert PRESETS[f"{kind}-80G"].sustained == pytest.approx(value, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family", FITTED_FAMILIES)
def test_the_packaged_fits_without_a_family_are_such_fits(fitting: ModuleType, family: str) -> None:
    packaged, fit = load_left_out()[family], fitting.fit_without(EVIDENCE, family)
    assert_near(packaged.coefficients, fit.coefficients)
    assert packaged.sustained == pytest.approx(fit.sustained, rel=0.01)


def assert_near(packaged: Coefficients, fitted: Coefficients) -> None:
    for name, value in asdict(fitted).items():
        assert getattr(packaged, name) == pytest.approx(value, rel=0.02), name


def test_check_rows_do_not_move_the_fit(fitting: ModuleType) -> None:
    doubled = [
        replace(run, seconds=2 * run.seconds) if run.part == "check" else run
        for run in EVIDENCE.runs
    ]
    assert fitting.fit_published(Evidence.of(doubled)) == fitting.fit_published(EVIDENCE)


def test_every_family_left_out_is_still_predicted() -> None:
    left_out = load_left_out()
    assert set(left_out) == set(FITTED_FAMILIES)
    for family, fit in left_out.items():
        errors = EVIDENCE.errors(fit.coefficients, fit.sustained)
        assert np.abs(errors[EVIDENCE.family == family]).mean() < 0.15, family


def test_what_is_written_is_what_is_read(fitting: ModuleType, tmp_path: Path) -> None:
    left_out = load_left_out()
    first, *_ = left_out.values()
    fitting.write_fits(first, left_out, tmp_path / "coefficients.json")
    assert load_coefficients(tmp_path / "coefficients.json") == first.coefficients
    assert load_left_out(tmp_path / "coefficients.json") == left_out


def test_a_table_of_other_runs_is_read(tmp_path: Path) -> None:
    head, first, *_ = FILE.read_text().splitlines()
    path = tmp_path / "rows.csv"
    path.write_text(f"{head}\n{first}\n")
    assert len(published_runs(path)) == 1
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="not a table of runs"):
        published_runs(other)
