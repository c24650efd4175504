"""What a plan foretold beside what a run measured: one event and one sentence at its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_run import Configure

from fourfold.config.batch_schedule import BatchSchedule
from fourfold.engine import build_engine
from fourfold.engine.monitoring import Prediction, PredictionCheck
from fourfold.metrics import Meter, Sinks, Step, StepOutcome, read_jsonl

FORETOLD = Prediction(step_seconds=2.0, bytes_per_rank=3e9, band=0.2, global_batch=8)


class Kept:
    """A sink that keeps its records."""

    name = "memory"

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None: ...


def window(seconds: float, batch: int = 8) -> Step:
    """The record of a step that took so long, on a clock of our own."""
    clock = iter([0.0, seconds, seconds])
    meter = Meter(
        batch_schedule=BatchSchedule(batch), seq_len=1, logging_freq=1, clock=lambda: next(clock)
    )
    record = meter.end_step(StepOutcome(step=1, epoch=0, batch=0, loss=1.0, learning_rate=0.1))
    assert record is not None and record.batch_seconds == seconds
    return record


def told(*windows: Step, peaks: list[int], logging_freq: int = 1) -> list[Mapping[str, Any]]:
    sink, comparison = Kept(), PredictionCheck(FORETOLD)
    for record in windows:
        comparison.take(record)
    comparison.tell(Sinks(sink), 9, peaks, logging_freq)
    return sink.records


def test_the_event_holds_both_and_the_sentence_their_difference() -> None:
    times = [window(seconds) for seconds in (90.0, 50.0, 2.4, 2.5, 2.6)]
    event, notice = told(*times, peaks=[1_000_000_000, 4_000_000_000])
    assert (event["kind"], event["event"], event["step"]) == ("event", "prediction", 9)
    assert (event["predicted_step_seconds"], event["measured_step_seconds"]) == (2.0, 2.5)
    assert (event["predicted_bytes"], event["measured_bytes"]) == (3_000_000_000, 4_000_000_000)
    assert notice["text"] == (
        "predicted 2 s a step, measured 2.5 (-20%); predicted 3.00 GB a process, measured at most "
        "4.00 (-25%)"
    )


def test_only_the_first_steps_are_left_out_not_as_many_windows() -> None:
    event, _ = told(window(9.0), window(4.0), window(6.0), peaks=[1], logging_freq=50)
    assert event["measured_step_seconds"] == 5.0


def test_a_run_of_one_window_is_compared_all_the_same() -> None:
    event, _ = told(window(9.0), peaks=[1])
    assert event["measured_step_seconds"] == 9.0


def test_steps_of_a_batch_that_still_grows_are_not_what_was_foretold() -> None:
    growing = [window(0.5, batch=size) for size in (2, 2, 4, 4, 6)]
    whole = [window(seconds) for seconds in (9.0, 9.0, 3.0)]
    event, _ = told(*growing, *whole, peaks=[1])
    assert event["measured_step_seconds"] == 3.0
    assert told(*growing, peaks=[1]) == [], "there is nothing to compare with"


def test_memory_that_nobody_can_tell_is_no_reason_to_fail() -> None:
    event, notice = told(window(1.0), peaks=[0])
    assert event["measured_bytes"] == 0
    assert notice["text"].endswith("measured at most 0.00")


def test_an_engine_says_what_it_expects_and_then_what_came(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_engine(configure("run", "Engine.max_steps=4"), 1, FORETOLD).fit()
    before, _, after = capsys.readouterr().out.partition("global step 1,")
    assert "expected: 2 s a step (±20%), at most 3.00 GB a process" in before
    assert "predicted 2 s a step, measured" in after
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    (event,) = [record for record in records if record.get("event") == "prediction"]
    late = sorted(r["batch_seconds"] for r in records if r["kind"] == "train" and r["step"] > 2)
    assert late[0] <= event["measured_step_seconds"] <= late[1]
    assert 1e7 < event["measured_bytes"] < 1e11 and event["step"] == 4


def test_a_run_that_is_stopped_is_compared_too(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(configure("run"), 1, FORETOLD)
    step = engine._train_step

    def stop_in_the_third(*arguments: Any) -> Any:
        if engine.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    monkeypatch.setattr(engine, "_train_step", stop_in_the_third)
    engine.fit()
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if r.get("event") == "prediction"] == [3]


def test_a_run_nobody_planned_says_nothing_of_it(configure: Configure, tmp_path: Path) -> None:
    build_engine(configure("run", "Engine.max_steps=1")).fit()
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert not [record for record in records if record.get("event") == "prediction"]
    assert not any("expected:" in record.get("text", "") for record in records)
