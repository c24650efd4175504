"""The table's rows of a test run; with FOURFOLD_EQUIVALENCE_PAGE set they become that page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.equivalence_page import Row, page_of
from helpers.layout_runs import Runs

PAGE = Path(__file__).parent.parent.parent / "docs" / "equivalence.md"


@pytest.fixture(scope="session")
def table_rows() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    if path := os.environ.get("FOURFOLD_EQUIVALENCE_PAGE"):
        Path(path).write_text(page_of(rows))


@pytest.fixture
def page() -> Path:
    return PAGE


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)
