"""Parallelism, applied to the single-device model from outside: an axis is a file."""

from fourfold.parallel.apply import build_on_meta, build_runner, layout_of, parallelize, preload
from fourfold.parallel.precision import Precision
from fourfold.parallel.runner import Runner

__all__ = [
    "Precision",
    "Runner",
    "build_on_meta",
    "build_runner",
    "layout_of",
    "parallelize",
    "preload",
]
