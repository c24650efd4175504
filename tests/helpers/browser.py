"""Pages in a real browser: the fixtures `browser` and `page` for a conftest.py, and pictures.

from helpers.browser import browser, page  # noqa: F401
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "laptop": (1280, 800), "wide": (1920, 1080)}
EXPECTED = "status of 40"  # the browser's own note of a refused request


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        program = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield program
        program.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that must not complain about anything."""
    width, height = SIZES["laptop"]
    opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    opened.set_default_timeout(60_000)
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: complaints.append(dialog.message))
    yield opened
    opened.close()
    assert [one for one in complaints if EXPECTED not in one] == []


def picture(page: Any, name: str) -> None:
    """Looks at the page at every size, dark and light, where nothing may stick out at the side.

    Pictures are kept where FOURFOLD_PICTURES names a directory.
    """
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.locator(f"html[data-theme={scheme}]").wait_for(state="attached")
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, size
            if directory := os.environ.get("FOURFOLD_PICTURES"):
                file = Path(directory) / f"{name}_{size}_{scheme}.png"
                page.screenshot(path=file, full_page=True)
    page.emulate_media(color_scheme="light")
    width, height = SIZES["laptop"]
    page.set_viewport_size({"width": width, "height": height})
