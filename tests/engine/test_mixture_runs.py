"""Runs on mixtures: resumed, extended and changed; and data that does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.tiny_run import FIXTURE, Configure
from test_resume import assert_same_end, contents, losses

from fourfold import checkpoint
from fourfold.data import Mixture
from fourfold.engine import Engine, build_engine
from fourfold.errors import ConfigError, DataError, UserError
from fourfold.tokenizer import Tokenizer, train
from fourfold.tools.prepare.pipeline import prepare

BLEND = FIXTURE.parent / "megatron_blend"
A, B = BLEND / "part0_text_document", BLEND / "part1_text_document"
ELASTIC = "Data.dataset.order=elastic"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mixing(first: float, second: float) -> str:
    return f"Data.dataset.input_dir={first} {A} {second} {B}"


def run(configure: Configure, name: str, *overrides: str) -> Engine:
    engine = build_engine(configure(name, *overrides))
    engine.fit()
    return engine


def mixture_of(output_dir: Path, step: int) -> dict:
    state = contents(output_dir / f"step_{step}")[1]["mixture"]
    assert isinstance(state, dict)
    return state


@pytest.mark.parametrize("order", ["megatron", "elastic"])
def test_a_resumed_mixture_is_the_straight_one(
    order: str, configure: Configure, tmp_path: Path
) -> None:
    mix = [mixing(0.35, 0.65), f"Data.dataset.order={order}", "Engine.max_steps=8"]
    run(configure, "straight", *mix)
    run(configure, "stopped", *mix)
    at_four = f"Engine.save_load.ckpt_dir={tmp_path / 'stopped' / 'step_4'}"
    again = run(configure, "again", *mix, at_four)
    assert any("at step 4" in notice for notice in again.notices)
    assert not any("mixture changes" in n or "seen before" in n for n in again.notices)
    straight = losses(tmp_path / "straight")
    assert all(straight[key] == loss for key, loss in losses(tmp_path / "again").items())
    assert_same_end(tmp_path / "straight", tmp_path / "again", 8)
    served = mixture_of(tmp_path / "again", 8)["sources"]
    assert [source["consumed"] for source in served] == [23, 41]
    assert [source["weight"] for source in served] == [0.35, 0.65]


def test_an_extended_elastic_run_is_the_longer_run(configure: Configure, tmp_path: Path) -> None:
    mix = [mixing(1, 3), ELASTIC, "Optimizer.lr.decay_steps=12", "Engine.eval_freq=0"]
    run(configure, "straight", *mix, "Engine.max_steps=12")
    run(configure, "extended", *mix, "Engine.max_steps=4")
    longer = run(configure, "extended", *mix, "Engine.max_steps=12")
    assert not any("seen before" in notice for notice in longer.notices)
    assert_same_end(tmp_path / "straight", tmp_path / "extended", 12)


def test_an_extended_megatron_run_says_what_it_does(configure: Configure) -> None:
    run(configure, "run", mixing(1, 3), "Engine.max_steps=2")
    longer = run(configure, "run", mixing(1, 3), "Engine.max_steps=4")
    said = [notice for notice in longer.notices if "seen before" in notice]
    assert said and "order=elastic" in said[0]
    changed = run(configure, "run", mixing(3, 1), "Engine.max_steps=5")
    assert any("its weights" in notice for notice in changed.notices)


def test_weights_may_change_mid_run(configure: Configure, tmp_path: Path) -> None:
    run(configure, "run", mixing(0.5, 0.5), ELASTIC, "Engine.max_steps=4")
    before = [source["consumed"] for source in mixture_of(tmp_path / "run", 4)["sources"]]
    assert before == [16, 16]
    changed = run(configure, "run", mixing(0.75, 0.25), ELASTIC, "Engine.max_steps=6")
    assert any("changes after 32 samples" in notice for notice in changed.notices)
    train_samples = changed.data.samples["train"]
    assert isinstance(train_samples, Mixture)
    located = [train_samples.locate(i) for i in range(32, 48)]
    assert [number for source, number in located if source == 0] == list(range(16, 28))
    assert [number for source, number in located if source == 1] == list(range(16, 20))
    after = [source["consumed"] for source in mixture_of(tmp_path / "run", 6)["sources"]]
    assert after == [28, 20]
    # Going on with the new weights is no change.
    again = run(configure, "run", mixing(0.75, 0.25), ELASTIC, "Engine.max_steps=8")
    assert not any("changes after" in notice for notice in again.notices)
    after = [source["consumed"] for source in mixture_of(tmp_path / "run", 8)["sources"]]
    assert after == [40, 24]


def test_a_run_can_turn_into_a_mixture(configure: Configure, tmp_path: Path) -> None:
    run(configure, "run", f"Data.dataset.input_dir={B}", ELASTIC, "Engine.max_steps=2")
    run(configure, "run", mixing(0.5, 0.5), ELASTIC, "Engine.max_steps=4")
    sources = mixture_of(tmp_path / "run", 4)["sources"]
    assert [source["consumed"] for source in sources] == [8, 16 + 8]


def test_other_data_in_elastic_order_is_said(configure: Configure) -> None:
    run(configure, "run", f"Data.dataset.input_dir={B}", ELASTIC, "Engine.max_steps=2")
    other = run(configure, "run", f"Data.dataset.input_dir={A}", ELASTIC, "Engine.max_steps=4")
    assert any("none of the training data" in notice for notice in other.notices)


def test_each_part_its_own_data(configure: Configure, tmp_path: Path) -> None:
    parts = [f"Data.dataset.train_data=[0.5, {A}, 0.5, {B}]", f"Data.dataset.valid_data={B}"]
    engine = run(configure, "run", "Data.dataset.input_dir=null", *parts, "Engine.max_steps=3")
    assert engine.data.samples["valid"].tokens_per_epoch == 3360
    assert engine.data.samples["train"].tokens_per_epoch == 1547 + 3360
    assert "test" not in engine.data.samples
    assert {kind for kind, _ in losses(tmp_path / "run")} == {"train", "eval"}


def test_contradicting_data_keys_are_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="contradict"):
        configure("run", f"Data.dataset.train_data={A}")
    with pytest.raises(ConfigError, match="leave nothing to train on"):
        configure("run", "Data.dataset.input_dir=null", f"Data.dataset.valid_data={A}")
    with pytest.raises(ConfigError, match=r"the weight 0 of .* is not above 0"):
        configure("run", f"Data.dataset.input_dir=0 {A} 1 {B}")


# -- tokenizers -----------------------------------------------------------------------------------

TEXTS = [f"the quick brown fox number {i} jumps over {i * 7} lazy dogs" for i in range(200)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `other`: the same text through two tokenizers, 280 and 300 tokens."""
    directory = tmp_path_factory.mktemp("prepared")
    for name, size in (("one", 280), ("other", 300)):
        train(TEXTS, size).save(directory / f"{name}.tokenizer.json")
        tokenizer = Tokenizer.load(directory / f"{name}.tokenizer.json")
        (directory / name).mkdir()
        prepare(TEXTS, directory / name / "text_document", tokenizer)
    return directory


