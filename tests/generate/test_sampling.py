"""Each step from logits to token: computed by hand, then against a slow reading of the rules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold.generate.sampling import (
    draw,
    forbid_eos,
    force_token,
    keep_top_k,
    keep_top_p,
    likely_enough,
    penalise_repetition,
    sample,
)

INF = math.inf


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values)


def probabilities(max_batch: int = 4) -> st.SearchStrategy[Tensor]:
    """Batches with many ties and zeros, each row with something to choose."""
    row = st.lists(st.sampled_from([0.0, 0.1, 0.1, 0.2, 0.5, 3.0]), min_size=6, max_size=6)
    batch = st.lists(row.filter(any), min_size=1, max_size=max_batch)
    return batch.map(lambda values: torch.tensor(values)).map(lambda t: t / t.sum(-1, keepdim=True))


def over_all(kept: tuple[Tensor, Tensor], vocabulary: int) -> Tensor:
    """Candidates and their ids as a row over the whole vocabulary."""
    probabilities, ids = kept
    assert (ids.diff(dim=-1) > 0).all()
    return torch.zeros(len(ids), vocabulary).scatter(1, ids, probabilities)


def test_forbid_eos() -> None:
    logits = rows([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert forbid_eos(logits, 2).tolist() == [[1.0, 2.0, -INF], [4.0, 5.0, -INF]]
    assert logits.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_penalise_repetition() -> None:
    logits = rows([4.0, -4.0, 1.0, 0.0], [4.0, -4.0, 1.0, -INF])
    tokens = torch.tensor([[0, 1, 0], [3, 3, 2]])
    penalised = penalise_repetition(logits, tokens, 2.0)
    assert penalised.tolist() == [[2.0, -8.0, 1.0, 0.0], [4.0, -4.0, 0.5, -INF]]
    assert logits[0, 0] == 4.0


def test_force_token() -> None:
    assert force_token(rows([1.0, -INF], [2.0, 3.0]), 1).tolist() == [[-INF, 0.0], [-INF, 0.0]]


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [0.0, 0.4, 0.0, 0.0, 0.0]),
        (2, [0.0, 0.4, 0.2, 0.2, 0.0]),  # both share the second place
        (3, [0.0, 0.4, 0.2, 0.2, 0.0]),
        (4, [0.1, 0.4, 0.2, 0.2, 0.1]),
        (99, [0.1, 0.4, 0.2, 0.2, 0.1]),
    ],
)
def test_keep_top_k(k: int, expected: list[float]) -> None:
    both = rows([0.1, 0.4, 0.2, 0.2, 0.1], [1.0, 0.0, 0.0, 0.0, 0.0])
    kept = over_all(keep_top_k(both, k), 5)
    torch.testing.assert_close(kept[0], torch.tensor(expected))
    assert kept[1].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, [0.0, 0.5, 0.0, 0.0]),
        (0.4, [0.0, 0.5, 0.0, 0.0]),
        (0.5, [0.0, 0.5, 0.25, 0.0]),  # 0.5 does not exceed 0.5, so one more crosses it
        (0.6, [0.0, 0.5, 0.25, 0.0]),
        (0.8, [0.125, 0.5, 0.25, 0.0]),  # of two equals the lower id comes first
        (0.9, [0.125, 0.5, 0.25, 0.125]),
        (1.0, [0.125, 0.5, 0.25, 0.125]),
    ],
)
def test_keep_top_p(p: float, expected: list[float]) -> None:
    kept = keep_top_p(rows([0.125, 0.5, 0.25, 0.125], [0.0, 0.0, 0.0, 1.0]), p)
    assert kept.tolist() == [expected, [0.0, 0.0, 0.0, 1.0]]


def test_top_p_is_a_share_of_the_full_distribution() -> None:
    """top_k=2 leaves a mass of 0.5; renormalised, the first token alone would exceed p=0.45."""
    top_two, ids = keep_top_k(rows([0.3, 0.2, 0.18, 0.17, 0.15]), 2)
    kept = over_all((keep_top_p(top_two, 0.45), ids), 5)
    torch.testing.assert_close(kept, rows([0.3, 0.2, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [(0.0, 1), (0.2499, 1), (0.25, 2), (0.7499, 2), (0.75, 4), (1 - 2**-53, 4)],
)
def test_draw_inverts_the_cumulative_distribution(uniform: float, expected: int) -> None:
    unnormalised = rows([0.0, 0.125, 0.25, 0.0, 0.125, 0.0])
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    assert draw(unnormalised, uniforms).tolist() == [expected]


def test_draw_follows_the_distribution() -> None:
    weights = rows([0.1, 0.0, 0.6, 0.3]).expand(20_000, 4)
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    counts = torch.bincount(draw(weights, uniforms), minlength=4) / 20_000
    torch.testing.assert_close(counts, torch.tensor([0.1, 0.0, 0.6, 0.3]), atol=0.015, rtol=0)


# The rules again, one row at a time in plain Python


def slow_top_k(row: list[float], k: int) -> list[float]:
    threshold = sorted(row, reverse=True)[min(max(k, 1), len(row)) - 1]
    return [value if value >= threshold else 0.0 for value in row]


def slow_top_p(row: list[float], p: float) -> list[float]:
    kept, total = [0.0] * len(row), torch.tensor(0.0)
    for position, token in enumerate(sorted(range(len(row)), key=lambda i: (-row[i], i))):
        if position > 0 and total > p:
            break
        kept[token] = row[token]
        total = total + row[token]
    return kept


def slow_penalty(row: list[float], seen: set[int], penalty: float) -> list[float]:
    changed = [value * penalty if value < 0 else value / penalty for value in row]
    return [changed[i] if i in seen else value for i, value in enumerate(row)]


@settings(deadline=None)
@given(batch=probabilities(), k=st.integers(1, 9))
def test_top_k_equals_the_slow_reading(batch: Tensor, k: int) -> None:
    kept = over_all(keep_top_k(batch, k), batch.shape[1])
    assert kept.tolist() == [slow_top_k(row, k) for row in batch.tolist()]


def test_a_first_look_that_ends_among_equals_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which of the equals it saw is chance, and of them the lowest ids come first."""
    monkeypatch.setattr("fourfold.generate.sampling.FIRST_LOOK", 4)
    batch = rows([0.1, 0.1, 0.1, 0.1, 0.2, 0.1, 0.3])
    assert likely_enough(batch, 0.45)[1].shape == (1, 4)
    assert likely_enough(batch, 0.65)[1].shape == (1, 7)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.1, 0.6, 0.99])
