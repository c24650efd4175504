"""Tests on machines made of namespaces: marked `cluster`, and skipped where none can be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.machines import why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            if reason := why_not():
                item.add_marker(pytest.mark.skip(reason=reason))
