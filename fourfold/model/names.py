"""What a parameter's name says of it; initialisation, weight decay and precision all ask."""

from __future__ import annotations


def is_bias(name: str) -> bool:
    return name.endswith("bias")


def is_norm(name: str) -> bool:
    """A LayerNorm's weight or bias."""
    return "norm" in name
