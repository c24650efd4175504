"""Fixtures for questions to runs of the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers.tiny_run import TINY, Configure

from fourfold.cli import main
from fourfold.config import Config, load_config

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """`configure("run_name", "Engine.max_steps=4", ...)`: a config writing to its own directory."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))

    def make(name: str, *overrides: str, world_size: int = 1) -> Config:
        places = [
            f"Engine.save_load.output_dir={tmp_path / name}",
            f"Data.dataset.cache_dir={tmp_path / 'cache'}",
            "Engine.save_load.keep_last=0",
        ]
        return load_config(path, [*places, *overrides], world_size)

    return make


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("replay", run, "--step", 3)`: its exit code, output and errors."""

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        shown = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 1), shown.out, shown.err

    return call
