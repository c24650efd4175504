"""The command as a user meets it: exit codes, messages, nothing heavy before it is needed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.forked import fourfold

from fourfold import __version__
from fourfold.cli import main

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "gpt"
PARALLEL = CONFIGS / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml"


def test_help_lists_the_verbs_without_importing_torch() -> None:
    command = [sys.executable, "-m", "fourfold", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0
    assert all(verb in result.stdout for verb in ("train", "generate", "quickstart", "config"))
    code = (
        "import sys, fourfold.cli; "
        "assert not {'torch', 'numpy', 'pydantic', 'yaml'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_names_what_a_report_needs() -> None:
    said = fourfold("--version").stdout
    python = ".".join(map(str, sys.version_info[:3]))
    assert said == f"fourfold {__version__} (torch {version('torch')}, Python {python})\n"


def test_shells_can_complete_verbs_and_options() -> None:
    plain = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = fourfold("--show-completion", "bash", environment=plain)
    assert "complete -o default -F" in shown.stdout
    for words, place, expected in (
        ("fourfold pl", "1", "plan"),
        ("fourfold plan --ex", "2", "--explain"),
    ):
        code = "from fourfold.cli import command_line; command_line()(prog_name='fourfold')"
        asked = {"_FOURFOLD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked
        )
        assert expected in result.stdout.split(), result


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m fourfold config schema | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "{\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--cluster", "8xA100", "--emit", "none/x.yaml"], "--emit none/x.yaml cannot"),
        (["plan", "--cluster", "8xA100", "--plot", "none/x.png"], "--plot none/x.png cannot"),
        (["evaluate", "--output", "/proc/nope.json"], "--output /proc/nope.json cannot"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(*words, "-c", str(CONFIGS / "quickstart.yaml")) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err


def test_an_evaluation_is_shown_even_if_its_file_fails_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"

    def measure(*_: object, **__: object) -> SimpleNamespace:
        out.mkdir()  # meanwhile
        return SimpleNamespace(to_dict=dict, table=lambda: "loss 1.5")

    monkeypatch.setattr("fourfold.evaluate.evaluate", measure)
    file = str(CONFIGS / "quickstart.yaml")
    assert end("evaluate", "-c", file, "--output", str(out)) == 2
    told = capsys.readouterr()
    assert told.out == "loss 1.5\n" and f"{out}: Is a directory" in told.err


def end(*words: str) -> object:
    """The exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_a_path_of_the_users_that_fails_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a verb did not foresee; a path that is not theirs is a fault of ours."""

    def fail(path: str) -> Callable[..., None]:
        def load(*_: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system", path)

        return load

    def check(*words: str, path: str) -> object:
        monkeypatch.setattr("fourfold.config.load_config", fail(path))
        return end("config", "check", *words)

    assert check("-c", "/mnt/a.yaml", path="/mnt/a.yaml") == 2
    assert capsys.readouterr().err == (
        "fourfold: /mnt/a.yaml: Read-only file system; check the path and its permissions\n"
    )
    assert check("-c", "a.yaml", "-o", "Global.tokenizer=/mnt/b", path="/mnt/b/vocab.json") == 2
    with pytest.raises(OSError, match="Read-only"):
        check("-c", "a.yaml", path="/usr/lib/python3/module.py")


@pytest.mark.parametrize("size", ["abc", "2"])
def test_serve_refuses_an_environment_of_several(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert end("serve", "-c", str(CONFIGS / "quickstart.yaml")) == 2
    assert f"WORLD_SIZE={size}" in capsys.readouterr().err


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
    assert schema["$defs"]["Model"]["properties"]["hidden_size"]["default"] == 192


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
