"""`python -m fourfold.config`: write again what is made from the declarations.

Rewrites docs/configuration.md and the comments of every file under configs/, keeping the values
and the first comment of each. Run from the repository's root.
"""

from __future__ import annotations

from pathlib import Path

from fourfold.config.fields import render_yaml
from fourfold.config.reference import markdown_reference
from fourfold.config.schema import Config
from fourfold.config.yaml_nodes import parse_document, plain


def annotated(text: str, name: str) -> str:
    """The same configuration with every comment but the first paragraph made from the tree."""
    first = text.split("\n\n", 1)[0]
    header = f"{first}\n\n" if all(line.startswith("#") for line in first.splitlines()) else ""
    return header + render_yaml(Config, plain(parse_document(text, name)))


def main() -> None:
    Path("docs/configuration.md").write_text(markdown_reference())
    for path in sorted(Path("configs").rglob("*.yaml")):
        path.write_text(annotated(path.read_text(), str(path)))


if __name__ == "__main__":
    main()
