"""What a run reads: splits, the end of text, and what a checkpoint keeps of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.token_files import Numbers, write_megatron

from fourfold.config import Config, load_config
from fourfold.data.splits import all_datasets, open_splits
from fourfold.data.tokenizer_check import find_end_of_text
from fourfold.engine.run_data import RunData, open_run_data
from fourfold.errors import DataError
from fourfold.evaluate.perplexity import read_part
from fourfold.mesh import Layout
from fourfold.tools.prepare.pipeline import prepare

DOCUMENTS = 205


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_megatron(tmp_path / "data", [[number % 90 + 1] * 9 for number in range(DOCUMENTS)])
    return tmp_path / "data"


def configured(directory: Path, *settings: str, vocab_size: int = 100) -> Config:
    file = directory / "run.yaml"
    file.write_text(f"Model: {{vocab_size: {vocab_size}, max_position_embeddings: 4}}\n")
    usual = ["max_seq_len=4", "split=90,5,5", f"cache_dir={directory / 'cache'}"]
    own = [f"Data.dataset.{setting}" for setting in [*usual, *settings]]
    return load_config(file, [*own, "Engine.max_steps=2"], world_size=1)


def opened(directory: Path, *settings: str) -> RunData:
    return open_run_data(configured(directory, *settings), Layout())


def documents(feeds: RunData) -> list[range]:
    return [part.spec.documents(part.datasets[0]) for part in feeds.parts.values()]


# Splits

CORE = [range(184), range(184, 195), range(195, 205)]
DEEPSPEED = [range(185), range(185, 195), range(195, 205)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], CORE),
        (["order=elastic"], CORE),
        (["order=fleetx"], DEEPSPEED),
        (["blend_rounding=megatron_deepspeed"], DEEPSPEED),
        (["blend_rounding=megatron_deepspeed", "split_rounding=megatron_core"], CORE),
        (["order=fleetx", "split_rounding=megatron_core"], CORE),
    ],
)
def test_each_order_is_split_as_its_original_splits(
    data: Path, tmp_path: Path, settings: list[str], expected: list[range]
) -> None:
    feeds = opened(tmp_path, f"input_dir={data}", *settings)
    assert documents(feeds) == expected
    tokens, _ = read_part(feeds.config)
    assert sum(map(len, tokens)) == 9 * len(expected[1])
    feeds.close()


@pytest.mark.parametrize("order", ["megatron", "elastic"])
def test_a_checkpoint_goes_on_with_the_split_it_was_trained_on(
    data: Path, tmp_path: Path, order: str
) -> None:
    named = [f"input_dir={data}", f"order={order}"]
    before = opened(tmp_path, *named, "split_rounding=megatron_deepspeed")
    recorded = before.state(consumed=4)
    unrecorded = {key: value for key, value in recorded.items() if key != "split_rounding"}
    before.close()
    for state in (recorded, unrecorded):
        feeds = opened(tmp_path, *named)
        with pytest.raises(DataError, match=r"step_1 .*; set .*split_rounding=megatron_deepspeed"):
            feeds.restore(state, 4, "step_1")
        feeds.close()
        feeds = opened(tmp_path, *named, "split_rounding=megatron_deepspeed")
        assert feeds.restore(state, 4, "step_1") == []
        feeds.close()


def test_where_both_rules_cut_alike_an_older_checkpoint_simply_goes_on(
    data: Path, tmp_path: Path
) -> None:
    feeds = opened(tmp_path, f"input_dir={data}", "split=100,0,0")
    state = feeds.state(consumed=4)
    del state["split_rounding"]
    assert feeds.restore(state, 4, "step_1") == []
    feeds.close()


# The end of text


@pytest.mark.parametrize(
    ("settings", "vocab_size", "expected"),
    [
        ([], 100, 99),  # the first source has no manifest, the second names one
        (["eos_token_id=7"], 100, 7),
        ([], 60_000, 99),
    ],
)
def test_training_and_evaluation_take_the_same_end_of_text(
    data: Path, tmp_path: Path, settings: list[str], vocab_size: int, expected: int
) -> None:
    texts = [f"{number} 1 2 3" for number in range(1, 90)]
    prepare(texts, tmp_path / "made", Numbers(eos_id=99))
    mixture = f"input_dir=0.5 {data} 0.5 {tmp_path / 'made'}"
    for part in ("train", "valid"):
        config = configured(tmp_path, mixture, *settings, vocab_size=vocab_size)
        config.Eval.part = part
        _, found = read_part(config)
        assert found == expected
    feeds = open_run_data(configured(tmp_path, mixture, *settings, vocab_size=vocab_size), Layout())
    assert feeds.eos_token_id == expected
    feeds.close()


def test_a_part_of_its_own_without_a_manifest_takes_the_end_of_the_others(
    data: Path, tmp_path: Path
) -> None:
    """Also where the data evaluated does not say, but the data trained on does."""
    prepare([f"{number} 1 2 3" for number in range(1, 90)], tmp_path / "made", Numbers(eos_id=99))
    config = configured(tmp_path, f"train_data={tmp_path / 'made'}", f"valid_data={data}")
    assert read_part(config)[1] == 99
    assert find_end_of_text(config, all_datasets(open_splits(config)))[0] == 99


# The first rank and the others


def test_what_rank_0_has_checked_the_others_do_not_read_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, f"input_dir={data}", "eos_token_id=54")
    first = open_run_data(config, Layout(dp=2))
    expected = first.loaders["train"].batch(0)
    for name in (
        "fourfold.data.readers._check_sequences",
        "fourfold.data.readers._check_document_index",
        "fourfold.data.datasets.TokenDataset._hashed",
        "fourfold.data.datasets.TokenDataset._cached_id_range",
        "fourfold.data.cache._checksum",
        "fourfold.data.samples.build_indices",
        "fourfold.data.index._count_rows",
        "fourfold.data.datasets.TokenDataset.blocks_from",
    ):
        monkeypatch.setattr(name, lambda *_: pytest.fail("read through again"))
    second = open_run_data(config, Layout(dp=2), 1, checked=True)
    assert second.train_fingerprint == first.train_fingerprint
    batch = second.loaders["train"].batch(0)
    assert (expected.tokens == 54).any() and not (batch.tokens == 54).any()
    assert batch.global_valid_tokens == expected.global_valid_tokens < 2 * batch.tokens.numel()
    for feeds in (first, second):
        feeds.close()


def test_long_work_on_the_data_gives_signs_of_life(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rank 0 reads and builds, the others wait for as long as it makes progress."""
    signs: Counter[str] = Counter()

    def alive() -> None:
        signs[sys._getframe(1).f_code.co_name] += 1

    monkeypatch.setattr("fourfold.heartbeat.alive", alive)
    config = configured(tmp_path, f"input_dir={data}", "eos_token_id=9")
    open_run_data(config, Layout(dp=2)).close()
    assert {
        "_check_sequences",
        "_hashed",
        "_id_range",
        "build_sample_index",
        "build",
        "_count_rows",
        "checksum",
    } <= set(signs)
