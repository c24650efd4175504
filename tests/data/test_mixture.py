"""Mixtures serve what Megatron serves, and in elastic order may change under way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.token_files import documents_of, write_megatron
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data import Loader, Mixture, Samples, SampleSpec, TokenDataset, open_datasets
from fourfold.data.datasets import document_starts
from fourfold.data.index import build_elastic_indices, plan_elastic
from fourfold.data.mixture import DataSource, MixtureProgress
from fourfold.errors import DataError

FIXTURE = Path(__file__).parent.parent / "fixtures" / "megatron_blend"


def fixture_mixture(part: str, cache_dir: Path, rounding: str) -> tuple[Mixture, int, dict]:
    case = json.loads((FIXTURE / "case.json").read_text())
    wanted = dict(zip(("train", "valid", "test"), case["num_samples"]))[part]
    sources = [
        DataSource(prefix, float(weight), open_datasets(FIXTURE / prefix))
        for weight, prefix in zip(case["blend"], case["prefixes"])
    ]
    length, seed = case["sequence_length"], case["seed"]
    spec = SampleSpec(case["split"], part, length, seed, "megatron", rounding, cache_dir)
    return Mixture.open(sources, spec, wanted), wanted, case


@pytest.mark.parametrize("part", ["train", "valid"])
def test_megatron_blend_fixture(part: str, tmp_path: Path) -> None:
    expected = np.load(FIXTURE / "expected.npz", allow_pickle=False)
    mixture, wanted, case = fixture_mixture(part, tmp_path, "megatron_core")
    tokens = np.stack([mixture[i] for i in range(wanted)])
    assert np.array_equal(tokens, expected[f"{part}_tokens"])
    batch = Loader(mixture, wanted, eos_token_id=case["eod"]).batch(0)
    assert np.array_equal(batch.loss_mask.numpy(), expected[f"{part}_loss_mask"])
    assert batch.global_valid_tokens == expected[f"{part}_loss_mask"].sum()


def test_the_other_rounding_is_another_mixture(tmp_path: Path) -> None:
    core, wanted, _ = fixture_mixture("valid", tmp_path, "megatron_core")
    deepspeed, _, _ = fixture_mixture("valid", tmp_path, "megatron_deepspeed")
    # Opened for 12 and 11 samples of the first source: one needs another epoch and reshuffles.
    assert any(not np.array_equal(core[i], deepspeed[i]) for i in range(wanted))
    assert len(core) == len(deepspeed) == 31
    assert len(fixture_mixture("train", tmp_path, "megatron_core")[0]) == 260
    assert len(fixture_mixture("train", tmp_path, "megatron_deepspeed")[0]) == 262
    assert core.fingerprint != deepspeed.fingerprint


# -- elastic order ------------------------------------------------------------------------------


def dataset(path: Path, sizes: list[int], first: int) -> list[TokenDataset]:
    return open_datasets(write_megatron(path, documents_of(sizes, first)))


@pytest.fixture
def two(tmp_path: Path) -> list[list[TokenDataset]]:
    """Two sources of 23 and 47 documents; all their tokens differ."""
    generator = np.random.default_rng(5)
    one = dataset(tmp_path / "a", generator.integers(1, 30, 23).tolist(), 0)
    other = dataset(tmp_path / "b", generator.integers(1, 30, 47).tolist(), 10_000)
    return [one, other]


def in_memory(documents: list[list[int]]) -> TokenDataset:
    sizes = np.array([len(document) for document in documents], np.int32)
    ids = np.array([token for document in documents for token in document], np.int32)
    return TokenDataset(Path("memory"), ids, sizes, document_starts(sizes))


def elastic(tmp_path: Path, seed: int = 3, seq_len: int = 8) -> SampleSpec:
    return SampleSpec("1", "train", seq_len, seed, "elastic", cache_dir=tmp_path / "cache")


def mixed(
    two: list[list[TokenDataset]],
    weights: tuple[float, float],
    tmp_path: Path,
    num_samples: int,
    progress: MixtureProgress | None = None,
) -> Mixture:
    sources = [DataSource(name, w, d) for name, w, d in zip("AB", weights, two)]
    return Mixture.open(sources, elastic(tmp_path), num_samples, progress)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    seq_len=st.integers(1, 12),
    asked=st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
@settings(deadline=None)
def test_elastic_samples_do_not_depend_on_how_many_are_asked(
    sizes: list[int], seq_len: int, asked: tuple[int, int]
) -> None:
    source = in_memory(documents_of(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.data.cache.places", lambda *_: [])
        patch.setattr("fourfold.data.index.ELASTIC_EPOCHS", 4)
        short, long = (
            Samples.open([source], SampleSpec("1", "train", seq_len, 7, "elastic"), count)
            for count in sorted(asked)
        )
    assert len(short) >= min(asked) or sum(sizes) == 0
    assert short.fingerprint == long.fingerprint
    for i in range(len(short)):
        assert np.array_equal(short[i], long[i])


@given(sizes=st.lists(st.integers(1, 9), min_size=4, max_size=12), seq_len=st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_each_elastic_epoch_serves_every_sample_of_its_own_cut_once(
    sizes: list[int], seq_len: int
) -> None:
    if sum(sizes) <= seq_len:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.data.cache.places", lambda *_: [])
        samples = Samples.open(
            [in_memory(documents_of(sizes))], SampleSpec("1", "train", seq_len, 7, "elastic"), 0
        )
        per_epoch = plan_elastic(len(sizes), sum(sizes), seq_len).samples_per_epoch
        samples = Samples.open(
            samples.sources, SampleSpec("1", "train", seq_len, 7, "elastic"), 3 * per_epoch
        )
    for epoch in range(3):
        inputs = Counter(
            int(token)
            for i in range(epoch * per_epoch, (epoch + 1) * per_epoch)
            for token in samples[i][:-1]
        )
        assert set(inputs.values()) == {1}
        assert len(inputs) == per_epoch * seq_len > sum(sizes) - 1 - seq_len


def test_golden_elastic_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs under way rely on it: this order must never change, however epochs are kept."""
    sizes = np.array([5, 3, 9, 1, 7], np.int32)
    documents: list[int] = []
    shuffles: list[int] = []
    for together in (2, 1):
        monkeypatch.setattr("fourfold.data.index.ELASTIC_EPOCHS", together)
        plan = plan_elastic(5, 25, 4)
        entries = [
            build_elastic_indices([(0, 5)], sizes, plan, 1234, entry)
            for entry in range(4 // together)
        ]
        documents += [int(d) for entry in entries for d in entry["document_index"]]
        rows = [int(row) for entry in entries for row in entry["shuffle_index"]]
        shuffles += [row % 7 for row in rows]
    assert documents == [4, 3, 1, 2, 0, 3, 1, 4, 2, 0, 3, 2, 1, 4, 0, 3, 4, 2, 1, 0] * 2
    assert shuffles[:12] == [0, 3, 4, 1, 5, 2, 0, 3, 4, 1, 2, 5]
    assert shuffles[24:] == shuffles[:24]


def test_elastic_epochs_differ_and_follow_the_seed(two: list, tmp_path: Path) -> None:
    def order(seed: int, first: int) -> list[list[int]]:
        samples = Samples.open(two[0], elastic(tmp_path, seed), 200)
        return [samples[i].tolist() for i in range(first, first + 20)]

    per_epoch = plan_elastic(23, two[0][0].num_tokens, 8).samples_per_epoch
    assert order(3, 0) == order(3, 0)
    assert order(3, 0) != order(3, per_epoch)
    assert order(3, 0) != order(4, 0)


def test_a_corpus_smaller_than_a_sample_is_served_in_elastic_order(tmp_path: Path) -> None:
    samples = Samples.open(dataset(tmp_path / "x", [2], 7), elastic(tmp_path, seq_len=5), 6)
    assert len(samples) >= 6
    assert {tuple(samples[i].tolist()) for i in range(6)} <= {(7, 8) * 3, (8, 7) * 3}


@pytest.mark.parametrize("sizes", [(1, 4), (4, 2), (2, 2)])
def test_weights_changed_mid_run_under_another_degree_lose_and_repeat_nothing(
    sizes: tuple[int, int], two: list, tmp_path: Path
) -> None:
    """Steps 0-9 at 0.35 / 0.65 on some ranks, 10-39 at 0.8 / 0.2 on others, then extended."""
    batch, served = 8, []

    def serve(mixture: Mixture, steps: range, ranks: int) -> None:
        loaders = [Loader(mixture, batch, rank=rank, size=ranks) for rank in range(ranks)]
        for step in steps:
            for loader in loaders:
                made = loader.batch(step)
                for i, tokens in zip(made.sample_ids.tolist(), made.tokens.numpy()):
                    source, number = mixture.locate(i)
                    assert np.array_equal(mixture.members[source][number][:-1], tokens)
                    served.append((source, number))
        for loader in loaders:
            loader.close()

    first = mixed(two, (0.35, 0.65), tmp_path, batch * 10)
    serve(first, range(10), sizes[0])
    state = json.loads(json.dumps(first.state(batch * 10)))
    fresh = mixed(two, (0.8, 0.2), tmp_path, batch * 40)
    progress, notices = fresh.progress_after(state, batch * 10)
    assert "changes after 80 samples" in notices[0]
    second = mixed(two, (0.8, 0.2), tmp_path, batch * 40, progress)
    serve(second, range(10, 25), sizes[1])
    # A resume with the same weights, half way through them, and a longer run: nothing changes.
    state = json.loads(json.dumps(second.state(batch * 25)))
    longer = mixed(two, (0.8, 0.2), tmp_path, batch * 90)
    progress, notices = longer.progress_after(state, batch * 25)
    assert notices == [] and progress == second.progress
    third = mixed(two, (0.8, 0.2), tmp_path, batch * 90, progress)
    assert [third.locate(i) for i in range(200, 320)] == [second.locate(i) for i in range(200, 320)]
    serve(third, range(25, 90), sizes[0])

    for source in (0, 1):
        numbers = [number for which, number in served if which == source]
        assert numbers == list(range(len(numbers))), "a source's samples come one after the other"
        assert third.served(batch * 90)[source] == len(numbers)
    since = Counter(source for source, _ in served[80:])
    assert abs(since[0] / (batch * 80) - 0.8) < 0.01, "the new weights hold from the change on"
    per_epoch = [len({member[i].tobytes() for i in range(50)}) for member in third.members]
    assert per_epoch == [50, 50]


def test_sources_that_leave_keep_their_count_and_new_ones_begin(two: list, tmp_path: Path) -> None:
    first = mixed(two, (0.5, 0.5), tmp_path, 40)
    alone = [DataSource("A", 1.0, two[0])]
    opened = Mixture.open(alone, elastic(tmp_path), 60)
    progress, notices = opened.progress_after(first.state(40), 40)
    assert "no longer served: B" in notices[0]
    second = Mixture.open(alone, elastic(tmp_path), 60, progress)
    assert [second.locate(i) for i in (40, 59)] == [(0, 20), (0, 39)]
    third = dataset(tmp_path / "c", [9] * 9, 20_000)
    back = [DataSource("B", 1.0, two[1]), DataSource("C", 1.0, third)]
    opened = Mixture.open(back, elastic(tmp_path), 100)
    progress, _ = opened.progress_after(second.state(60), 60)
    last = Mixture.open(back, elastic(tmp_path), 100, progress)
    assert [last.locate(i) for i in (60, 61)] == [(0, 20), (1, 0)]
    assert last.state(100)["served_before"][second.members[0].identity] == 40


def test_positions_outside_are_refused(two: list, tmp_path: Path) -> None:
    progress = MixtureProgress(10, {})
    mixture = mixed(two, (1.0, 1.0), tmp_path, 20, progress)
    for i in (-1, 9, 20):
        with pytest.raises(IndexError):
            mixture.locate(i)


def test_the_same_documents_twice_are_refused_in_elastic_order(two: list, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="X and Y hold the same documents"):
        Mixture.open(
            [DataSource("X", 1, two[0]), DataSource("Y", 1, two[0])], elastic(tmp_path), 10
        )


def test_a_source_without_tokens_for_its_share(two: list, tmp_path: Path) -> None:
    empty = dataset(tmp_path / "empty", [], 0)
    sources = [DataSource("A", 1.0, two[0]), DataSource("E", 1.0, empty)]
    with pytest.raises(DataError, match="E: the train part has no tokens"):
        Mixture.open(sources, elastic(tmp_path), 10)
    spec = SampleSpec("1,1,1", "valid", 4, 1, "megatron", cache_dir=tmp_path / "cache")
    mixture = Mixture.open(sources, spec, 10)
    assert [source.name for source in mixture.sources] == ["A"]


def test_many_small_sources_do_not_exhaust_the_large_one(tmp_path: Path) -> None:
    """Many small sources: for each ceil(N w) is 1, which the rule does not wait to give."""
    many = [
        DataSource(str(i), 0.001 if i else 1.0, dataset(tmp_path / f"s{i}", [3], 10 * i))
        for i in range(40)
    ]
    spec = SampleSpec("1", "train", 2, 1, "megatron", cache_dir=tmp_path / "cache")
    mixture = Mixture.open(many, spec, 60)
    assert len(mixture) >= 60
    for i in range(len(mixture)):
        source, number = mixture.locate(i)
        assert number < len(mixture.members[source])
        assert mixture[i].shape == (3,)


def test_a_mixture_of_no_samples_is_empty(two: list, tmp_path: Path) -> None:
    assert len(mixed(two, (1.0, 2.0), tmp_path, 0)) == 0
    spec = SampleSpec("1", "train", 4, 1, "megatron", cache_dir=tmp_path / "cache")
    assert len(Mixture.open([DataSource("A", 1.0, two[0])], spec, 0)) == 0


def test_a_damaged_blend_index_is_built_again(two: list, tmp_path: Path) -> None:
    mixture = mixed(two, (1.0, 2.0), tmp_path, 30)
    built = [mixture[i].tolist() for i in range(30)]
    place = mixture.places[-1] / "source_index.npy"
    content = bytearray(place.read_bytes())
    content[-60:] = b"\x7f" * 60
    place.write_bytes(content)
    again = mixed(two, (1.0, 2.0), tmp_path, 30)
    assert [again[i].tolist() for i in range(30)] == built
