"""For mkdocs: the Chinese README as a page of the site, its links made those of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGE = "zh.md"
# Pages of the site under another name; what else is outside of docs/ keeps its words, unlinked.
INSIDE = {"README.md": "index.md", "README.zh-CN.md": PAGE, "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    root = Path(config["config_file_path"]).parent
    text = (root / "README.zh-CN.md").read_text(encoding="utf-8")
    files.append(File.generated(config, PAGE, content=LINK.sub(_link_of_the_site, text)))
    return files


def _link_of_the_site(found: re.Match[str]) -> str:
    is_image, words, target, place = found.groups()
    if target.startswith(("http://", "https://")):
        return found[0]
    inside = INSIDE.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
    return f"{is_image}[{words}]({inside}{place or ''})" if inside else words