def using(prepared: Path, name: str, tokenizer: str | None = None) -> list[str]:
    keys = [f"Data.dataset.input_dir={prepared / name}", "Engine.max_steps=2"]
    keys.append("Data.dataset.eos_token_id=null")
    if tokenizer is not None:
        keys.append(f"Global.tokenizer={prepared / tokenizer}.tokenizer.json")
    return keys


def test_data_of_another_tokenizer_is_refused_unless_allowed(
    prepared: Path, configure: Configure
) -> None:
    run(configure, "good", *using(prepared, "one", "one"))
    with pytest.raises(DataError, match=r"another tokenizer .*Global.tokenizer=.*other") as caught:
        build_engine(configure("bad", *using(prepared, "one", "other")))
    assert "allow_tokenizer_mismatch=True" in str(caught.value)
    allowed = "Data.dataset.allow_tokenizer_mismatch=True"
    engine = build_engine(configure("bad", *using(prepared, "one", "other"), allowed))
    assert any("another tokenizer" in notice for notice in engine.notices)


def test_a_tokenizer_that_cannot_be_read_is_mentioned(prepared: Path, configure: Configure) -> None:
    engine = build_engine(configure("run", *using(prepared, "one", "nowhere")))
    assert any("Global.tokenizer is unknown" in notice for notice in engine.notices)


def test_a_vocabulary_larger_than_the_models_is_refused(
    prepared: Path, configure: Configure
) -> None:
    small = "Model.vocab_size=299"
    with pytest.raises(DataError, match=r"300 tokens, more than Model.vocab_size=299"):
        build_engine(configure("run", *using(prepared, "other"), small))


def test_a_checkpoint_of_another_tokenizer_is_refused_unless_allowed(
    prepared: Path, configure: Configure
) -> None:
    run(configure, "run", *using(prepared, "one"))
    longer = "Engine.max_steps=4"
    with pytest.raises(UserError, match="step_2 was trained on data made with another tokenizer"):
        run(configure, "run", *using(prepared, "other"), longer)
    allowed = "Data.dataset.allow_tokenizer_mismatch=True"
    engine = run(configure, "run", *using(prepared, "other"), longer, allowed)
    assert engine.step == 4


def test_sources_of_two_tokenizers_are_refused(prepared: Path, configure: Configure) -> None:
    mix = f"Data.dataset.input_dir=1 {prepared / 'one'} 1 {prepared / 'other'}"
    with pytest.raises(DataError, match="so the same id means two things"):
        build_engine(configure("run", mix, "Data.dataset.eos_token_id=null"))


def test_checkpoints_without_the_new_keys_still_resume(
    configure: Configure, tmp_path: Path
) -> None:
    run(configure, "run", "Engine.max_steps=2")
    directory = tmp_path / "run" / "step_2"
    tensors, state = contents(directory)
    del state["mixture"], state["tokenizer"]
    assert json.dumps(state)
    checkpoint.save(tmp_path / "old", 2, tensors, state, keep_last=1)
    again = run(configure, "old", "Engine.max_steps=4")
    assert again.step == 4
