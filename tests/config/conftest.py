"""Configurations written to a temporary file and loaded from there."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.yaml_text import Load, Problems

from fourfold.config import Config, load_config
from fourfold.errors import ConfigError


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load YAML text as the file `run.yaml` of the current directory."""
    monkeypatch.chdir(tmp_path)

    def load_text(
        text: str = "", overrides: Sequence[str] = (), world_size: int | None = None
    ) -> Config:
        Path("run.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
        return load_config("run.yaml", overrides, world_size)

    return load_text


@pytest.fixture
def problems(load: Load) -> Problems:
    """The problems reported for YAML text that must not load."""

    def problems_of(*args: object, **kwargs: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(*args, **kwargs)
        return [str(problem) for problem in caught.value.problems]

    return problems_of
