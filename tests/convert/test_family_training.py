"""`Engine.save_load.ckpt_dir` may name another program's directory, of any family."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.ranks import on_ranks
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.config import Config, load_config
from fourfold.convert import convert, load_foreign
from fourfold.engine import build_engine
from fourfold.errors import UserError
from fourfold.generate.loading import load_trained, open_foreign
from fourfold.tokenizer import train
from fourfold.tools.prepare.pipeline import prepare

transformers = pytest.importorskip("transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog and the cat"] * 60
SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 16},
    "olmo2": {"num_key_value_heads": 2},
    "gpt_neox": {},
}


def made(place: Path, model_type: str) -> Path:
    """A directory of transformers with a tokenizer, and data beside it."""
    torch.manual_seed(2)
    settings = {**SIZES, **CASES[model_type]}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    network = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(place / "hf")
    words = train(TEXTS, 270)
    words.save(place / "hf" / "tokenizer.json")
    prepare(TEXTS, place / "data" / "text_document", words)
    return place / "hf"


def configured(hf: Path, *overrides: str, world_size: int = 1, model: bool = True) -> Config:
    here = hf.parent
    with load_foreign(hf) as foreign:
        section = foreign.model if model else {"vocab_size": 272, "max_position_embeddings": 32}
    (here / "config.yaml").write_text(yaml.safe_dump({"Model": section}))
    return load_config(
        here / "config.yaml",
        [
            "Global.device=cpu",
            f"Data.dataset.input_dir={here / 'data'}",
            f"Data.dataset.cache_dir={here / 'cache'}",
            "Data.dataset.max_seq_len=32",
            "Data.dataset.split=8,1,1",
            "Data.batch_size.global_batch_size=4",
            f"Engine.save_load.ckpt_dir={hf}",
            f"Engine.save_load.output_dir={here / 'run'}",
            "Engine.max_steps=1",
            "Engine.eval_freq=0",
            "Engine.test_iters=0",
            "Engine.tensorboard=False",
            *overrides,
        ],
        world_size=world_size,
    )


STILL = ("Optimizer.lr.max_lr=0.0", "Optimizer.lr.min_lr=0.0")


def fit(config: Config, world_size: int = 1) -> None:
    build_engine(config, world_size, None, partial(open_foreign, config)).fit()


def assert_saved(hf: Path) -> None:
    with load_foreign(hf) as first, load_foreign(hf.parent / "run") as trained:
        expected, found = dict(first.tensors()), dict(trained.tensors())
        assert trained.shape.other_settings(first.shape) == []
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model_type", CASES)
def test_training_starts_with_the_weights(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = made(tmp_path, model_type)
    fit(configured(hf, *STILL))
    assert f"starting at step 0 with the weights of {hf}" in capsys.readouterr().out
    assert_saved(hf)


def test_each_rank_keeps_its_part(tmp_path: Path) -> None:
    hf = made(tmp_path, "qwen2")
    layout = ("Distributed.mp_degree=2", "Distributed.pp_degree=2", *STILL)
    config = configured(hf, *layout, "Data.batch_size.micro_batch_size=2", world_size=4)
    on_ranks(4, lambda rank: fit(config, 4))
    assert_saved(hf)


def test_another_network_in_the_section_is_refused_with_what_to_write(tmp_path: Path) -> None:
    hf = made(tmp_path, "mistral")
    with pytest.raises(UserError, match="another network") as raised:
        fit(configured(hf, model=False))
    assert "-o Model.activation=swiglu" in str(raised.value)
    assert "-o Model.sliding_window=5" in str(raised.value)
    # What it says to write is enough.
    given = [word for word in str(raised.value).split() if word.startswith("Model.")]
    fit(configured(hf, *given, *STILL, model=False))
    assert_saved(hf)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    hf = made(tmp_path, "llama")
    other = train(["entirely different words about nothing in particular"] * 9, 265)
    prepare(TEXTS, tmp_path / "data" / "text_document", other)
    with pytest.raises(UserError, match="another tokenizer"):
        fit(configured(hf))


def test_the_command_trains_and_is_resumed(tmp_path: Path) -> None:
    hf = made(tmp_path, "llama")
    configured(hf)
    words = ["train", "-c", str(tmp_path / "config.yaml")]
    for key, value in {
        "Global.device": "cpu",
        "Data.dataset.input_dir": tmp_path / "data",
        "Data.dataset.max_seq_len": 32,
        "Data.batch_size.global_batch_size": 4,
        "Engine.save_load.ckpt_dir": hf,
        "Engine.save_load.output_dir": tmp_path / "run",
        "Engine.eval_freq": 0,
        "Engine.test_iters": 0,
    }.items():
        words += ["-o", f"{key}={value}"]
    first = CliRunner().invoke(command_line(), [*words, "-o", "Engine.max_steps=1"])
    assert first.exit_code == 0, first.output
    assert "with the weights of" in first.output
    second = CliRunner().invoke(command_line(), [*words, "-o", "Engine.max_steps=2"])
    assert second.exit_code == 0, second.output
    assert "at step 1" in second.output


@pytest.mark.parametrize("model_type", CASES)
def test_generation_takes_the_network_from_the_directory(model_type: str, tmp_path: Path) -> None:
    hf = made(tmp_path, model_type)
    notices: list[str] = []
    trained = load_trained(configured(hf, model=False), notices.append)
    assert any("the checkpoint decides the model" in text for text in notices)
    tokens = torch.arange(24)[None]
    network = transformers.AutoModelForCausalLM.from_pretrained(hf, local_files_only=True)
    with torch.no_grad():
        difference = trained.model(tokens) - network.eval()(tokens).logits
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("to", ["megatron", "fleetx"])
def test_programs_with_gpt2_only_refuse_by_key(to: Any, tmp_path: Path) -> None:
    hf = made(tmp_path, "llama")
    with pytest.raises(UserError, match="num_key_value_heads=2 is not GPT-2's"):
        convert(hf, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
