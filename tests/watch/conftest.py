"""A browser for the page of runs."""

from __future__ import annotations

from helpers.browser import browser, page  # noqa: F401
