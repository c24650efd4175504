"""Every command in the README runs, shrunk only by overrides after it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL_MODEL = (
    "-o Model.hidden_size=32 -o Model.num_layers=1 -o Model.num_attention_heads=2 "
    "-o Model.ffn_hidden_size=64 -o Model.vocab_size=1024 -o Engine.max_steps=2 "
    "-o Data.dataset.max_seq_len=16 -o Data.dataset.eos_token_id=0 "
    "-o Engine.eval_iters=1 -o Engine.test_iters=1"
)
# The quickstart's data and tokenizer, so its vocabulary stays; a layer for each pipeline stage.
SMALL_LAYOUT = (
    "-o Model.hidden_size=32 -o Model.num_layers=2 -o Model.num_attention_heads=2 "
    "-o Model.ffn_hidden_size=64 -o Engine.max_steps=2 -o Engine.eval_iters=1 "
    "-o Engine.test_iters=1"
)
# What is added to a command so that it takes seconds; the command itself stays as printed.
SHRINK = {
    "fourfold train": SMALL_MODEL,
    "fourfold quickstart": "--max-mb 2 -o Engine.max_steps=2 -o Engine.test_iters=1",
    "fourfold evaluate": "-o Engine.test_iters=1",
    "fourfold data index": "-o Engine.max_steps=2",
}
# `make` builds environments from the registry; that it does is seen when the suite itself runs.
# The environment is active already: the tests run inside it.
NOT_RUN = {
    "make quickstart": "fourfold quickstart",
    "make test": None,
    ". .venv/bin/activate": None,
}


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    lines = (line.split(" #")[0].strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like a clone's root, with data where the README expects it."""
    directory = tmp_path_factory.mktemp("clone")
    for name in ("configs", "benchmarks"):
        shutil.copytree(ROOT / name, directory / name)
    shutil.copytree(ROOT / "tests" / "fixtures" / "megatron_single", directory / "data")
    return directory


def run(command: str, workplace: Path) -> str:
    bin_directory = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{bin_directory}:{os.environ['PATH']}"}
    result = subprocess.run(
        shlex.split(command),
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def test_the_two_commands_come_first_and_make_knows_them() -> None:
    assert readme_commands()[:2] == ["make quickstart", "make test"]
    for target in ("quickstart", "test"):
        dry = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert ("fourfold quickstart" if target == "quickstart" else "pytest") in dry


def test_commands_of_the_readme_run(workplace: Path) -> None:
    commands = [NOT_RUN.get(command, command) for command in readme_commands()]
    for command in filter(None, commands):
        words = command.split()
        verb = " ".join(words[: 3 if words[1] == "data" else 2])
        shrink = SHRINK.get(verb, "")
        if command.startswith("python benchmarks/"):
            shrink = "--help"
        elif "--nproc" in words:
            shrink = SMALL_LAYOUT
        output = run(f"{command} {shrink}", workplace)
        if verb == "fourfold quickstart":
            assert "Generation: " in output
            assert (workplace / "runs/quickstart/output/loss_curve.png").exists()
