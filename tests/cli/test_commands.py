"""The command as a user meets it: exit codes, messages, nothing heavy before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "gpt"
PARALLEL = CONFIGS / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml"


def fourfold(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fourfold", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def test_help_lists_the_verbs_without_importing_torch() -> None:
    result = fourfold("--help")
    assert result.returncode == 0
    assert all(verb in result.stdout for verb in ("train", "generate", "quickstart", "config"))
    code = (
        "import sys, fourfold.cli; "
        "assert not {'torch', 'numpy', 'pydantic', 'yaml'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_file_shows_and_checks(file: Path) -> None:
    assert fourfold("config", "check", "-c", str(file)).returncode == 0


def test_show_prints_derived_values() -> None:
    file = CONFIGS / "single" / "configs_1.3B_single_card.yaml"
    result = fourfold("config", "show", "-c", str(file), "--no-comments")
    assert result.returncode == 0
    assert "ffn_hidden_size: 8192" in result.stdout


def test_schema_is_json_schema() -> None:
    schema = json.loads(fourfold("config", "schema").stdout)
    assert "Distributed" in schema["properties"]
    steps = schema["$defs"]["Engine"]["properties"]["max_steps"]
    assert steps["default"] == 500000
    assert steps["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
    file = str(CONFIGS / "quickstart.yaml")
    schema = json.loads(fourfold("config", "schema", "-c", file, "-o", "Engine.max_steps=7").stdout)
    assert schema["$defs"]["Engine"]["properties"]["max_steps"]["default"] == 7
    assert schema["$defs"]["Model"]["properties"]["hidden_size"]["default"] == 256


def test_all_problems_come_at_once_with_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("Model:\n  hiden_size: 64\n  num_attention_heads: three\n")
    result = fourfold("config", "check", "-c", str(file), "-o", "Engine.max_steps=-1")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"{file}:2" in result.stderr and "hidden_size" in result.stderr
    assert f"{file}:3" in result.stderr and "num_attention_heads" in result.stderr
    assert "Engine.max_steps=-1" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "-c", "missing.yaml"], "missing.yaml"),
        (["train"], "--config"),
        (["dance"], "dance"),
        (["train", "-c", "tiny.yaml", "-o", "Data.dataset.input_dir=./nothing"], "nothing"),
        (["train", "-c", "tiny.yaml", "-o", "Distributed.mp_degree=2"], "2 process"),
        (["train", "-c", str(PARALLEL)], "128 process"),
        (["generate", "-c", "tiny.yaml"], "Global.tokenizer"),
    ],
    ids=lambda value: " ".join(value[-1:]) if isinstance(value, list) else None,
)
def test_bad_input_gets_a_clear_answer(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(
        "Model: {vocab_size: 64, hidden_size: 32, num_layers: 1, num_attention_heads: 2}\n"
        "Data: {batch_size: {global_batch_size: 2}}\n"
    )
    result = fourfold(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "output").exists()
