"""`fourfold train`."""

from __future__ import annotations

from fourfold.cli.options import ConfigFile, Overrides


def train(config: ConfigFile, override: Overrides = None) -> None:
    """Train the model a YAML file describes; resumes if the run has checkpoints."""
    from fourfold.config import load_config
    from fourfold.engine import Engine
    from fourfold.mesh import world_size

    Engine(load_config(config, override or []), world_size()).fit()
