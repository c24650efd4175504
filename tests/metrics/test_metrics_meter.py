"""Times and rates, with a clock that moves only when told."""

from __future__ import annotations

import math
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.batch_schedule import BatchSchedule
from fourfold.metrics import Meter, Step, StepOutcome


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


def end(meter: Meter, step: int, **fields: object) -> Step | None:
    values = {"epoch": 0, "batch": step - 1, "loss": 1.0, "learning_rate": 1e-3}
    return meter.end_step(StepOutcome(step=step, **(values | fields)))  # type: ignore[arg-type]


def run_step(meter: Meter, clock: Clock, reader: float, compute: float) -> None:
    with meter.timed("reader", 1):
        clock.tick(reader)
    with meter.timed("forward_backward", 1):
        clock.tick(compute)


def test_rates_follow_from_the_time_of_a_step() -> None:
    clock = Clock()
    meter = Meter(
        batch_schedule=BatchSchedule(2),
        seq_len=1024,
        world_size=8,
        flops_per_token=1e9,
        peak_flops=1e12,
        clock=clock,
    )
    run_step(meter, clock, reader=0.1, compute=0.4)
    record = end(meter, 1)
    assert record is not None
    assert record.batch_seconds == pytest.approx(0.5)  # the reader's time included
    assert record.reader_seconds == pytest.approx(0.1)
    assert record.steps_per_second == pytest.approx(2)
    assert record.ips_total == pytest.approx(4096)
    assert record.ips == pytest.approx(512)
    assert record.mfu == pytest.approx(4096 * 1e9 / (8 * 1e12))
    assert record.tokens == 2048


@given(
    times=st.lists(st.floats(0.01, 10), min_size=1, max_size=30),
    logging_freq=st.integers(1, 7),
    first=st.integers(1, 20),
)
def test_a_window_reports_the_mean_of_its_steps(
    times: list[float], logging_freq: int, first: int
) -> None:
    """Also when it starts between two multiples, as after a resume. A triangular sum would fail."""
    clock = Clock()
    meter = Meter(
        batch_schedule=BatchSchedule(2), seq_len=5, logging_freq=logging_freq, clock=clock
    )
    window: list[float] = []
    for step, seconds in enumerate(times, start=first):
        run_step(meter, clock, reader=seconds / 4, compute=seconds * 3 / 4)
        window.append(seconds)
        record = end(meter, step)
        assert (record is not None) == (step % logging_freq == 0)
        if record is not None:
            mean = sum(window) / len(window)
            assert record.batch_seconds == pytest.approx(mean)
            assert record.reader_seconds == pytest.approx(mean / 4)
            assert record.seconds["forward_backward"] == pytest.approx(mean * 3 / 4)
            window.clear()


def test_evaluating_and_saving_do_not_make_a_batch_dearer() -> None:
    clock = Clock()
    meter = Meter(batch_schedule=BatchSchedule(2), seq_len=5, logging_freq=2, clock=clock)
    for step in (1, 2):
        run_step(meter, clock, reader=0, compute=1)
        record = end(meter, step)
    with meter.timed("evaluate", 1), meter.timed("reader", 1):
        clock.tick(50)
    with meter.timed("save", 1):
        clock.tick(30)
    for step in (3, 4):
        run_step(meter, clock, reader=0, compute=1)
        record = end(meter, step)
    assert record is not None
    assert record.batch_seconds == pytest.approx(1)
    assert record.seconds["evaluate"] == pytest.approx(25)  # per step of the window
    assert record.seconds["save"] == pytest.approx(15)
    assert record.reader_seconds == 0  # the evaluation's own reading is part of the evaluation


def test_setting_up_is_no_part_of_the_first_step() -> None:
    clock = Clock()
    meter = Meter(batch_schedule=BatchSchedule(2), seq_len=5, clock=clock)
    clock.tick(1000)
    run_step(meter, clock, reader=1, compute=1)
    record = end(meter, 1)
    assert record is not None and record.batch_seconds == pytest.approx(2)


def test_a_failing_phase_is_still_timed_and_leaves_the_meter_usable() -> None:
    clock = Clock()
    meter = Meter(batch_schedule=BatchSchedule(2), seq_len=5, clock=clock)
    with pytest.raises(RuntimeError), meter.timed("forward_backward", 1):
        clock.tick(1)
        raise RuntimeError
    with meter.timed("optimizer", 1):
        clock.tick(2)
    record = end(meter, 1)
    assert record is not None and record.seconds == {"forward_backward": 1, "optimizer": 2}


def test_loss_and_norm_are_those_of_the_last_step() -> None:
    meter = Meter(batch_schedule=BatchSchedule(2), seq_len=5, logging_freq=2)
    assert end(meter, 1, loss=5.0) is None
    record = end(meter, 2, loss=4.0, grad_norm=0.5, skipped=3)
    assert record is not None
    assert (record.loss, record.grad_norm, record.skipped) == (4.0, 0.5, 3)


def test_a_clock_that_stands_still_gives_no_infinity() -> None:
    record = end(Meter(batch_schedule=BatchSchedule(2), seq_len=5, clock=Clock()), 1)
    assert record is not None and record.steps_per_second == 0 and record.ips_total == 0


def test_unknown_peak_means_no_mfu_and_the_record_says_when_and_how_much_memory() -> None:
    record = end(
        Meter(batch_schedule=BatchSchedule(2), seq_len=5, flops_per_token=1e9), 1, loss=math.nan
    )
    assert record is not None
    assert record.mfu is None and math.isnan(record.loss)
    assert datetime.fromisoformat(record.time).tzinfo is not None
    assert record.peak_rss_bytes and record.peak_rss_bytes > 10 * 2**20
    assert record.device_bytes is None or record.device_bytes >= 0
