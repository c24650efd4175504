"""The playground: nothing from elsewhere, nothing the policy forbids, and it works in a browser."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.served import TOKEN, Served, load, serving

from fourfold.generate.module import GenerationModule

NUMBERS = ("temperature", "top_p", "top_k", "max_tokens")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    reply = httpx.get(served.url)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert {"default-src 'none'", "connect-src 'self'", "base-uri 'none'"} < set(policy.split("; "))
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", reply.text)
    # Neither markup from text nor attributes the policy would have to allow.
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+="
    assert not re.search(forbidden, reply.text)


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
    opened = browser.new_page(viewport={"width": 1180, "height": 800})
    opened.set_default_timeout(60_000)
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    opened.close()
    expected = "status of 40"  # the browser's own note of a refused request
    assert [one for one in complaints if expected not in one] == []


def set_slider(page: Any, name: str, value: float) -> None:
    page.evaluate(
        "([name, value]) => { const slider = document.getElementById(name); slider.value = value;"
        " slider.dispatchEvent(new Event('input')); }",
        [name, value],
    )


def picture(page: Any, name: str) -> None:
    """Kept where FOURFOLD_PICTURES names a directory."""
    if directory := os.environ.get("FOURFOLD_PICTURES"):
        page.screenshot(path=Path(directory) / f"{name}.png", full_page=True)


def test_the_page_writes_what_the_library_writes(served: Served, page: Any, config: Path) -> None:
    overrides = ["Generation.seed=3", "Generation.max_dec_len=90", "Generation.top_k=9"]
    module = GenerationModule(load(config, *overrides, "Generation.top_p=0.9"), lambda _: None)
    [[wanted]] = module.complete(["the cat sat on"])
    page.goto(served.url)
    page.get_by_text("untrained · 256 tokens").wait_for()
    assert page.locator("#top_k").input_value() == "20"
    page.fill("#prompt", "the cat sat on")
    page.fill("#seed", "3")
    for name, value in {"max_tokens": 90, "top_k": 9, "top_p": 0.9}.items():
        set_slider(page, name, value)
    page.keyboard.press("Control+Enter")
    page.get_by_text(re.compile("reached its length|ended by itself")).wait_for()
    assert page.locator("#output").text_content() == wanted.text
    assert page.locator(".token").count() == len(wanted.ids)
    status = page.locator("#status").text_content()
    assert "tokens/s" in status and "seed 3" in status
    page.locator(".token").nth(2).click()
    rows = page.locator("#detail .row").all_text_contents()
    assert 8 <= len(rows) <= 9 and all(row.endswith("%") for row in rows)
    assert page.locator("#detail .taken").count() == 1
    picture(page, "playground")
    page.click("#keep")
    assert page.locator("#prompt").input_value() == "the cat sat on" + wanted.text


def test_numbers_can_be_typed_and_the_files_are_not_cut(config: Path, page: Any) -> None:
    overrides = ["Generation.top_k=290", "Generation.temperature=0.73"]
    with serving(config, *overrides) as served:
        page.goto(served.url)
        page.get_by_text("untrained · 256 tokens").wait_for()
        exact = {name: page.locator(f"label:has(#{name}) .exact") for name in NUMBERS}
        assert exact["top_k"].input_value() == "290"  # the slider ends at 200
        assert exact["temperature"].input_value() == "0.73"
        bodies: list[dict[str, Any]] = []
        page.on("request", lambda asked: bodies.append(asked.post_data_json))
        page.fill("#prompt", "the")
        exact["max_tokens"].fill("3")
        exact["top_p"].fill("")
        page.click("#write")
        page.get_by_text(re.compile("reached its length|ended by itself")).wait_for()
        found = {name: bodies[-1].get(name) for name in NUMBERS}
        assert found == {"temperature": 0.73, "top_k": 290, "max_tokens": 3, "top_p": None}
        assert page.locator("#max_tokens").input_value() == "3"
        # A slider that is moved is what counts.
        set_slider(page, "top_k", 40)
        assert exact["top_k"].input_value() == "40"
        exact["top_p"].fill("7")
        page.click("#write")
        page.get_by_text(re.compile("top_p: ")).wait_for()


def test_code_is_set_in_letters_of_one_width(served: Served, page: Any) -> None:
    def family(place: str) -> str:
        return page.locator(place).evaluate("element => getComputedStyle(element).fontFamily")

    page.goto(served.url)
    page.fill("#prompt", "Once upon a time")
    assert "monospace" not in family("#prompt")
    page.fill("#prompt", "def double(x):\n    return")
    assert "monospace" in family("#prompt") and "monospace" in family("#output")
    picture(page, "playground_code")
    # What the reader chose stays, whatever the text.
    page.click("#setting")
    page.fill("#prompt", "if x:\n\treturn 1")
    assert "monospace" not in family("#prompt")
    page.click("#setting")
    page.fill("#prompt", "Once")
    assert "monospace" in family("#output")


def test_the_page_is_dark_where_the_system_is(served: Served, page: Any) -> None:
    def brightness(place: str, what: str) -> float:
        script = f"element => getComputedStyle(element).{what}"
        found = re.findall(r"[\d.]+", page.locator(place).evaluate(script))
        return sum(map(float, found[:3])) / 3

    seen = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(served.url)
        page.get_by_text("untrained · 256 tokens").wait_for()
        page.fill("#prompt", "def cat(mat):\n    sat =")
        page.fill("#seed", "5")
        page.click("#write")
        page.get_by_text(re.compile("reached its length|ended by itself")).wait_for()
        page.locator(".token").nth(1).click()
        paper = brightness("body", "backgroundColor")
        ink = brightness("#output", "color")
        seen[scheme] = paper > ink
        assert abs(paper - ink) > 150
        for field in ("#prompt", "#seed", "#keep", "#status"):
            assert abs(brightness(field, "color") - paper) > 80, field
        picture(page, f"playground_{scheme}")
    assert seen == {"light": True, "dark": False}


def test_markup_in_a_text_stays_text(served: Served, page: Any) -> None:
    page.goto(served.url)
    page.evaluate(
        "addChunk({text: '<img src=x onerror=fail()>', logprobs: {tokens: ['<img'],"
        " token_logprobs: [-1], top_logprobs: [{'<b>x</b>': -1}], text_offset: [0]}})"
    )
    page.locator(".token").first.hover()
    assert page.locator("#output").text_content() == "<img src=x onerror=fail()>"
    assert page.locator("#detail b").first.text_content() == "<b>x</b>"
    assert page.locator("#output img, #detail b b").count() == 0


def test_stop_and_token(config: Path, page: Any) -> None:
    with serving(config, token=TOKEN, slots=1, step_seconds=0.05) as served:
        page.goto(served.url)
        page.get_by_text("asks for its access token").wait_for()
        picture(page, "playground_token")
        page.fill("#token", TOKEN)
        page.fill("#prompt", "the")
        page.get_by_text("untrained · 256 tokens").wait_for()
        set_slider(page, "max_tokens", 255)
        page.click("#write")
        page.locator(".token").nth(3).wait_for()
        page.keyboard.press("Escape")
        page.get_by_text("stopped").wait_for()
        served.until(lambda worker: worker.running == 0)
        assert page.locator("#write").is_enabled() and page.locator("#stop").is_disabled()
        page.fill("#prompt", "")
        page.click("#write")
        page.get_by_text("prompt: empty").wait_for()
