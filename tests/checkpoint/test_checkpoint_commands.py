"""`fourfold checkpoint inspect | verify | merge`, as a user sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.checkpoint_ranks import save_rows
from helpers.checkpoint_samples import blank, same_bits, sample, state_of
from typer.testing import CliRunner

from fourfold import checkpoint
from fourfold.cli import command_line
from fourfold.errors import CheckpointError

LAYOUT = {
    "dp_degree": 1,
    "pp_degree": 2,
    "mp_degree": 1,
    "sharding": {"sharding_degree": 2, "sharding_stage": 3},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        state = state_of(step) | {
            "version": "0.1.0",
            "consumed_samples": 64 * step,
            "tokenizer": "4d7f57ea\x1b[2J",
            "config": {"Distributed": LAYOUT},
        }
        save_rows(tmp_path, step, sample(step, floats=4096), state, size=4)
    return tmp_path


def told(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(
        command_line(), ["checkpoint", *map(str, words)], catch_exceptions=False
    )
    assert result.exit_code == code
    return result.output


def test_inspect_tells_what_a_checkpoint_holds(run: Path) -> None:
    text = told("inspect", run / "step_2")
    for expected in (
        "step        2, saved 20",
        "format      version 3, written by Fourfold 0.1.0",
        "layout      dp 1, pp 2, sharding 2 (stage 3), mp 1",
        "parameters  4,100 in 2 of 5 tensors",
        "kB in 11 files",
        "pieces      1 whole, 1 in 2, 3 in 4",
        "samples     128 consumed",
        "16.38 kB  model.embed.weight  float32 [2, 2048]",
    ):
        assert expected in text
    assert "4d7f57ea\\x1b[2J" in text and "\x1b" not in text


def test_inspect_lists_an_output_directory(run: Path) -> None:
    (run / "step_1" / "manifest.json").write_text("{")
    lines = told("inspect", run).splitlines()
    assert lines[0].endswith("2 checkpoints, the last one saved first")
    assert lines[1].split()[0] == "step_2" and lines[1].endswith("files  format 3")
    assert lines[2].split()[:2] == ["step_1", "unusable:"]


def test_inspect_reads_version_2() -> None:
    text = told("inspect", Path(__file__).parent / "golden_v2" / "step_7")
    assert "format      version 2, written by Fourfold ?" in text and "5 whole" in text


def test_verify_says_good_or_lists_every_problem(run: Path) -> None:
    text = told("verify", run)
    assert text.count("good: 11 files, 5 tensors") == 2
    (run / "step_1" / "state.json").write_text("{}")
    (run / "step_1" / "model-rank00002-00001-of-00001.safetensors").unlink()
    text = told("verify", run, code=2)
    assert text.count("problem: ") == 2 and "step_1: 2 problems" in text
    assert "step_2: good" in text
    assert "good" in told("verify", run / "step_2")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        told("verify", run / "nowhere")


def test_merge_writes_a_checkpoint_to_start_from(run: Path) -> None:
    assert "2 tensors of" in told("merge", run, run / "whole", "--prefix", "model.")
    weights = {n: t for n, t in sample(2, floats=4096).items() if n.startswith("model.")}
    into: dict[str, torch.Tensor] = blank(weights)
    directory, state = checkpoint.resume(run / "whole", into, pytest.fail, prefix="model.")
    assert directory == run / "whole" and state["step"] == 2 and same_bits(into, weights)
    assert "good: 3 files, 2 tensors" in told("verify", run / "whole")
    assert "2 whole" in told("inspect", run / "whole")
