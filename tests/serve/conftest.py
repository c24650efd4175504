"""One server for all tests of a file that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import browser, page  # noqa: F401
from helpers.served import Served, make_untrained, serving


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_untrained(tmp_path_factory.mktemp("untrained"))


@pytest.fixture(scope="module")
def served(config: Path) -> Iterator[Served]:
    with serving(config) as server:
        yield server
