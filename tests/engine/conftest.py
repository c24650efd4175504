"""Fixtures for runs of the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.tiny_run import TINY, Configure

from fourfold.config import Config, load_config


@pytest.fixture
def tiny_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.fixture
def configure(tiny_yaml: Path, tmp_path: Path) -> Configure:
    """`configure("run_name", "Engine.max_steps=4", ...)`: a config writing to its own directory."""

    def make(name: str, *overrides: str, world_size: int = 1) -> Config:
        places = [
            f"Engine.save_load.output_dir={tmp_path / name}",
            f"Data.dataset.cache_dir={tmp_path / 'cache'}",
        ]
        return load_config(tiny_yaml, [*places, *overrides], world_size)

    return make
