"""Splits and indices equal the originals': golden vectors, and a plain walk over any documents."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.recipe import Rounding
from fourfold.data.index import (
    build_document_index,
    build_indices,
    build_sample_index,
    document_index_dtype,
    plan_indices,
)
from fourfold.data.samples import document_ranges
from fourfold.errors import DataError

FIXTURES = Path(__file__).parent.parent / "fixtures"
SIZES = np.array([5, 3, 9, 1, 7], np.int32)


@pytest.mark.parametrize(
    ("split", "documents", "borders"),
    [
        ("949,50,1", 1000, [0, 949, 999, 1000]),
        ("98,2,0", 79, [0, 77, 79, 79]),
        ("949,50,1", 10, [0, 10, 10, 10]),
        ("949/50/1", 1000, [0, 949, 999, 1000]),
        ("1", 7, [0, 7, 7, 7]),
        ("969, 30", 1000, [0, 970, 1000, 1000]),
        ([949, 50, 1], 1000, [0, 949, 999, 1000]),
        ("1,1,1", 2, [0, 0, 1, 2]),
        ("0,1,1", 5, [0, 1, 3, 5]),
        ("0,1,1", 3, [0, 0, 1, 3]),
        ("1,1,1", 0, [0, 0, 0, 0]),
    ],
)
def test_split(split: str, documents: int, borders: list[int]) -> None:
    ranges = document_ranges(split, documents, "megatron_deepspeed")
    assert [0, *(last for _, last in ranges)] == borders
    assert [first for first, _ in ranges] == borders[:-1]


@pytest.mark.parametrize("rounding", ["megatron_core", "megatron_deepspeed"])
def test_splits_are_the_originals(rounding: Rounding) -> None:
    """15 splits of 0 to 999 documents, by the function of Megatron Core 0.16.1 and of
    Megatron-DeepSpeed: where training and validation end, as steps from one size to the next."""
    table = np.load(FIXTURES / "megatron_splits.npz", allow_pickle=False)
    borders = np.cumsum(table[rounding], axis=1, dtype=np.int64)
    # Megatron-DeepSpeed's borders may fall below 0, where it then fails.
    assert np.all(borders >= 0) or rounding == "megatron_deepspeed"
    for split, expected in zip(table["splits"].tolist(), np.maximum(borders, 0).tolist()):
        for documents, (train, valid) in enumerate(expected):
            assert document_ranges(split, documents, rounding) == [
                (0, train),
                (train, valid),
                (valid, documents),
            ]


@pytest.mark.parametrize(
    "split", ["", "a,b", "0,0,0", "-1,2,3", "nan", "inf,1,1", "1,,2", "1,1,0,98"]
)
def test_split_that_means_nothing(split: str) -> None:
    with pytest.raises(DataError, match="split="):
        document_ranges(split, 10)


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=3),
    st.integers(0, 10_000),
    st.sampled_from(get_args(Rounding)),
)
def test_split_covers_every_document_once(
    shares: list[float], documents: int, rounding: Rounding
) -> None:
    if not sum(shares) > 0:
        return
    ranges = document_ranges(",".join(map(str, shares)), documents, rounding)
    covered = [document for first, last in ranges for document in range(first, last)]
    assert covered == list(range(documents))


def indices(num_samples: int, order: str = "megatron") -> dict[str, list]:
    plan = plan_indices(len(SIZES), int(SIZES.sum()), 4, num_samples)
    built = build_indices([(0, len(SIZES))], SIZES, plan, 1234, order)
    return {name: array.tolist() for name, array in built.items()}


@pytest.mark.parametrize("num_samples", [1, 6])
def test_golden_one_epoch(num_samples: int) -> None:
    assert indices(num_samples) == {
        "document_index": [4, 0, 1, 2, 3],
        "sample_index": [[0, 0], [0, 4], [1, 1], [2, 0], [3, 1], [3, 5], [4, 0]],
        "shuffle_index": [5, 2, 3, 1, 0, 4],
    }


def test_golden_separate_last_epoch() -> None:
    plan = plan_indices(5, 25, 4, 14)
    assert (plan.epochs, plan.first_samples, plan.first_epochs, plan.num_samples) == (3, 12, 2, 18)
    starts = "00 04 08 13 17 22 26 40 44 62 66 73 82 a2 b1 b5 d1 d5 e0"
    assert indices(14) == {
        "document_index": [2, 2, 4, 1, 0, 3, 4, 0, 1, 3, 0, 4, 3, 2, 1],
        "sample_index": [[int(digit, 16) for digit in start] for start in starts.split()],
        "shuffle_index": [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 17, 13, 16, 15, 12, 14],
    }


def test_fleetx_order_keeps_documents_and_shuffles_samples() -> None:
    built = indices(14, "fleetx")
    assert built["document_index"] == [0, 1, 2, 3, 4] * 3
    expected = np.arange(18)
    rng = np.random.RandomState(1234)  # nothing but the samples has drawn from it
    rng.shuffle(expected[:12])
    rng.shuffle(expected[12:])
    assert built["shuffle_index"] == expected.tolist()


def test_dtypes_are_the_originals() -> None:
    plan = plan_indices(len(SIZES), 25, 4, 6)
    built = build_indices([(0, 5)], SIZES, plan, 1, "megatron")
    assert [built[name].dtype for name in sorted(built)] == [np.int32, np.int32, np.uint32]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 200))
def test_epochs_are_the_fewest_that_suffice(tokens: int, seq_len: int, num_samples: int) -> None:
    plan = plan_indices(3, tokens, seq_len, num_samples)
    epochs = 1
    while (epochs * tokens - 1) // seq_len < num_samples:
        epochs += 1
    assert plan.epochs == epochs
    assert plan.num_samples == (epochs * tokens - 1) // seq_len >= num_samples
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // seq_len
        apart = num_samples - before < int(0.80 * ((tokens - 1) // seq_len))
        assert plan.first_samples == (before if apart else plan.num_samples)
        assert plan.first_epochs == (epochs - 1 if apart else epochs)


def walk(sizes: list[int], documents: list[int], seq_len: int, num_samples: int) -> list[list[int]]:
    """Take seq_len + 1 tokens at a time, document by document, stepping back one between."""
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(num_samples):
        remaining = seq_len + 1
        while True:
            available = sizes[documents[position]] - offset
            if available >= remaining:
                offset += remaining - 1
                break
            remaining -= available
            position, offset = position + 1, 0
        rows.append([position, offset])
    return rows


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    seq_len=st.integers(1, 12),
    num_samples=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
    order=st.sampled_from(["megatron", "fleetx"]),
    block=st.integers(1, 5),
)
def test_sample_index_equals_the_walk(
    sizes: list[int], seq_len: int, num_samples: int, seed: int, order: str, block: int
) -> None:
    if sum(sizes) == 0:
        return
    lengths = np.array(sizes, np.int32)
    plan = plan_indices(len(sizes), sum(sizes), seq_len, num_samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.data.index.DOCUMENTS_AT_ONCE", block)
        built = build_indices([(0, len(sizes))], lengths, plan, seed, order)
    documents = built["document_index"].tolist()
    expected = walk(sizes, documents, seq_len, plan.num_samples)
    assert built["sample_index"].tolist() == expected
    assert sorted(built["shuffle_index"].tolist()) == list(range(plan.num_samples))
    assert sorted(documents) == sorted(list(range(len(sizes))) * plan.epochs)


def test_documents_longer_than_int32() -> None:
    plan = plan_indices(1, 2**33, 2**31, 1)
    index = build_sample_index(np.array([2**33]), np.zeros(1, np.int32), plan)
    assert index.dtype == np.int64
    assert index.tolist() == [[0, 0], [0, 2**31], [0, 2**32], [0, 3 * 2**31]]


def test_blocks_beyond_32_bits_and_lengths_that_are_not_aligned() -> None:
    """As a view of an .idx file, whose header has 34 bytes."""
    sizes = [2**31 - 1, 5, 0, 2**31 - 1, 2**31 - 7, 1, 2**30]
    file = np.zeros(34 + 4 * len(sizes), np.uint8)
    lengths = file[34:].view(np.int32)
    lengths[:] = sizes
    assert not lengths.flags.aligned
    seq_len, documents = 3 * 2**27, [3, 0, 6, 1, 2, 5, 4]
    plan = plan_indices(len(sizes), sum(sizes), seq_len, 5)
    index = build_sample_index(lengths, np.array(documents, np.int32), plan)
    assert index.dtype == np.int32
    assert index.tolist() == walk(sizes, documents, seq_len, plan.num_samples)


def test_a_part_without_tokens_has_no_samples() -> None:
    assert plan_indices(0, 0, 8, 100).num_samples == 0
    assert plan_indices(3, 0, 8, 100).num_samples == 0


def test_absurd_repetition_is_refused_not_attempted() -> None:
    with pytest.raises(DataError, match="would repeat the 2 documents"):
        plan_indices(2, 3, 2048, 10**9)


def test_documents_beyond_what_32_bits_number() -> None:
    """A small part at the end of very many documents."""
    ranges = [(0, 2), (2**31 + 5, 2**31 + 8)]
    plan = plan_indices(5, 50, 4, 10)
    assert document_index_dtype(ranges) == np.int64
    assert document_index_dtype([(0, 2**31)]) == np.int32
    for shuffled in (False, True):
        built = build_document_index(ranges, plan, np.random.RandomState(1), shuffled)
        assert sorted(built.tolist()) == [0, 1, 2**31 + 5, 2**31 + 6, 2**31 + 7]
