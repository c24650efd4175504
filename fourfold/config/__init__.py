"""The configuration: the documents' key tree, from YAML and `-o`, resolved and checked."""

from __future__ import annotations

from fourfold.config.load import ConfigSource, load_config, read_config
from fourfold.config.schema import Config

__all__ = [
    "Config",
    "ConfigSource",
    "load_config",
    "read_config",
]
