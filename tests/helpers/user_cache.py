"""A user cache of their own for tests that open data."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_user_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """No test reads or leaves anything in the cache of whoever runs it."""
    directory = tmp_path_factory.mktemp("user_cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory / "fourfold" / "data"
