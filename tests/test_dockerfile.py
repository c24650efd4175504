"""The Dockerfile, as far as it can be looked at without Docker."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest
from helpers.commands import ROOT

LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
INSTRUCTIONS = [line for line in LINES if line.strip() and not line.startswith("#")]


def words_of(name: str) -> list[str]:
    """What follows each instruction of that name."""
    return [line.split(None, 1)[1] for line in INSTRUCTIONS if line.split()[0] == name]


def test_every_instruction_is_one_of_dockers() -> None:
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in INSTRUCTIONS} == known
    assert [line.split()[0] for line in INSTRUCTIONS][:2] == ["ARG", "FROM"]


def test_what_it_copies_is_there_and_is_what_the_package_needs() -> None:
    copied = {source for words in words_of("COPY") for source in words.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "fourfold", "constraints.txt", project["readme"]} <= copied


def test_torch_is_asked_for_by_its_pinned_version() -> None:
    (asked,) = re.findall(r'"\$\((grep [^"]*)\)"', " ".join(words_of("RUN")))
    done = subprocess.run(["sh", "-c", asked], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"torch==2\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("name", ["ENTRYPOINT", "CMD"])
def test_no_shell_stands_between_a_signal_and_the_run(name: str) -> None:
    (words,) = words_of(name)
    assert all(isinstance(word, str) for word in json.loads(words))


def test_commands_are_shell() -> None:
    for command in words_of("RUN"):
        done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
