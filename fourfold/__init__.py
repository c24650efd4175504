"""Fourfold trains GPT models: one YAML file, any layout, the same numbers."""

__version__ = "0.1.0"
