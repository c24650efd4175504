"""Samples are the tokens the originals serve, whatever the files they come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.token_files import documents_of, write_fleetx, write_legacy, write_megatron
from hypothesis import given
from hypothesis import strategies as st

from fourfold.data import Loader, Samples, SampleSpec, TokenDataset, open_datasets
from fourfold.data.datasets import document_starts
from fourfold.errors import DataError

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_megatron_fixture(part: str, tmp_path: Path) -> None:
    directory = FIXTURES / "megatron_single"
    case = json.loads((directory / "case.json").read_text())
    expected = np.load(directory / "expected.npz", allow_pickle=False)
    wanted = dict(zip(("train", "valid", "test"), case["num_samples"]))[part]
    spec = SampleSpec(
        case["split"], part, case["sequence_length"], case["seed"], cache_dir=tmp_path
    )
    samples = Samples.open(open_datasets(directory), spec, wanted)
    tokens = np.stack([samples[i] for i in range(wanted)])
    assert np.array_equal(tokens, expected[f"{part}_tokens"])
    batch = Loader(samples, wanted, eos_token_id=case["eod"]).batch(0)
    assert np.array_equal(batch.loss_mask.numpy(), expected[f"{part}_loss_mask"])
    assert batch.global_valid_tokens == expected[f"{part}_loss_mask"].sum()


def in_memory(documents: Sequence[Sequence[int]]) -> TokenDataset:
    sizes = np.array([len(document) for document in documents], np.int32)
    ids = np.array([token for document in documents for token in document], np.int32)
    return TokenDataset(Path("memory"), ids, sizes, document_starts(sizes))


@given(
    sizes=st.lists(st.lists(st.integers(0, 7), max_size=6), min_size=1, max_size=3),
    seq_len=st.integers(1, 9),
    num_samples=st.integers(0, 30),
)
def test_fleetx_order_lays_documents_end_to_end(
    sizes: list[list[int]], seq_len: int, num_samples: int
) -> None:
    first, sources = 0, []
    for of_source in sizes:
        sources.append(in_memory(documents_of(of_source, first)))
        first += sum(of_source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.data.cache.places", lambda *_: [])
        samples = Samples.open(sources, SampleSpec("1", "train", seq_len, 7, "fleetx"), num_samples)
    assert samples.tokens_per_epoch == first
    served = sorted(samples[i].tolist() for i in range(len(samples)))
    stream = list(range(first)) * samples.epochs
    count = (len(stream) - 1) // seq_len if stream else 0
    expected = [stream[k * seq_len : (k + 1) * seq_len + 1] for k in range(count)]
    assert served == sorted(expected)
    assert len(samples) >= num_samples or first == 0


def test_several_datasets_are_split_each_and_joined_in_order(tmp_path: Path) -> None:
    write_megatron(tmp_path / "b", documents_of([4] * 10, first=100))
    write_fleetx(tmp_path / "a", documents_of([4] * 10, first=0))
    write_legacy(tmp_path / "c", documents_of([4] * 10, first=200))
    sources = open_datasets(tmp_path)
    tokens = {}
    for part in ("train", "valid", "test"):
        samples = Samples.open(sources, SampleSpec("8,1,1", part, 1, 3, "fleetx"), 1)
        assert samples.epochs == 1
        tokens[part] = sorted({int(token) for i in range(len(samples)) for token in samples[i]})
    assert tokens["train"] == [*range(32), *range(100, 132), *range(200, 232)]
    assert tokens["valid"] == [*range(32, 36), *range(132, 136), *range(232, 236)]
    assert tokens["test"] == [*range(36, 40), *range(136, 140), *range(236, 240)]


def test_same_documents_same_samples_in_every_format(tmp_path: Path) -> None:
    documents = documents_of([3, 0, 8, 5, 1, 9])
    served = []
    for write in (write_megatron, write_fleetx, write_legacy):
        directory = tmp_path / write.__name__
        directory.mkdir()
        write(directory / "x", documents)
        samples = Samples.open(open_datasets(directory), SampleSpec("1", "train", 4, 5), 20)
        served.append([samples[i].tolist() for i in range(len(samples))])
    assert served[0] == served[1] == served[2]


def test_empty_parts_open_and_hold_nothing(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", documents_of([5, 5]))
    sources = open_datasets(tmp_path)
    for part in ("valid", "test"):
        samples = Samples.open(sources, SampleSpec("949,50,1", part, 4, 1), 1000)
        assert len(samples) == 0
        assert samples.epochs == 0
        with pytest.raises(IndexError):
            samples[0]
    write_megatron(tmp_path / "x", [[], [], []])
    assert len(Samples.open(open_datasets(tmp_path), SampleSpec("1", "train", 4, 1), 1000)) == 0


def test_a_corpus_smaller_than_one_sample_repeats(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[7, 8]])
    samples = Samples.open(open_datasets(tmp_path), SampleSpec("1", "train", 5, 1), 3)
    assert samples.epochs == 8
    for i in range(len(samples)):
        assert samples[i].tolist() in ([7, 8, 7, 8, 7, 8], [8, 7, 8, 7, 8, 7])


def test_one_token_is_a_corpus(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[], [9], []])
    samples = Samples.open(open_datasets(tmp_path), SampleSpec("1", "train", 3, 1), 2)
    assert samples[0].tolist() == samples[1].tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"part": "eval"}, "part='eval'"),
        ({"order": "random"}, "order='random'"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"num_samples": -1}, "num_samples=-1"),
        ({"seed": 2**32}, "seed="),
        ({"seed": -1}, "seed="),
        ({"split": "0,0"}, "split="),
        ({"sources": []}, "no dataset"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, change: dict[str, object], word: str) -> None:
    write_megatron(tmp_path / "x", [[1, 2, 3]])
    sources = open_datasets(tmp_path)
    usual = {"split": "1", "part": "train", "seq_len": 2, "seed": 1}
    given = {"sources": sources, "num_samples": 1, **usual, **change}
    opened = {name: given.pop(name) for name in ("sources", "num_samples")}
    with pytest.raises(DataError, match=word):
        Samples.open(spec=SampleSpec(**given), **opened)


def test_sample_numbers_beyond_the_end(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", documents_of([9]))
    samples = Samples.open(open_datasets(tmp_path), SampleSpec("1", "train", 2, 1), 1)
    for i in (-1, len(samples)):
        with pytest.raises(IndexError):
            samples[i]
    assert len(list(samples)) == len(samples)
