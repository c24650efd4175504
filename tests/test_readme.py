"""Every command of the README runs, in both its languages, and the two that matter come first."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.clone import Clone, clone_with_a_run
from helpers.commands import ROOT, blocks_of, look_over

from fourfold.cli.quickstart import PROMPTS

ENGLISH = ROOT / "README.md"
CHINESE = ROOT / "README.zh-CN.md"


def test_the_two_commands_come_first_and_make_knows_them() -> None:
    assert blocks_of(ENGLISH)[0].commands == ("make quickstart", "make test")
    for target in ("quickstart", "test"):
        dry = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert ("fourfold quickstart" if target == "quickstart" else "pytest") in dry


def test_commands_of_the_readme_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = clone_with_a_run(tmp_path_factory)
    clone = Clone(shutil.copytree(template, tmp_path_factory.mktemp("readme") / "clone"))
    for block in blocks_of(ENGLISH):
        if block.needs:
            look_over(block.commands)
            continue
        for command in block.commands:
            output = clone.run(command)
            if command == "make quickstart":
                assert all(prompt in output for prompt in PROMPTS)
                assert (clone.root / "runs/quickstart/output/loss_curve.png").exists()


def test_the_chinese_readme_has_the_same_commands() -> None:
    assert commands_of(CHINESE) == commands_of(ENGLISH)


def commands_of(page: Path) -> list[tuple[str, ...]]:
    return [block.commands for block in blocks_of(page)]


def test_the_chinese_readme_has_the_same_parts() -> None:
    """Headings, tables, links and pictures, one for one: neither language knows more."""
    english, chinese = ENGLISH.read_text(), CHINESE.read_text()
    for part in (r"(?m)^##? ", r"(?m)^\|", r"(?m)^- ", r"(?m)^!\[", r"(?m)^  \w+[./]"):
        assert len(re.findall(part, english)) == len(re.findall(part, chinese)), part
    assert sorted(re.findall(r"\]\(([^)]+)\)", english)) == sorted(
        re.findall(r"\]\(([^)]+)\)", chinese)
    )
    assert re.findall(r"\b\d+\.\d+\b", english) == re.findall(r"\b\d+\.\d+\b", chinese)
