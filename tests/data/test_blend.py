"""The mixture's choice of sources equals Megatron's, however it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fourfold.config.recipe import Recipe, Rounding, parse_recipe
from fourfold.data import mixture
from fourfold.data.mixture import blend_index, blend_sizes, choose_sources, normalised, open_blend


def plain_loop(shares: list[float], size: int) -> tuple[list[int], list[int]]:
    counts, chosen, numbers = [0] * len(shares), [], []
    for sample in range(size):
        scale = max(float(sample), 1.0)
        best, largest = 0, shares[0] * scale - counts[0]
        for source in range(1, len(shares)):
            behind = shares[source] * scale - counts[source]
            if behind > largest:
                best, largest = source, behind
        chosen.append(best)
        numbers.append(counts[best])
        counts[best] += 1
    return chosen, numbers


def test_golden_two_sources() -> None:
    index = blend_index(normalised([0.35, 0.65]), 20)
    assert "".join(map(str, index["source_index"])) == "10101101101101101101"
    numbers = [0, 0, 1, 1, 2, 3, 2, 4, 5, 3, 6, 7, 4, 8, 9, 5, 10, 11, 6, 12]
    assert index["source_sample_index"].tolist() == numbers


def test_golden_three_sources() -> None:
    assert choose_sources(normalised([0.5, 0.25, 0.25]), 8).tolist() == [0, 1, 2, 0, 0, 1, 2, 0]


WEIGHTS = st.lists(
    st.one_of(st.floats(1e-9, 1.0), st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1.0, 1e-6])),
    min_size=1,
    max_size=7,
)


@given(weights=WEIGHTS, size=st.integers(0, 3000), length=st.integers(1, 40))
@example(weights=[1 / 3] * 3, size=3000, length=7)
@example(weights=[1e-9, 0.5, 0.5, 1e-3], size=3000, length=3)
@example(weights=[0.5, 0.5], size=1, length=1)
@settings(max_examples=150, deadline=None)
def test_stretches_side_by_side_equal_the_plain_loop(
    weights: list[float], size: int, length: int
) -> None:
    shares = normalised(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "SHORTEST_STRETCH", length)
        patch.setattr(mixture, "WARM_UP", length)
        index = blend_index(shares, size)
    chosen, numbers = plain_loop(shares.tolist(), size)
    assert index["source_index"].tolist() == chosen
    assert index["source_sample_index"].tolist() == numbers


@pytest.mark.parametrize("lost", [1, 3, 60])
def test_wrong_estimates_are_found_and_mended(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the counts a stretch begins with, the result is the loop's."""
    shares = normalised([0.2, 0.5, 0.3])
    right = mixture._estimated_counts

    def wrong(shares: np.ndarray, first: np.ndarray) -> np.ndarray:
        counts = right(shares, first)
        counts[2::lost, 0] += 40
        counts[2::lost, 1] -= 40
        return counts

    monkeypatch.setattr(mixture, "SHORTEST_STRETCH", 16)
    monkeypatch.setattr(mixture, "_estimated_counts", wrong)
    assert choose_sources(shares, 4000).tolist() == plain_loop(shares.tolist(), 4000)[0]


def test_a_long_mixture_with_the_usual_stretches() -> None:
    for weights in ([0.35, 0.65], [1e-5, 1.0, 2.0], [3.0, 1.0, 1.0, 1.0, 7.0]):
        shares = normalised(weights)
        assert choose_sources(shares, 200_000).tolist() == plain_loop(shares.tolist(), 200_000)[0]


@given(weights=WEIGHTS, sizes=st.tuples(st.integers(0, 900), st.integers(0, 900)))
@settings(max_examples=50, deadline=None)
def test_a_longer_mixture_begins_with_the_shorter(
    weights: list[float], sizes: tuple[int, int]
) -> None:
    short, long = sorted(sizes)
    shares = normalised(weights)
    assert choose_sources(shares, long)[:short].tolist() == choose_sources(shares, short).tolist()


@given(weights=WEIGHTS, size=st.integers(0, 900), rounding=st.sampled_from(get_args(Rounding)))
@settings(max_examples=100, deadline=None)
def test_what_is_opened_suffices(weights: list[float], size: int, rounding: str) -> None:
    shares = normalised(weights)
    opened, counted = blend_sizes(shares, size, rounding)
    taken = np.bincount(choose_sources(shares, size), minlength=len(weights))
    assert (taken <= opened).all()
    assert sum(counted) >= size


def test_both_roundings() -> None:
    shares = normalised([0.35, 0.65])
    assert blend_sizes(shares, 260, "megatron_core") == ([92, 170], [91, 169])
    assert blend_sizes(shares, 30, "megatron_core") == ([12, 21], [11, 20])
    assert blend_sizes(shares, 30, "megatron_deepspeed") == ([11, 20], [11, 20])
    assert blend_sizes(shares, 100_000, "megatron_deepspeed") == ([35_175, 65_325],) * 2
    assert blend_sizes(shares, 100_000, "megatron_core")[1] == [35_000, 65_000]


def test_the_index_is_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = normalised([1.0, 2.0])
    built, place = open_blend(shares, 100, [tmp_path])
    assert place is not None and place.is_dir()
    monkeypatch.setattr(mixture, "blend_index", lambda *_: pytest.fail("built again"))
    found, _ = open_blend(shares, 100, [tmp_path])
    assert all(np.array_equal(built[name], found[name]) for name in built)


@pytest.mark.parametrize(
    ("value", "paths", "weights"),
    [
        ("0.35 A 0.65 B", ("A", "B"), (0.35, 0.65)),
        (["0.35", "A", "0.65", "B"], ("A", "B"), (0.35, 0.65)),
        (["35", "with blank", "65", "B"], ("with blank", "B"), (35.0, 65.0)),
        ("1e-2 A .5 B", ("A", "B"), (0.01, 0.5)),
        ("1 2024", ("2024",), (1.0,)),
        ("A", ("A",), None),
        ("my data", ("my data",), None),
        ("nan A", ("nan A",), None),
        (["A", "B"], ("A", "B"), None),
        (["0.5", "A", "B"], ("0.5", "A", "B"), None),
        ([], (), None),
    ],
)
def test_recipes(value: str | list[str], paths: tuple[str], weights: tuple[float] | None) -> None:
    assert parse_recipe(value) == Recipe(paths, weights)


@pytest.mark.parametrize("value", ["0 A 1 B", "-1 A 2 B", ["1e999", "A"], "1e308 A 1e308 B"])
def test_weights_that_mean_nothing(value: str | list[str]) -> None:
    with pytest.raises(ValueError, match="weight"):
        parse_recipe(value)
