"""A bucket on loopback, and a cache directory of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.bucket import S3Server, new_address, serving

from fourfold.storage import addresses


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    with serving() as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(addresses, "PAUSE_SECONDS", (0.05, 0.1))
    return tmp_path / "cache"


@pytest.fixture
def address(s3_server: S3Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_server.variables().items():
        monkeypatch.setenv(name, value)
    return new_address()
