"""For mkdocs: the Chinese pages, the switch between languages, the link to the repository.

The front page in Chinese is README.zh-CN.md, its links made those of the site. A page below `zh/`
has the theme's words in Chinese; the switch leads to the same page in the other language where
there is one. Chinese pages are in the navigation of Chinese pages alone.
"""

from __future__ import annotations

import re
import subprocess
from copy import copy
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify_unicode
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation

CHINESE = "zh/"
FRONT = f"{CHINESE}index.md"
# Pages of the site under another name; what else is outside of docs/ keeps its words, unlinked.
INSIDE = {"README.md": "index.md", "README.zh-CN.md": FRONT, "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)")
SWITCH = "[English](README.md) | [简体中文](README.zh-CN.md)\n"  # the site has its own
ALTERNATE = re.compile(r'\s*<link rel="alternate" [^>]*hreflang[^>]*>')
SSH = re.compile(r"(?:ssh://)?[\w.-]+@([\w.-]+?)(?::\d+/|[:/])(.+)")


def on_config(config: Any) -> Any:
    # Headings in Chinese have anchors too.
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify_unicode
    if not config.repo_url and (address := repository(Path(config.config_file_path).parent)):
        config.repo_url = address
        config.repo_name = address.split("://")[1].partition("/")[2]
    return config


def repository(root: Path) -> str | None:
    """Where the clone came from; None for a clone of a directory, or no clone."""
    asked = subprocess.run(
        ["git", "-C", str(root), "config", "--get", "remote.origin.url"],
        capture_output=True,
        text=True,
    )
    return web_address(asked.stdout.strip())


def web_address(origin: str) -> str | None:
    """The page a browser finds it at. What stands before the host may be a password."""
    found = SSH.fullmatch(origin)
    address = f"https://{found[1]}/{found[2]}" if found else origin
    address = re.sub(r"^(https?://)[^/@]*@", r"\1", address)
    return address.removesuffix(".git") if address.startswith(("https://", "http://")) else None


def on_files(files: Files, *, config: Any) -> Files:
    root = Path(config["config_file_path"]).parent
    text = (root / "README.zh-CN.md").read_text(encoding="utf-8").replace(SWITCH, "", 1)
    translated = {file.src_uri for file in files if file.src_uri.startswith(CHINESE)}

    def link_of_the_site(found: re.Match[str]) -> str:
        is_image, words, target, place = found.groups()
        if target.startswith(("http://", "https://")):
            return found[0]
        page = INSIDE.get(target, target.removeprefix("docs/") if target[:5] == "docs/" else "")
        if not page:
            return words
        chinese = CHINESE + page
        page = page if page == FRONT else chinese if chinese in translated else f"../{page}"
        return f"{is_image}[{words}]({page.removeprefix(CHINESE)}{place or ''})"

    files.append(File.generated(config, FRONT, content=LINK.sub(link_of_the_site, text)))
    return files


def on_nav(nav: Navigation, *, config: Any, files: Files) -> Navigation:
    """No page is followed by one of the other language."""
    for page in nav.pages:
        for side in ("previous_page", "next_page"):
            other = getattr(page, side)
            if other and is_chinese(other.url) != is_chinese(page.url):
                setattr(page, side, None)
    return nav


def on_page_context(context: Any, *, page: Any, config: Any, nav: Navigation) -> Any:
    """The theme is asked for its words when the page is written, which is next."""
    chinese = is_chinese(page.url)
    config.theme["language"] = "zh" if chinese else "en"
    urls = {other.url for other in nav.pages}
    for entry in config.extra["alternate"]:
        front = CHINESE if entry["lang"] == "zh" else ""
        same = front + page.url.removeprefix(CHINESE)
        entry["link"] = (same if same in urls else front) or "./"
    context["nav"] = copy(nav)
    last = nav.items[-1:]
    context["nav"].items = last + nav.items[:-1] if chinese else nav.items[:-1]
    return context


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Of these the theme's script asks for site maps, which there are none of; the switch has the
    same addresses."""
    return ALTERNATE.sub("", output)


def is_chinese(url: str) -> bool:
    return url.startswith(CHINESE)
