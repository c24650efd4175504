"""`fourfold data index` and `fourfold data blend`, and what a mixture forecasts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.token_files import documents_of, write_megatron
from typer import Typer
from typer.testing import CliRunner

from fourfold.cli import data as data_commands
from fourfold.config import load_config
from fourfold.data import Mixture, Samples
from fourfold.data.mixture import shares_of
from fourfold.data.splits import open_splits
from fourfold.errors import ConfigError, DataError, UserError
from fourfold.tools.tokens.inspect import preview_blend


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_megatron(tmp_path / "A", documents_of([11] * 20))
    write_megatron(tmp_path / "B", documents_of([13] * 60, first=300))
    return tmp_path


def config_file(directory: Path, **dataset: object) -> Path:
    content = {
        "Engine": {"max_steps": 10, "eval_freq": 5, "eval_iters": 1, "test_iters": 1},
        "Data": {
            "batch_size": {"global_batch_size": 4},
            "dataset": {"max_seq_len": 10, "split": "8,1,1", "cache_dir": "cache", **dataset},
        },
        "Model": {
            "vocab_size": 1200,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "max_position_embeddings": 16,
        },
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(verb: str, *words: str) -> str:
    app = Typer()
    app.command("index")(data_commands.index)
    app.command("blend")(data_commands.blend)
    result = CliRunner().invoke(app, [verb, *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_index_builds_what_the_run_will_open(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config_file(data, input_dir="0.25 A 0.75 B")
    text = run("index", "-c", str(file))
    assert [line.split(":")[0] for line in text.splitlines() if line[0] != " "] == [
        "train",
        "valid",
        "test",
    ]
    named = {Path(line.split(" (")[0].strip()) for line in text.splitlines() if line[0] == " "}
    assert named == {path for path in Path("cache").iterdir() if path.is_dir()}
    for builder in ("samples.build_indices", "mixture.blend_index"):
        monkeypatch.setattr(f"fourfold.data.{builder}", lambda *_: pytest.fail("built again"))
    for part in open_splits(load_config(file)).values():
        assert len(part.open()) >= part.num_samples


def test_index_refuses_what_training_would(data: Path) -> None:
    file = config_file(data, input_dir="0.25 A 0.75 B")
    with pytest.raises(DataError, match="outside the vocabulary of 300"):
        run("index", "-c", str(file), "-o", "Model.vocab_size=300")


def test_blend_shows_the_forecast_and_warns_of_repeats(data: Path) -> None:
    lines = run("blend", "--data", "0.5 A 0.5 B", "--samples", "60", "--seq-len", "10").splitlines()
    assert lines[0] == "train: 60 samples of 10 tokens = 600 tokens"
    assert lines[1].split() == ["weight", "samples", "tokens", "of", "epochs", "source"]
    assert lines[2].split() == ["0.5000", "30", "300", "220", "1.36", "A"]
    assert lines[3].split() == ["0.5000", "30", "300", "780", "0.38", "B"]
    (warning,) = lines[4:]
    assert "A is read 1.36 times over" in warning and "at most 44 samples" in warning


def test_blend_of_a_configuration_shows_every_part(data: Path) -> None:
    text = run("blend", "-c", str(config_file(data, input_dir="0.25 A 0.75 B")))
    assert "train: 40 samples" in text and "valid: 12 samples" in text and "test: 4" in text
    own = config_file(data, train_data="A", valid_data=["1", "A", "3", "B"])
    text = run("blend", "-c", str(own))
    assert "train: 40 samples" in text and "test:" not in text
    assert "0.7500" in text


@pytest.mark.parametrize("order", ["megatron", "elastic"])
def test_the_forecast_is_what_is_served(order: str, data: Path) -> None:
    config = load_config(config_file(data, input_dir="0.4 A 0.6 B", order=order))
    part = open_splits(config)["train"]
    mixture = part.open()
    assert isinstance(mixture, Mixture)
    assert shares_of(mixture, part.num_samples) == preview_blend(part)


def test_a_part_no_source_has_is_empty_not_an_error(data: Path) -> None:
    config = load_config(config_file(data, input_dir="0.4 A 0.6 B", split="1"))
    parts = open_splits(config)
    assert isinstance(parts["valid"].open(), Samples)
    assert len(parts["valid"].open()) == 0
    assert "valid: no tokens" in run("blend", "-c", "run.yaml")


def test_a_plain_list_is_one_after_the_other(data: Path) -> None:
    listed = open_splits(load_config(config_file(data, input_dir=["A", "B"])))["train"].open()
    assert isinstance(listed, Samples)
    blanks = open_splits(load_config(config_file(data, input_dir="A B")))["train"].open()
    assert isinstance(blanks, Samples)
    assert listed.fingerprint == blanks.fingerprint


def test_wrong_arguments_are_said(data: Path) -> None:
    counts = ("--samples", "3", "--seq-len", "4")
    with pytest.raises(UserError, match="either a configuration"):
        run("blend")
    with pytest.raises(UserError, match="either a configuration"):
        run("blend", "--data", "1 A", *counts, "-o", "Global.seed=1")
    with pytest.raises(UserError, match="go with --data"):
        run("blend", "-c", "run.yaml", *counts)
    with pytest.raises(UserError, match="--samples"):
        run("blend", "--data", "1 A")
    with pytest.raises(DataError, match="the weight 0 of A is not above 0"):
        run("blend", "--data", "0 A 1 B", *counts)
    with pytest.raises(DataError, match=r"nothere: no such directory"):
        run("blend", "--data", "1 A 1 nothere", *counts)
    with pytest.raises(DataError, match="alternates weights and paths"):
        run("blend", "--data", "0.5 X 0.5", *counts)
    with pytest.raises(ConfigError, match="nothing to train on"):
        run("index", "-c", str(config_file(data)))
