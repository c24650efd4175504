"""The playground: one file, served with a policy that allows its own script and style alone."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


def load_page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy. The hashes are those of what is in the file."""
    text = files("fourfold.serve").joinpath("playground.html").read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return text.encode(), policy


def _hash(text: str, tag: str) -> str:
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
