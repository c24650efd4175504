"""How many samples each step takes, against Megatron's published ramp-up and step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import load_config
from fourfold.config.batch_schedule import BatchSchedule, Ramp
from fourfold.errors import ConfigError

DOCUMENT = BatchSchedule(1536, Ramp(16, 16, 433870))


def test_the_175b_ramp_falls_on_its_published_samples():
    steps = (1, 300, 600, 900, 1000, 1100)
    assert [DOCUMENT.batch_of(step - 1) for step in steps] == [16, 32, 80, 208, 288, 416]
    before = [DOCUMENT.consumed(step - 1) for step in steps]
    assert before == [0, 4992, 18560, 57280, 82160, 117520]
    assert DOCUMENT.phases[-1] == (1469, 434608, 1536)
    assert DOCUMENT.consumed(2400) == 1864624
    assert DOCUMENT.steps_within(10846761) == 8247


@settings(deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 20), st.integers(1, 3000), st.integers(1)
)
def test_every_step_is_what_counting_one_by_one_gives(start, increment, growths, samples, odd):
    ramp, whole = Ramp(start, increment, samples), start + growths * increment
    schedule, consumed = BatchSchedule(whole, ramp), 0
    for step in range(300):
        batch = ramp.batch_after(consumed, whole)
        assert (schedule.batch_of(step), schedule.consumed(step)) == (batch, consumed)
        assert schedule.samples_of(step) == range(consumed, consumed + batch)
        assert schedule.steps_within(consumed + odd % batch) == step
        consumed += batch


def test_a_fixed_batch_needs_no_ramp():
    schedule = BatchSchedule(8)
    assert (schedule.batch_of(7), schedule.consumed(7), schedule.steps_within(63)) == (8, 56, 7)
    assert schedule.batches == [8]


def _load(tmp_path: Path, *overrides: str, world: int | None = None):
    path = tmp_path / "c.yaml"
    path.write_text("Model: {num_layers: 8, hidden_size: 64, num_attention_heads: 4}\n")
    return load_config(path, list(overrides), world)


def test_the_length_of_a_run_in_samples_becomes_steps(tmp_path):
    given = (
        "Data.batch_size.global_batch_size=1536",
        "Data.batch_size.micro_batch_size=1",
        "Data.batch_size.rampup=[16,16,433870]",
        "Engine.train_samples=10846761",
    )
    assert _load(tmp_path, *given).Engine.max_steps == 8247
    # A user's own smaller number of steps still ends the run; a larger one does not prolong it.
    assert _load(tmp_path, *given, "Engine.max_steps=20").Engine.max_steps == 20
    assert _load(tmp_path, *given, "Engine.max_steps=9000").Engine.max_steps == 8247


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["Data.batch_size.rampup=[3,4,100]"], "begin with 4"),
        (["Data.batch_size.rampup=[32,4,100]"], "more than global_batch_size=16"),
        (["Data.batch_size.rampup=[4,4]"], "three numbers"),
        (["Engine.train_samples=15"], "less than one step"),
        (
            ["Data.batch_size.rampup=[2,2,100]", "Data.batch_size.micro_batch_size=4"],
            "multiples of 4",
        ),
        (
            ["Data.batch_size.rampup=[2,2,100]", "Distributed.pp_degree=4"],
            "multiples of 4",
        ),
    ],
)
def test_what_cannot_be_cut_or_reached_is_refused(tmp_path, overrides, said):
    sizes = ["Data.batch_size.global_batch_size=16", "Data.batch_size.micro_batch_size=1"]
    with pytest.raises(ConfigError) as refused:
        _load(tmp_path, *sizes, *overrides)
    assert said in str(refused.value)
