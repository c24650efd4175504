"""The engine: everything to its left, put together and run."""

from fourfold.engine.loop import Engine
from fourfold.engine.setup import build_engine

__all__ = ["Engine", "build_engine"]
