"""The engine: everything to its left, put together and run."""

from fourfold.engine.loop import Engine

__all__ = ["Engine"]
