"""The picture of the losses, from one record to a hundred thousand."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import DataError
from fourfold.metrics import plot_losses
from fourfold.metrics.plot import log_locator, smooth, thin_out


def train(step: int, loss: float | str) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": loss, "learning_rate": 1e-3, "tokens": step * 8}


def draw(directory: Path, records: list[dict[str, Any]]) -> np.ndarray:
    """The pixels of the picture, (height, width, 4)."""
    from matplotlib.image import imread

    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = plot_losses(directory)
    assert path == directory / "loss_curve.png"
    assert sorted(p.name for p in directory.iterdir()) == ["loss_curve.png", "metrics.jsonl"]
    return imread(path)


def has_colour(pixels: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return bool((np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.02).any())


def test_train_eval_test_rate_and_lost_steps_are_all_drawn(tmp_path: Path) -> None:
    from fourfold.metrics.plot import BAD, EVAL, RATE, TEST, TRAIN

    records = [train(step, 3 + 8 / step) for step in range(1, 200)]
    plain = draw(tmp_path / "run", records)
    assert plain.shape == (900, 1350, 4)
    assert has_colour(plain, TRAIN) and has_colour(plain, RATE)
    assert not any(has_colour(plain, colour) for colour in (EVAL, TEST, BAD))
    records += [{"kind": "eval", "step": 100, "loss": 3.2}, train(201, "NaN")]
    records += [{"kind": "test", "step": 200, "loss": 3.3}, {"kind": "notice", "text": "x"}]
    full = draw(tmp_path / "run", records)
    assert all(has_colour(full, colour) for colour in (TRAIN, RATE, EVAL, TEST, BAD))


@pytest.mark.parametrize(
    "records",
    [
        [],
        [train(1, 11.0)],
        [train(1, "NaN")],
        [train(1, 0.0), train(2, -1.0)],
        [train(1, 5.0), train(2, 5.0)],
        [train(step, 10.0**step) for step in range(-30, 30)],
        [{"kind": "eval", "step": 0, "loss": 3.2}],
    ],
    ids=["none", "one", "lost", "negative", "flat", "huge", "eval only"],
)
def test_odd_runs_are_drawn_without_a_warning(
    tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    assert draw(tmp_path / "$odd_{name", records).shape == (900, 1350, 4)


def test_a_hundred_thousand_records(tmp_path: Path) -> None:
    records = [train(step, 3 + 8 / step + math.sin(step)) for step in range(1, 100_001)]
    assert draw(tmp_path / "long", records).shape == (900, 1350, 4)


def test_without_metrics_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        plot_losses(tmp_path)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300))
def test_smoothing_is_a_mean_of_neighbours(values: list[float]) -> None:
    array = np.array(values)
    count = len(array)
    expected = []
    for i in range(count):
        half = min(i, count // 50)
        expected.append(array[i - half : i + half + 1].mean())
    np.testing.assert_allclose(smooth(array), expected, atol=1e-9)


def test_thinning_keeps_order_and_every_spike() -> None:
    values = np.random.default_rng(0).normal(size=50_000)
    values[12_345], values[40_000] = 100, -100
    steps, kept = thin_out(np.arange(50_000.0), values, most=1000)
    assert len(kept) <= 1000 and (np.diff(steps) > 0).all()
    assert kept.max() == 100 and kept.min() == -100
    assert (values[steps.astype(int)] == kept).all()


@given(st.floats(1e-6, 1e6), st.floats(1.5, 1e12))
def test_ticks_are_few_and_inside(low: float, ratio: float) -> None:
    ticks = log_locator(low, low * ratio).tick_values(low, low * ratio)
    assert 1 <= sum(low <= tick <= low * ratio for tick in ticks) <= 10
