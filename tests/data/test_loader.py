"""A batch is a function of the step: any rank count, any order, in the background or not."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.token_files import Numbers, write_megatron

from fourfold.data import Batch, Loader, Mixture, Samples, SampleSpec, cache, index, open_datasets
from fourfold.data.datasets import TokenDataset
from fourfold.data.mixture import DataSource
from fourfold.errors import DataError
from fourfold.tools.prepare.pipeline import prepare

EOS = 0
SEQ_LEN = 8
GLOBAL_BATCH = 8


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    rng = np.random.default_rng(5)
    documents = [[*rng.integers(1, 99, rng.integers(0, 12)), EOS] for _ in range(80)]
    write_megatron(tmp_path / "x", documents)
    return Samples.open(open_datasets(tmp_path), SampleSpec("9,1,0", "train", SEQ_LEN, 1), 48)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("fourfold-data"):
            thread.join(10)
    assert threading.active_count() <= before


def equal(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("tokens", "labels", "loss_mask", "position_ids")
    ) and (
        one.sample_ids.tolist() == other.sample_ids.tolist()
        and one.global_valid_tokens == other.global_valid_tokens
    )


def test_contents_of_a_batch(samples: Samples) -> None:
    loader = Loader(samples, GLOBAL_BATCH, eos_token_id=EOS, prefetch=0)
    batch = loader.batch(2)
    assert batch.sample_ids.tolist() == list(range(16, 24))
    assert batch.sample_ids.dtype == np.int64
    rows = np.stack([samples[i] for i in range(16, 24)])
    assert np.array_equal(batch.tokens.numpy(), rows[:, :-1])
    assert np.array_equal(batch.labels.numpy(), rows[:, 1:])
    assert np.array_equal(batch.loss_mask.numpy(), rows[:, :-1] != EOS)
    assert np.array_equal(batch.position_ids.numpy(), np.tile(np.arange(SEQ_LEN), (8, 1)))
    assert batch.global_valid_tokens == (rows[:, :-1] != EOS).sum() < rows[:, :-1].size
    assert batch.document_ids is None
    assert [getattr(batch, name).dtype for name in ("tokens", "labels", "loss_mask")] == [
        torch.int64,
        torch.int64,
        torch.float32,
    ]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert getattr(batch, name).is_contiguous()


@pytest.mark.parametrize(
    "unmasked", [{"eos_token_id": None}, {"eos_token_id": EOS, "eod_mask_loss": False}]
)
def test_without_a_mask_every_token_counts(samples: Samples, unmasked: dict) -> None:
    batch = Loader(samples, GLOBAL_BATCH, **unmasked, size=2, prefetch=0).batch(0)
    assert batch.loss_mask.min() == 1.0
    assert batch.global_valid_tokens == GLOBAL_BATCH * SEQ_LEN


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_one_global_batch(samples: Samples, size: int) -> None:
    whole = Loader(samples, GLOBAL_BATCH, EOS, prefetch=0)
    ranks = [Loader(samples, GLOBAL_BATCH, EOS, rank=rank, size=size) for rank in range(size)]
    for step in range(whole.num_batches):
        expected = whole.batch(step)
        parts = [rank.batch(step) for rank in ranks]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            joined = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(joined, getattr(expected, name))
        joined_ids = np.concatenate([part.sample_ids for part in parts])
        assert joined_ids.tolist() == expected.sample_ids.tolist()
        assert {part.global_valid_tokens for part in parts} == {expected.global_valid_tokens}
        assert sum(float(part.loss_mask.sum()) for part in parts) == expected.global_valid_tokens
    for rank in ranks:
        rank.close()


def write_mixed(tmp_path: Path) -> None:
    """Documents with ends inside, at the end, or nowhere, and empty ones; and prepared data."""
    rng = np.random.default_rng(11)
    (tmp_path / "foreign").mkdir()
    for name in ("a", "b"):
        documents = [rng.integers(0, 6, rng.integers(0, 25)).tolist() for _ in range(60)]
        write_megatron(tmp_path / "foreign" / name, documents)
    texts = [" ".join(map(str, rng.integers(1, 90, rng.integers(0, 25)))) for _ in range(60)]
    prepare(texts, tmp_path / "made", Numbers(eos_id=EOS))
    prepare(texts, tmp_path / "bare", Numbers(eos_id=EOS), append_eod=False)


def mixed_sources(tmp_path: Path) -> list[DataSource]:
    weights = {"foreign": 2.0, "made": 1.0, "bare": 1.0}
    return [DataSource(name, w, open_datasets(tmp_path / name)) for name, w in weights.items()]


def reading_only(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a `Loader` may read `count` samples a batch, and count in none."""
    left = count
    read = Samples.read

    def counted(self: Samples, i: int, out: np.ndarray) -> np.ndarray:
        nonlocal left
        left -= 1
        assert left >= 0, "read more than its own samples"
        return read(self, i, out)

    monkeypatch.setattr(Samples, "read", counted)
    monkeypatch.setattr(Samples, "count_inputs", lambda *_: pytest.fail("read another's sample"))


