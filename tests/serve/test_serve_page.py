"""The playground: nothing from elsewhere, nothing the policy forbids, and it works in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
from helpers.browser import picture
from helpers.served import TOKEN, Served, load, serving

from fourfold.generate.module import GenerationModule

NUMBERS = ("temperature", "top_p", "top_k", "max_tokens")


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


def set_slider(page: Any, name: str, value: float) -> None:
    page.evaluate(
        "([name, value]) => { const slider = document.getElementById(name); slider.value = value;"
        " slider.dispatchEvent(new Event('input')); }",
        [name, value],
    )


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
        # What is out of bounds is not sent.
        sent = len(bodies)
        for name, wrong, bounds in (
            ("top_p", "7", "a number, 0 to 1"),
            ("top_k", "1.5", "a whole number, 0 or more"),
            ("n", "17", "a whole number, 1 to 16"),
            ("max_tokens", "256", "a whole number, 1 to 255"),
        ):
            entry = page.locator(f"label:has(#{name}) .exact")
            right = entry.input_value()
            entry.fill(wrong)
            assert page.locator(f"label:has(#{name}) em").text_content() == bounds
            page.click("#write")
            page.locator("#status.wrong", has_text=bounds).wait_for()
            entry.fill(right)
            assert page.locator(f"label:has(#{name}) em.wrong").count() == 0
        page.fill("#seed", "1.5")
        page.click("#write")
        page.locator("#status.wrong", has_text="Seed: a whole number").wait_for()
        assert len(bodies) == sent


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


def test_the_page_is_dark_where_the_system_is_or_the_reader_wants(
    served: Served, page: Any
) -> None:
    def brightness(place: str, what: str) -> float:
        script = f"element => getComputedStyle(element).{what}"
        found = re.findall(r"[\d.]+", page.locator(place).first.evaluate(script))
        return sum(map(float, found[:3])) / 3

    def is_dark() -> bool:
        paper = brightness("body", "backgroundColor")
        ink = brightness(".words", "color")
        assert abs(paper - ink) > 150
        for field in ("#prompt", "#seed", "#keep", "#status", "#theme", ".head b"):
            assert abs(brightness(field, "color") - paper) > 80, field
        return paper < ink

    page.goto(served.url)
    page.fill("#prompt", "def cat(mat):\n    sat =")
    page.fill("#seed", "5")
    page.locator("label:has(#n) .exact").fill("2")
    page.click("#write")
    page.get_by_text("2 texts").wait_for()
    page.locator(".token").nth(1).click()
    assert not is_dark()
    page.emulate_media(color_scheme="dark")
    assert is_dark()
    theme = page.locator("#theme")
    theme.click()
    page.emulate_media(color_scheme="light")
    assert theme.text_content() == "Theme: dark" and is_dark()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")
    assert theme.text_content() == "Theme: light"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_texts_side_by_side(served: Served, page: Any, config: Path) -> None:
    overrides = ["Generation.seed=3", "Generation.max_dec_len=40"]
    module = GenerationModule(
        load(config, *overrides, "Generation.num_return_sequences=3"), lambda _: None
    )
    [wanted] = module.complete(["the cat sat on"])
    page.goto(served.url)
    page.get_by_text("untrained · 256 tokens").wait_for()
    page.fill("#prompt", "the cat sat on")
    page.fill("#seed", "3")
    for name, value in {"max_tokens": 40, "n": 3}.items():
        set_slider(page, name, value)
    page.keyboard.press("Control+Enter")
    page.get_by_text("3 texts").wait_for()
    assert page.locator(".words").all_text_contents() == [one.text for one in wanted]
    tops = [page.locator(".text").nth(number).bounding_box() for number in range(3)]
    assert len({box["y"] for box in tops}) == 1 and len({box["x"] for box in tops}) == 3
    heads = page.locator(".head span").all_text_contents()
    assert all(re.search(r"^\d+ tokens, (reached|ended)", head) for head in heads), heads
    # By the keyboard: Tab to a text, arrows within it.
    first = page.locator(".words").nth(1).locator(".token")
    first.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert first.nth(2).evaluate("element => element === document.activeElement")
    page.keyboard.press("Enter")
    assert page.locator(".token.chosen").text_content() == first.nth(2).text_content()
    assert page.locator(".words").nth(1).locator(".token[tabindex='0']").count() == 1
    picture(page, "playground_side_by_side")
    page.locator(".take").nth(1).click()
    assert page.locator("#prompt").input_value() == "the cat sat on" + wanted[1].text
    assert page.locator(".text").count() == 0 and page.locator("#keep").is_disabled()


def test_a_conversation(served: Served, page: Any) -> None:
    def answer_of(messages: list[dict[str, str]]) -> str:
        body = {"messages": messages, "seed": 4, "max_tokens": 24}
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
        return reply["choices"][0]["message"]["content"]

    page.goto(served.url)
    page.get_by_text("untrained · 256 tokens").wait_for()
    page.get_by_role("button", name="Chat").click()
    page.fill("#system", "Be brief.")
    page.fill("#seed", "4")
    page.locator("label:has(#max_tokens) .exact").fill("24")
    messages = [{"role": "system", "content": "Be brief."}]
    for number, words in enumerate(("Who sat on the mat?", "When,\nand why?")):
        messages.append({"role": "user", "content": words})
        wanted = answer_of(messages)
        page.fill("#prompt", words)
        page.keyboard.press("Enter")
        page.locator(".turn.assistant").nth(number).wait_for()
        page.get_by_text(re.compile("reached its length|ended by itself")).wait_for()
        said = page.locator(".turn.assistant .words").nth(number)
        assert said.text_content() == wanted and said.locator(".token").count() > 1
        assert page.locator("#prompt").input_value() == ""
        messages.append({"role": "assistant", "content": wanted})
    said.locator(".token").nth(1).click()
    assert page.locator("#detail .taken").count() == 1
    picture(page, "playground_chat")
    page.fill("#seed", "9")
    page.click("#again")
    page.get_by_text("seed 9").wait_for()
    page.get_by_text(re.compile("reached its length|ended by itself")).wait_for()
    assert page.locator(".turn.assistant").count() == 2 and said.text_content() != wanted
    # What is refused is given back, to be changed.
    page.fill("#prompt", "the cat " * 300)
    page.keyboard.press("Enter")
    page.locator("#status.wrong").wait_for()
    assert page.locator("#prompt").input_value() == "the cat " * 300
    assert page.locator(".turn").count() == 4
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    page.fill("#prompt", "a")
    page.keyboard.press("Shift+Enter")
    assert page.locator("#prompt").input_value() == "a\n" and page.locator(".turn").count() == 0
    page.get_by_role("button", name="Text").click()
    assert page.locator("#conversation").is_hidden() and page.locator("#output").is_visible()


def test_markup_in_a_text_stays_text(served: Served, page: Any) -> None:
    page.goto(served.url)
    page.evaluate(
        "startTexts(1); addChunk({text: '<img src=x onerror=fail()>', logprobs: {tokens: ['<img'],"
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
