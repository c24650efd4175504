"""Pages of one file: HTML with its own style and script, which loads nothing from elsewhere.

    load_page(package, name)      the text of a page that is shipped with a package
    policy_of(text, ...)          its Content-Security-Policy, with the hashes of what is in it
    with_data(text, document)     a page to send: with its policy and a document inside

A page has one `<style>` and one `<script>`, no attributes with style or code, and for `with_data`
the two places below. What pages have in common is put into the script where it says `THEME_PLACE`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

THEME_PLACE = "// <theme.js>\n"
POLICY_PLACE = "<!-- policy -->"
DATA_PLACE = '<script type="application/json" id="document">null</script>'
# What could end the element or begin a comment, and what old parsers of JavaScript take for an end
# of line; in a string of JSON, where alone they occur, escapes mean the same.
UNSAFE = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def load_page(package: str, name: str) -> str:
    text, theme = (
        files(where).joinpath(file).read_text(encoding="utf-8")
        for where, file in ((package, name), ("fourfold", "theme.js"))
    )
    return text.replace(THEME_PLACE, theme, 1)


def policy_of(text: str, *, connects: bool) -> str:
    """For a page that may ask its own server (`connects`), or nobody."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "img-src data:",
            *(["connect-src 'self'"] if connects else []),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def with_data(text: str, document: Any) -> str:
    """The page as a file: whatever texts the document has, they stay data."""
    policy = policy_of(text, connects=False)
    data = json.dumps(document, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    head = f'<meta http-equiv="content-security-policy" content="{policy}">'
    before, after = text.replace(POLICY_PLACE, head, 1).split(DATA_PLACE)
    return before + DATA_PLACE.replace("null", data.translate(UNSAFE)) + after


def _hash(text: str, tag: str) -> str:
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
