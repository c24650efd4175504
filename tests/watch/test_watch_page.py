"""The page of runs, as a file and from a server: nothing from elsewhere; it works in a browser."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.browser import picture
from helpers.forked import fourfold
from helpers.made_up_runs import DOCUMENTS, MadeUpRun, whole_run

from fourfold.pages import load_page
from fourfold.serve import Limits
from fourfold.serve.server import bind, bounded_server, url_of
from fourfold.watch import open_runs, show_table, write_report
from fourfold.watch.reading import PAGE
from fourfold.watch.server import Following, create_app

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--\u2028 & \x1b[31m"
TOKEN = "a-token-of-some-length"


def spiked_run(directory: Path, text: str = "the worst words") -> MadeUpRun:
    """A run with a spike at step 60 that crashed after step 99."""
    run = MadeUpRun(directory)
    run.start()
    for step in range(1, 100):
        if step == 60:
            documents = json.loads(json.dumps(DOCUMENTS))
            documents["documents"][0] |= {"file": text, "worst": [{"text": text}]}
            documents["gradient_norms"][text] = 1.5
            run.train(loss=8.25, grad_norm=31.0)
            run.spike(documents)
            run.notice(text, "WARNING")
        else:
            run.train()
        if step % 20 == 0:
            run.evaluate()
    return run


def report(tmp_path: Path, *runs: Path, price: float | None = None) -> Path:
    write_report(open_runs(runs), tmp_path / "report.html", price)
    return tmp_path / "report.html"


# -- the file -----------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = report(tmp_path, whole_run(tmp_path / "run", steps=5).write()).read_text()
    (policy,) = re.findall(r'http-equiv="content-security-policy" content="([^"]*)"', text)
    assert "unsafe" not in policy and "http" not in policy and "connect-src" not in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", text)
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+="
    assert not re.search(forbidden, load_page(*PAGE))


def test_texts_of_a_run_stay_data(tmp_path: Path) -> None:
    directory = tmp_path / "x<script>alert(2)<" / "run<img src=x>"
    text = report(tmp_path, spiked_run(directory, HOSTILE).write()).read_text()
    (data,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', text)
    assert not set("<>&\u2028") & set(data)
    (run,) = json.loads(data)["runs"]
    assert run["warnings"][0]["text"] == HOSTILE and run["name"] == "run<img src=x>"
    assert text.count("<script") == 2 and "<img" not in text


@pytest.mark.parametrize("runs", [1, 2, 6])
def test_long_runs_make_small_pages(tmp_path: Path, runs: int) -> None:
    directories = []
    for number in range(runs):
        made = whole_run(tmp_path / f"run_{number}", steps=6000 // runs, ranks=8)
        made.train(loss=123.25)
        for _ in range(30):
            made.spike(DOCUMENTS)
        directories.append(made.write())
    file = report(tmp_path, *directories, price=2.0)
    assert file.stat().st_size < 300_000
    (data,) = re.findall(r'id="document">(.*?)</script>', file.read_text())
    assert max(json.loads(data)["runs"][0]["curves"]["loss"]["y"]) == 123.25  # no spike is lost


def test_the_command_writes_a_report(tmp_path: Path) -> None:
    whole_run(tmp_path / "run", steps=5).write()
    done = fourfold("report", tmp_path / "run", "-o", tmp_path / "page.html", "--price", "2")
    assert done.returncode == 0 and "page.html" in done.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    refused = fourfold("report", tmp_path / "none", "-o", tmp_path / "page.html")
    assert refused.returncode == 2 and "no such directory" in refused.stderr


# -- the terminal -------------------------------------------------------------------------------


def test_lines_for_a_file_and_a_table_for_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = whole_run(tmp_path / "one", steps=40).write()
    two = spiked_run(tmp_path / "two", HOSTILE).write()
    lines = io.StringIO()
    show_table(open_runs([one, two]), lines, price=2.0)  # ends by itself: both runs have ended
    first, second = lines.getvalue().splitlines()
    assert first.startswith("one, finished, step 40, loss ") and "cost " in first
    assert second.startswith("two, crashed, step 99, loss ")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        screen = Terminal()
        show_table(open_runs([one, two]), screen)
        lines = screen.getvalue().splitlines()
        assert "tokens/s" in lines[0] and ("loss by step" in lines[0]) == (columns == "200")
        assert "spike at step 60" in screen.getvalue() and max(map(len, lines[:3])) < 210
        assert "\x1b[31m" not in screen.getvalue()
    assert "\\x1b[31m" in screen.getvalue()


# -- the server ---------------------------------------------------------------------------------


@contextmanager
def serving(*runs: Path, token: str | None = None) -> Iterator[str]:
    listener = bind("127.0.0.1", 0, token)
    server = bounded_server(create_app(Following(open_runs(runs), None), token), Limits())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_the_server_tells_what_is_new(tmp_path: Path) -> None:
    made = spiked_run(tmp_path / "run")
    with serving(made.write()) as url:
        page = httpx.get(url)
        assert "connect-src 'self'" in page.headers["content-security-policy"]
        assert page.text == load_page(*PAGE)
        first = httpx.get(f"{url}/news?known=").json()
        assert first["runs"][0]["step"] == 99
        assert httpx.get(f"{url}/news?known=1").json()["runs"] == [None]
        made.train()
        made.write()
        assert httpx.get(f"{url}/news?known=1").json()["runs"][0]["step"] == 100
        assert httpx.get(f"{url}/news?known=9,x,²,-3").json()["runs"][0]["step"] == 100
        assert httpx.get(url, headers={"host": "evil.example"}).status_code == 403
        assert httpx.get(f"{url}/../metrics.jsonl").status_code == 404
        assert httpx.post(f"{url}/news").status_code == 405
        (made.directory / "metrics.jsonl").unlink()
        (made.directory / "metrics.jsonl").mkdir()
        away = httpx.get(f"{url}/news")
        assert away.status_code == 503 and "cannot be read" in away.text
        (made.directory / "metrics.jsonl").rmdir()
        made.write()
    with serving(made.directory, token=TOKEN) as url:
        assert httpx.get(url).status_code == 200
        assert httpx.get(f"{url}/news").status_code == 401
        allowed = httpx.get(f"{url}/news", headers={"authorization": f"Bearer {TOKEN}"})
        assert allowed.json()["runs"][0]["step"] == 100


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    whole_run(tmp_path / "run", steps=1).write()
    refused = fourfold("watch", tmp_path / "run", "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 2 and "read what the runs recorded" in refused.stderr
    refused = fourfold("watch", tmp_path / "run", "--text", "--port", "1")
    assert refused.returncode == 2 and "--port" in refused.stderr


# -- in a browser -------------------------------------------------------------------------------


def test_the_page_of_a_run_that_crashed_and_spiked(tmp_path: Path, page: Any) -> None:
    directory = spiked_run(tmp_path / "spiked", HOSTILE).write(torn=True)
    page.goto(report(tmp_path, directory).as_uri())
    assert page.locator(".badge").text_content() == "crashed"
    assert "killed after step 99" in page.locator(".why").first.text_content()
    titles = page.locator("figure:visible h2").all_text_contents()
    assert (
        titles[:3] == ["Loss", "Learning rate", "Gradient norm"] and "Share of a step" not in titles
    )
    # From the mark in the curve to the documents, by a click and by the keyboard.
    details = page.locator("#spikes details")
    assert details.get_attribute("open") is None
    page.locator(".spike").click()
    assert details.get_attribute("open") is not None
    assert details.locator("tbody tr").count() == 2
    assert details.locator(".sample").first.text_content() == HOSTILE
    page.locator("#spikes summary").press("Enter")
    page.locator(".spike").press("Enter")
    assert details.get_attribute("open") is not None
    picture(page, "crashed_and_spiked")


def test_two_runs_compared_with_the_keyboard(tmp_path: Path, page: Any) -> None:
    one = whole_run(tmp_path / "one", steps=120, ranks=4).write()
    two = whole_run(tmp_path / "two", steps=80, ranks=4, seconds=1.5).write()
    page.goto(report(tmp_path, one, two, price=2.0).as_uri())
    loss = page.locator("figure").first
    loss.focus()
    page.keyboard.press("Home")
    assert loss.locator(".read span").first.text_content() == "step 1"
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight"):
        page.keyboard.press(key)
    assert loss.locator(".read span").first.text_content() == "step 13"
    # The other charts follow.
    assert page.locator("figure").nth(2).locator(".read span").first.text_content() == "step 13"
    assert page.locator("figure").nth(3).locator(".read b").count() == 2
    page.keyboard.press("End")  # of the longer run, where the other has no value
    assert page.locator("figure").nth(3).locator(".read b").count() == 1
    picture(page, "compared")
    page.keyboard.press("Escape")
    assert loss.locator(".read b").count() == 0
    rows = page.locator("#time tbody tr").all_text_contents()
    assert rows[0].startswith("training") and rows[-1].startswith("wall clock")
    # A name hides its run, from the charts and the tables.
    page.get_by_role("button", name="two").press("Enter")
    assert page.locator("figure").first.locator(".c1").count() == 0
    assert page.locator("#time thead th").count() == 4
    theme = page.locator("#theme")
    theme.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert theme.text_content() == "Theme: dark"


def test_the_page_follows_a_run(tmp_path: Path, page: Any) -> None:
    made = MadeUpRun(tmp_path / "run")
    made.start()
    with serving(made.write(), token=TOKEN) as url:
        page.goto(url)
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        assert page.locator("figure:visible").count() == 0
        for _ in range(7):
            made.train()
        made.write()
        page.locator("dd", has_text=re.compile("^7$")).wait_for()
        page.locator("figure:visible h2", has_text="Loss").wait_for()
        assert page.locator("#entry").is_hidden()