def test_a_first_look_finds_all_that_top_p_keeps(
    sharpness: float, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.generate.sampling.FIRST_LOOK", 16)
    generator = torch.Generator().manual_seed(2)
    # Whole numbers, so that many tokens are equally probable, at the edge of the look too.
    logits = sharpness * torch.randn(3, 200, generator=generator).round()
    batch = torch.softmax(logits, dim=-1)
    candidates, ids = likely_enough(batch, p)
    kept = over_all((keep_top_p(candidates, p), ids), 200)
    assert torch.equal(kept, keep_top_p(batch, p))
    uniforms = torch.rand(3, generator=generator, dtype=torch.float64)
    assert torch.equal(sample(logits, 0, p, 1.0, uniforms), draw(kept, uniforms))


@settings(deadline=None)
@given(batch=probabilities(), p=st.floats(0, 0.95))
def test_top_p_equals_the_slow_reading(batch: Tensor, p: float) -> None:
    # Where a partial sum equals p to the last bit, rounding of the sum decides; stay clear of it.
    partial_sums = batch.sort(dim=-1, descending=True).values.cumsum(-1)
    if (partial_sums - p).abs().min() > 1e-6:
        assert keep_top_p(batch, p).tolist() == [slow_top_p(row, p) for row in batch.tolist()]


@settings(deadline=None)
@given(data=st.data(), penalty=st.sampled_from([0.5, 1.2, 3.0]))
def test_penalty_equals_the_slow_reading(data: st.DataObject, penalty: float) -> None:
    size = data.draw(st.integers(1, 4))
    logits = torch.randn(size, 6, generator=torch.Generator().manual_seed(size))
    tokens = data.draw(
        st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=size, max_size=size)
    )
    expected = [slow_penalty(row, set(seen), penalty) for row, seen in zip(logits.tolist(), tokens)]
    torch.testing.assert_close(
        penalise_repetition(logits, torch.tensor(tokens), penalty), torch.tensor(expected)
    )


@settings(deadline=None)
@given(batch=probabilities(), seed=st.integers(0, 1000))
def test_draw_chooses_what_is_possible_and_rows_stand_alone(batch: Tensor, seed: int) -> None:
    uniforms = torch.rand(len(batch), generator=torch.Generator().manual_seed(seed))
    chosen = draw(batch, uniforms)
    assert (batch.gather(1, chosen.unsqueeze(1)) > 0).all()
    alone = [draw(batch[i : i + 1], uniforms[i : i + 1]).item() for i in range(len(batch))]
    assert chosen.tolist() == alone