@pytest.mark.parametrize("order", ["megatron", "fleetx", "elastic"])
def test_a_rank_reads_its_own_samples_only(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixed(tmp_path)
    spec = SampleSpec("8,1,1", "train", SEQ_LEN, 3, order, cache_dir=tmp_path / "cache")
    mixture = Mixture.open(mixed_sources(tmp_path), spec, 600)
    whole = Loader(mixture, GLOBAL_BATCH, EOS, prefetch=0)
    expected = [whole.batch(step).global_valid_tokens for step in range(whole.num_batches)]
    counted = [mixture.count_inputs(i, EOS) for i in range(GLOBAL_BATCH)]
    assert expected[0] == GLOBAL_BATCH * SEQ_LEN - sum(counted)
    assert len(set(expected)) > 5
    ranks = [Loader(mixture, GLOBAL_BATCH, EOS, rank=r, size=4, prefetch=0) for r in range(4)]
    # The others of a run open the same and find what the first one counted.
    with cache.trusting(), monkeypatch.context() as patch:
        patch.setattr(index, "_count_rows", lambda *_: pytest.fail("counted again"))
        patch.setattr(TokenDataset, "blocks_from", lambda *_: pytest.fail("read again"))
        again = Mixture.open(mixed_sources(tmp_path), spec, 600)
        ranks[2] = Loader(again, GLOBAL_BATCH, EOS, rank=2, size=4, prefetch=0)
    reading_only(4 * len(expected) * GLOBAL_BATCH // 4, monkeypatch)
    for step, valid in enumerate(expected):
        assert [rank.batch(step).global_valid_tokens for rank in ranks] == [valid] * 4


def test_a_rank_that_finds_nothing_counted_reads(samples: Samples, tmp_path: Path) -> None:
    expected = Loader(samples, GLOBAL_BATCH, EOS, prefetch=0).batch(0).global_valid_tokens
    shutil.rmtree(tmp_path / ".fourfold_cache")
    with cache.trusting():
        loader = Loader(samples, GLOBAL_BATCH, EOS, rank=1, size=2, prefetch=0)
    assert not samples.has_indexed(EOS)
    assert loader.batch(0).global_valid_tokens == expected


def test_data_that_is_not_what_its_manifest_says(tmp_path: Path) -> None:
    """Of the size that was written, but another's: told by the samples that are read."""
    prepare(["1 2 3 4 5 6 7"] * 40, tmp_path / "x", Numbers(eos_id=EOS))
    tokens = np.memmap(tmp_path / "x.bin", np.uint16, "r+")
    tokens[2:300:8] = EOS
    tokens[301] = 500
    tokens.flush()
    samples = Samples.open(
        open_datasets(tmp_path / "x"), SampleSpec("1", "train", SEQ_LEN, 1, "fleetx"), 40
    )
    samples.sources[0].check_ids(100)
    loader = Loader(samples, GLOBAL_BATCH, EOS, size=2, prefetch=0, vocab_size=501)
    with pytest.raises(DataError, match=r"end-of-text tokens, and .* were counted; the data is"):
        loader.batch(0)
    loader = Loader(samples, len(samples), EOS, prefetch=0, vocab_size=100)
    with pytest.raises(DataError, match=r"token id 500 in one of the samples .* data verify"):
        loader.batch(0)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
def test_any_order_any_number_of_times(samples: Samples, prefetch: int) -> None:
    plain = Loader(samples, GLOBAL_BATCH, EOS, prefetch=0)
    loader = Loader(samples, GLOBAL_BATCH, EOS, prefetch=prefetch)
    last = loader.num_batches - 1
    for step in [0, 1, 2, 2, 0, last, last, 1, 3, 2, 1, 0, *range(last + 1)]:
        batch = loader.batch(step)
        assert equal(batch, plain.batch(step))
        batch.tokens.zero_()  # what a caller does to its batch changes no later one
    loader.close()


def test_prefetch_is_bounded_and_happens(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = Loader._make

    def recorded(self: Loader, step: int) -> Batch:
        made.append(step)
        return make(self, step)

    monkeypatch.setattr(Loader, "_make", recorded)
    loader = Loader(samples, GLOBAL_BATCH, EOS, prefetch=2)
    loader.batch(0)
    assert loader._worker is not None
    loader._worker.submit(int).result(10)  # behind all that was scheduled
    assert sorted(made) == [0, 1, 2]
    loader.batch(1)
    loader._worker.submit(int).result(10)
    assert sorted(made) == [0, 1, 2, 3]
    loader.close()


def test_errors_in_the_background_surface_where_the_batch_is_asked_for(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Samples.read

    def failing(self: Samples, i: int, out: np.ndarray) -> np.ndarray:
        if i == GLOBAL_BATCH + 3:
            raise DataError("disk gone")
        return read(self, i, out)

    loader = Loader(samples, GLOBAL_BATCH, EOS)
    with monkeypatch.context() as patch:
        patch.setattr(Samples, "read", failing)
        loader.batch(0)
        for _ in range(2):
            with pytest.raises(DataError, match="disk gone"):
                loader.batch(1)
        loader.batch(2)
    loader.batch(1)
    loader.close()


def test_beyond_the_last_sample_is_an_error(samples: Samples) -> None:
    loader = Loader(samples, GLOBAL_BATCH, EOS)
    loader.batch(loader.num_batches - 1)
    for step in (loader.num_batches, -1, 10**12):
        with pytest.raises(DataError, match=f"batch {step} does not exist; {len(samples)} samples"):
            loader.batch(step)
    loader.close()


def test_an_empty_part_has_no_batch(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1, 2, 3]])
    empty = Samples.open(open_datasets(tmp_path), SampleSpec("1", "valid", 2, 1), 10)
    loader = Loader(empty, 4)
    assert loader.num_batches == 0
    with pytest.raises(DataError, match=r"valid part of .*: holds no samples"):
        loader.batch(0)


def test_global_batch_must_divide(samples: Samples) -> None:
    with pytest.raises(DataError, match="global_batch_size=8 cannot be divided over 3 data ranks"):
        Loader(samples, 8, size=3)
    with pytest.raises(DataError, match="global_batch_size=0"):
        Loader(samples, 0)


def test_closing_twice_and_going_on(samples: Samples) -> None:
    loader = Loader(samples, GLOBAL_BATCH, EOS)
    first = loader.batch(0)
    loader.close()
    loader.close()
    assert equal(loader.batch(0), first)
    loader.close()


def test_a_forked_process_starts_its_own_thread(samples: Samples) -> None:
    loader = Loader(samples, GLOBAL_BATCH, EOS)
    loader.batch(0)
    expected = [loader.batch(step).tokens.tolist() for step in (1, 2)]
    loader.batch(0)

    def child(connection: multiprocessing.connection.Connection) -> None:
        connection.send([loader.batch(step).tokens.tolist() for step in (1, 2)])

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender,))
    process.start()
    assert receiver.poll(30)
    assert receiver.recv() == expected
    process.join(30)
    assert process.exitcode == 0
    loader.close()
