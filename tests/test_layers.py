"""The package is a straight line: each part imports only from parts to its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ORDER = (
    "errors heartbeat waiting signals processors shards config tokenizer data model mesh parallel "
    "cost optim metrics checkpoint convert tools engine generate evaluate serve plan launch cli "
    "flags"
)
LINE = ORDER.split()
PACKAGE = Path(__file__).parent.parent / "fourfold"


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    """Every `fourfold.<part>` this file imports, at module level or delayed."""
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; spell the part's name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("fourfold.")}
    return parts & set(LINE)


FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if not part_of(file).startswith("__")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_left_to_right(file: Path) -> None:
    own = part_of(file)
    assert own in LINE, f"{own} has no place in the line"
    right = {part for part in imported_parts(file) if LINE.index(part) > LINE.index(own)}
    assert not right, f"{own} imports {sorted(right)}, which stand to its right"


@pytest.mark.parametrize(
    "part", ["config", "tokenizer", "errors", "heartbeat", "signals", "processors"]
)
def test_light_parts_import_no_torch(part: str) -> None:
    for file in FILES:
        if part_of(file) == part:
            assert "import torch" not in file.read_text(), file


def test_training_imports_no_tools() -> None:
    """The tools around token files may grow without making training slower to read or start."""
    doors = {"tools", "cli", "flags"}
    for file in FILES:
        if part_of(file) not in doors:
            assert "tools" not in imported_parts(file), file
