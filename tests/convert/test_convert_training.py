"""Training and generation go on from an imported checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fourfold import checkpoint
from fourfold.cli import command_line
from fourfold.config import Config, load_config
from fourfold.convert import convert, load_foreign
from fourfold.engine import build_engine
from fourfold.errors import DataError
from fourfold.tokenizer import train
from fourfold.tools.prepare.pipeline import prepare

transformers = pytest.importorskip("transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog and the cat"] * 60


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A model of transformers with a tokenizer, imported."""
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=272, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    words = train(TEXTS, 270)
    words.save(tmp_path / "hf" / "tokenizer.json")
    prepare(TEXTS, tmp_path / "data" / "text_document", words)
    convert(tmp_path / "hf", tmp_path / "own", "fourfold")
    return tmp_path / "own"


def configured(imported: Path, *overrides: str) -> Config:
    here = imported.parent
    return load_config(
        imported / "config.yaml",
        [
            "Global.device=cpu",
            f"Data.dataset.input_dir={here / 'data'}",
            f"Data.dataset.cache_dir={here / 'cache'}",
            "Data.dataset.split=8,1,1",
            "Data.batch_size.global_batch_size=4",
            f"Engine.save_load.output_dir={here / 'run'}",
            "Engine.max_steps=2",
            "Engine.eval_freq=0",
            "Engine.test_iters=0",
            "Engine.tensorboard=False",
            *overrides,
        ],
        world_size=1,
    )


def test_training_goes_on_from_the_imported_weights(imported: Path) -> None:
    still = ["Optimizer.lr.max_lr=0.0", "Optimizer.lr.min_lr=0.0"]
    build_engine(configured(imported, *still)).fit()
    run = imported.parent / "run"
    with load_foreign(imported) as first, load_foreign(run / "step_2") as trained:
        expected, found = dict(first.tensors()), dict(trained.tensors())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(name.startswith("optim.") for name in checkpoint.tensor_names(run / "step_2"))


def test_two_steps_learn_and_are_resumed(imported: Path, capsys: pytest.CaptureFixture) -> None:
    build_engine(configured(imported, "Optimizer.lr.max_lr=0.01")).fit()
    assert "starting at step 0 with the weights of" in capsys.readouterr().out
    with load_foreign(imported) as first, load_foreign(imported.parent / "run") as trained:
        before, after = dict(first.tensors()), dict(trained.tensors())
    assert not any(torch.equal(before[name], after[name]) for name in before if "qkv" in name)
    build_engine(configured(imported, "Engine.max_steps=3")).fit()
    assert "at step 2" in capsys.readouterr().out
    assert checkpoint.read_state(imported.parent / "run" / "step_3")["step"] == 3


def test_data_of_another_tokenizer_is_refused(imported: Path) -> None:
    other = train(["entirely different words about nothing in particular"] * 9, 265)
    prepare(TEXTS, imported.parent / "data" / "text_document", other)
    with pytest.raises(DataError, match="another tokenizer"):
        build_engine(configured(imported, "Global.tokenizer=None")).fit()


def test_generate_reads_it(imported: Path) -> None:
    length = ["-o", "Generation.max_dec_len=4", "-o", "Global.device=cpu"]
    arguments = ["generate", "-c", str(imported / "config.yaml"), "--prompt", "the quick"]
    result = CliRunner().invoke(command_line(), [*arguments, *length])
    assert result.exit_code == 0, result.output
    assert "Generation: the quick" in result.output
