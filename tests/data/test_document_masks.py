"""Documents inside a sample: numbers, positions and masks, against a rule written out in loops."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.token_files import write_megatron
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config import Config, load_config
from fourfold.data import Loader, Samples, SampleSpec, open_datasets
from fourfold.data.loader import document_ids, positions_in_documents
from fourfold.engine.run_data import open_run_data
from fourfold.errors import DataError
from fourfold.mesh import Layout

EOS = 0
SEQ_LEN = 8
GLOBAL_BATCH = 8

# Two ordinary tokens and a likely EOS: runs of EOS, and EOS first and last, come up all the time.
rows_of_tokens = st.integers(1, 12).flatmap(
    lambda length: st.lists(
        st.lists(st.sampled_from([EOS, 1, 2]), min_size=length, max_size=length),
        min_size=1,
        max_size=3,
    )
)


def split_after_eos(row: list[int]) -> list[list[int]]:
    """The row as documents: each ends with its EOS, but for the last, which may be cut."""
    documents: list[list[int]] = [[]]
    for token in row:
        documents[-1].append(token)
        if token == EOS:
            documents.append([])
    return [document for document in documents if document]


def reference_ids(row: list[int]) -> list[int]:
    documents = split_after_eos(row)
    return [number for number, document in enumerate(documents) for _ in document]


def reference_positions(row: list[int]) -> list[int]:
    return [position for document in split_after_eos(row) for position in range(len(document))]


def megatron_mask(row: list[int]) -> np.ndarray:
    """The causal mask with, for every EOS, what comes after it cut off from it and before."""
    mask = np.tril(np.ones((len(row), len(row)), bool))
    for place, token in enumerate(row):
        if token == EOS:
            for query, key in itertools.product(range(place + 1, len(row)), range(place + 1)):
                mask[query, key] = False
    return mask


def megatron_positions(row: list[int]) -> list[int]:
    """Counting through, with the count of what precedes taken off behind every EOS."""
    positions, taken_off = list(range(len(row))), 0
    for place, token in enumerate(row):
        if token == EOS:
            for later in range(place + 1, len(row)):
                positions[later] -= place + 1 - taken_off
            taken_off = place + 1
    return positions


@given(rows_of_tokens)
def test_ids_and_positions_follow_the_rule(rows: list[list[int]]) -> None:
    ends = np.array(rows) == EOS
    assert document_ids(ends).tolist() == [reference_ids(row) for row in rows]
    assert positions_in_documents(ends).tolist() == [reference_positions(row) for row in rows]


@given(rows_of_tokens)
def test_masks_and_positions_are_megatrons(rows: list[list[int]]) -> None:
    ends = np.array(rows) == EOS
    for ids, row in zip(document_ids(ends), rows):
        same = ids[:, None] == ids[None, :]
        assert np.array_equal(np.tril(same), megatron_mask(row))
    assert positions_in_documents(ends).tolist() == [megatron_positions(row) for row in rows]


@pytest.mark.parametrize(
    ("row", "ids", "positions"),
    [
        ([5, 6, 7], [0, 0, 0], [0, 1, 2]),
        ([5, EOS, 7], [0, 0, 1], [0, 1, 0]),
        ([EOS, 6, 7], [0, 1, 1], [0, 0, 1]),
        ([5, 6, EOS], [0, 0, 0], [0, 1, 2]),
        ([EOS, EOS, EOS], [0, 1, 2], [0, 0, 0]),
        ([5, EOS, EOS, 8, 9], [0, 0, 1, 2, 2], [0, 1, 0, 0, 1]),
        ([EOS], [0], [0]),
    ],
)
def test_borders_by_hand(row: list[int], ids: list[int], positions: list[int]) -> None:
    ends = np.array([row]) == EOS
    assert document_ids(ends).tolist() == [ids]
    assert positions_in_documents(ends).tolist() == [positions]


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    """Documents shorter and longer than a sample, some of them nothing but their EOS."""
    rng = np.random.default_rng(5)
    documents = [[*rng.integers(1, 99, rng.integers(0, 12)), EOS] for _ in range(80)]
    write_megatron(tmp_path / "x", documents)
    return Samples.open(open_datasets(tmp_path), SampleSpec("9,1,0", "train", SEQ_LEN, 1), 48)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("mask_loss", [False, True])
def test_each_option_does_its_own_part(
    samples: Samples, positions: bool, attention: bool, mask_loss: bool
) -> None:
    loader = Loader(
        samples,
        GLOBAL_BATCH,
        EOS,
        eod_mask_loss=mask_loss,
        reset_position_ids=positions,
        reset_attention_mask=attention,
        prefetch=0,
    )
    for step in range(loader.num_batches):
        batch = loader.batch(step)
        rows = batch.tokens.tolist()
        expected = [reference_positions(row) if positions else list(range(SEQ_LEN)) for row in rows]
        assert batch.position_ids.tolist() == expected
        assert batch.position_ids.dtype == torch.int64
        assert ((batch.loss_mask == 0) == ((batch.tokens == EOS) & mask_loss)).all()
        if attention:
            assert batch.document_ids is not None
            assert batch.document_ids.tolist() == [reference_ids(row) for row in rows]
            assert batch.document_ids.dtype == torch.int32
        else:
            assert batch.document_ids is None


def test_a_rank_has_its_slice_of_the_documents(samples: Samples) -> None:
    resets = {"reset_position_ids": True, "reset_attention_mask": True, "prefetch": 0}
    whole = Loader(samples, GLOBAL_BATCH, EOS, **resets).batch(1)
    parts = [Loader(samples, GLOBAL_BATCH, EOS, **resets, rank=r, size=2).batch(1) for r in (0, 1)]
    for name in ("document_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name))


@pytest.mark.parametrize("option", ["reset_position_ids", "reset_attention_mask"])
def test_without_an_end_of_text_id_there_are_no_borders_to_find(
    samples: Samples, option: str
) -> None:
    with pytest.raises(
        DataError, match=rf"Data\.dataset\.{option} needs.*set Data\.dataset\.eos_token_id"
    ):
        Loader(samples, GLOBAL_BATCH, **{option: True})


def configured(directory: Path, *overrides: str) -> Config:
    """A configuration that reads the Megatron fixture, which has no manifest; its EOS is 0."""
    file = directory / "run.yaml"
    file.write_text("Model: {vocab_size: 1024, max_position_embeddings: 16}\n")
    fixture = Path(__file__).parent.parent / "fixtures" / "megatron_single"
    settings = [f"input_dir={fixture}", f"cache_dir={directory / 'cache'}", "max_seq_len=16"]
    own = [f"Data.dataset.{setting}" for setting in [*settings, *overrides]]
    return load_config(file, [*own, "Engine.max_steps=2"], world_size=1)


def test_the_configuration_reaches_every_split(tmp_path: Path) -> None:
    resets = ["eos_token_id=0", "reset_position_ids=True", "reset_attention_mask=True"]
    feeds = open_run_data(configured(tmp_path, *resets), Layout())
    batch = feeds.loaders["train"].batch(0)
    rows = batch.tokens.tolist()
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [reference_ids(row) for row in rows]
    assert batch.position_ids.tolist() == [reference_positions(row) for row in rows]
    assert batch.document_ids.max() > 0, "the fixture has borders inside its samples"
    feeds.close()
    plain = open_run_data(configured(tmp_path, "eos_token_id=0"), Layout())
    assert plain.loaders["train"].batch(0).document_ids is None
    plain.close()


def test_a_configuration_without_an_end_of_text_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="reset_attention_mask needs the end-of-text token"):
        open_run_data(configured(tmp_path, "reset_attention_mask=True"), Layout())
