"""Types of the fixtures in conftest.py."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.config import Config

Load = Callable[..., Config]
Problems = Callable[..., list[str]]
