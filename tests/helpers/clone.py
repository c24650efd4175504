"""A directory like a clone's root, for commands as they are printed.

What makes them quick are its configurations, which are those of the repository with smaller
numbers, and that `fourfold` starts at once, forked from the warm test process.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from helpers.commands import ROOT, look_over
from helpers.forked import SECONDS, fourfold

# Words that bash must read for us.
SHELL_SYNTAX = re.compile(r"[|<>&;$*`~(]|^\w+=")
# The configurations that pages train with; the others they plan with, as they are.
TRAINED = (
    "quickstart.yaml",
    "quickstart_gpt2.yaml",
    "configs_345m_single_card.yaml",
    "configs_1.3B_dp8.yaml",
)

# Run in place of what is printed: what stands left sets up an environment, which is there already.
QUICKSTART = "fourfold quickstart -c configs/gpt/quickstart.yaml --max-mb 2"
IN_PLACE = {"make quickstart": QUICKSTART, "fourfold quickstart": QUICKSTART}
NOT_RUN = (". .venv/bin/activate", ".venv/bin/", "git clone ", "make ", "pip install ")
# Added to `fourfold train`: a few steps beyond those that any command before it has made.
STEPS = 2
SHORT = "-o Engine.eval_iters=1 -o Engine.test_iters=1 -o Engine.max_steps="


@dataclass
class Clone:
    """A directory like a clone's root, and a shell in it that remembers `cd` and `export`."""

    root: Path
    place: Path = field(init=False)
    variables: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS

    def __post_init__(self) -> None:
        self.place = self.root

    def run(self, command: str) -> str:
        """What the command prints; it must end with exit code 0."""
        command = IN_PLACE.get(command, command)
        words = [] if "\n" in command else shlex.split(command)
        if command.startswith(NOT_RUN):
            look_over([command], self.place)
            return ""
        if words[:1] == ["cd"]:
            self.place = (self.place / words[1]).resolve()
            return ""
        if words[:1] == ["export"]:
            self.variables |= dict(word.split("=", 1) for word in words[1:])
            return ""
        if command.startswith("python benchmarks/"):
            command += " --help"
        if words[:2] == ["fourfold", "train"]:
            self.steps += STEPS
            words += f"{SHORT}{self.steps}".split()
        if words[:1] == ["fourfold"] and not SHELL_SYNTAX.search(command):
            done = fourfold(*words[1:], cwd=self.place, environment=self.variables)
            code, output = done.returncode, done.stdout + done.stderr
        else:
            code, output = self._bash(command)
        assert code == 0, f"{command}\nexit code {code}\n{output[-6000:]}"
        return output

    def _bash(self, command: str) -> tuple[int, str]:
        paths = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.place,
            env=os.environ | paths | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        return result.returncode, result.stdout


def cloned(directory: Path) -> Clone:
    """What a clone has that commands read, its configurations shrunk, and a little data."""
    for name in ("configs", "benchmarks", "examples"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, directory / name)
    for file in directory.rglob("*.yaml"):
        if file.name in TRAINED:
            shrink(file)
    shutil.copytree(ROOT / "tests" / "fixtures" / "megatron_single", directory / "data")
    return Clone(directory)


def shrink(file: Path) -> None:
    """The same run of a size for a processor."""
    content = yaml.safe_load(file.read_text())
    content["Model"] |= {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
    content["Model"] |= {"ffn_hidden_size": 64}
    engine = content["Engine"]
    engine |= {"max_steps": STEPS, "eval_freq": 2, "eval_iters": 1, "test_iters": 1}
    engine["mix_precision"] = {"dtype": "float32"}
    engine["save_load"]["save_steps"] = 2
    content["Data"]["dataset"] |= {"max_seq_len": 32}
    content.setdefault("Generation", {})["max_dec_len"] = 8
    if "Eval" in content:
        content["Eval"]["max_seq_len"] = 32
    file.write_text(yaml.safe_dump(content))


def clone_with_a_run(factory: pytest.TempPathFactory) -> Path:
    """A clone in which the quickstart has been run; made once, whichever worker comes first."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    template = shared / "clone_with_a_run"
    with open(shared / "clone_with_a_run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not template.exists():
            building = Path(tempfile.mkdtemp(dir=shared))
            cloned(building).run("make quickstart")
            building.rename(template)
    return template
