"""A process with fake CUDA, one for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.fake_cuda import FakeCuda
from helpers.native import library


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCuda]:
    process = FakeCuda(library("fake_cuda"), tmp_path_factory.mktemp("fake_cuda") / "log")
    yield process
    process.close()
