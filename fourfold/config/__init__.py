"""The configuration: the documents' key tree, from YAML and `-o`, resolved and checked."""

from __future__ import annotations

from fourfold.config.load import load_config
from fourfold.config.reference import json_schema, markdown_reference
from fourfold.config.schema import Config

__all__ = ["Config", "json_schema", "load_config", "markdown_reference"]
