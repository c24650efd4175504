"""The command blocks of Markdown pages: found, or looked over where they cannot be run.

A block is a fence marked `bash`, `shell`, `sh` or `console` (there, the lines after `$ `). One that
cannot run in a test has, on the line before it, a comment `<!-- needs: eight GPUs -->`; its words
are then checked against the options of what they call.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from fourfold import cli

ROOT = Path(__file__).parent.parent.parent
SHELLS = ("bash", "shell", "sh", "console")
NEEDS = re.compile(r"<!-- needs: (.+) -->")
HERE_DOCUMENT = re.compile(r"<<\s*'?(\w+)'?")
# Programs of others, whose options are their affair.
OTHERS = (
    *(
        ".",
        "curl",
        "docker",
        "export",
        "git",
        "kubectl",
        "mkdir",
        "mpiexec",
        "mpirun",
        "nvidia-smi",
        "pip",
        "python",
        "python3",
        "sbatch",
        "sky",
        "tar",
        "wget",
    ),
    ".venv/bin/pytest",
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    commands: tuple[str, ...]
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    lines = page.read_text().splitlines()
    blocks = []
    for at, kind, content in fences(lines):
        if kind in SHELLS:
            marker = NEEDS.search(lines[at - 1]) if at else None
            commands = tuple(commands_of(content, kind))
            blocks.append(Block(page, at + 1, commands, marker and marker.group(1)))
    return blocks


def fences(lines: list[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Every fenced block: the index of its first line, the word on it, the lines inside."""
    start, kind, indent = None, "", 0
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start, kind = number, line.strip().removeprefix("```").strip()
            indent = len(line) - len(line.lstrip())
        else:
            yield start, kind, [text[indent:] for text in lines[start + 1 : number]]
            start = None


def commands_of(content: list[str], kind: str) -> Iterator[str]:
    if kind == "console":
        content = [line[2:] for line in content if line.startswith(("$ ", "> "))]
    waiting = iter(content)
    for line in waiting:
        command = line
        while command.endswith("\\"):
            command = command[:-1] + " " + next(waiting).strip()
        if here := HERE_DOCUMENT.search(command):
            for inner in waiting:
                command += f"\n{inner}"
                if inner == here.group(1):
                    break
        else:
            command = re.sub(r"(^|\s)#.*", "", command).strip()
        if command:
            yield command


def look_over(commands: Iterable[str], place: Path = ROOT) -> None:
    """Check without running: each program exists, and so does every option of ours it is given."""
    for command in commands:
        for part in re.split(r"&&|;|\|", command.splitlines()[0]):
            words = shlex.split(part)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words[:1] == ["cd"]:
                # From where one is, or from the root; else it is one that commands before it make.
                there, from_root = (Path(os.path.normpath(at / words[1])) for at in (place, ROOT))
                place = from_root if from_root.is_dir() and not there.is_dir() else there
            elif words:
                problem = problem_with(words, place)
                assert not problem, f"{command}: {problem}"


def problem_with(words: list[str], place: Path) -> str | None:
    script = next((word for word in words if word.endswith((".py", ".sh"))), None)
    if words[0] in ("python", "bash", "sh") and script:
        return problem_with_script(words, script, place)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [word for word in words[1:] if not re.search("=|^-", word)]
        unknown = [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
        return f"the Makefile has no target {unknown}" if unknown else None
    if words[:2] == ["python", "-m"] and words[2].startswith("fourfold."):
        return None if find_spec(words[2]) else f"no module {words[2]}"
    if "fourfold" in words:
        return problem_with_options(words[words.index("fourfold") + 1 :])
    return None if words[0] in OTHERS else f"is {words[0]!r} a command?"


def problem_with_script(words: list[str], script: str, place: Path) -> str | None:
    files = [base / script for base in (place, ROOT) if (base / script).is_file()]
    if not files:
        return f"no file {script}"
    if script.endswith(".sh"):
        return None
    at = words.index(script)
    launcher = options_among(words[words.index("-m") + 2 : at]) if "-m" in words else set()
    unknown = launcher - set(re.findall(r"--?\w+", help_of("-m", "fourfold.launch")))
    known = help_of(str(files[0]))
    unknown |= {name for name in options_among(words[at + 1 :]) if name not in known}
    return f"unknown {sorted(unknown)}" if unknown else None


@functools.cache
def help_of(*program: str) -> str:
    result = subprocess.run(
        [sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout


def problem_with_options(words: list[str]) -> str | None:
    """Follow the verbs down; then every word that begins with a dash is an option there."""
    found: Any = typer.main.get_command(cli.command_line())
    while verbs := getattr(found, "commands", None):
        if not words or words[0] not in verbs:
            return f"no verb {' '.join(words[:1])!r}"
        found, words = verbs[words[0]], words[1:]
    known = {name for option in found.params for name in [*option.opts, *option.secondary_opts]}
    unknown = options_among(words) - known - {"-h", "--help"}
    return f"unknown {sorted(unknown)}" if unknown else None


def options_among(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
