"""The profiler's window, its trace and its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config.batch_schedule import BatchSchedule
from fourfold.errors import UserError
from fourfold.metrics import Meter, ProfilerWindow
from fourfold.metrics.profiler import VIEWS


def run(directory: Path, steps: int = 6, **options: Any) -> list[str]:
    """Train a little under a profiler; what it said."""
    torch.set_num_threads(1)
    said: list[str] = []
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    meter = Meter(batch_schedule=BatchSchedule(1), seq_len=1)
    enabled: dict[str, Any] = {"enable": True, "profiler_log": directory, "echo": said.append}
    with ProfilerWindow(**(enabled | options)) as window:
        for _ in range(steps):
            with meter.timed("forward_backward", 1):
                model(torch.randn(4, 8)).sum().backward()
            with meter.timed("optimizer", 1):
                optimizer.step()
            window.step()
    return said


def trace_of(directory: Path) -> list[dict[str, Any]]:
    (path,) = directory.iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    assert isinstance(events, list)
    return events


def steps_in(events: list[dict[str, Any]]) -> set[str]:
    return {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}


def test_a_window_leaves_a_trace_of_its_steps_and_the_default_tables(tmp_path: Path) -> None:
    said = run(tmp_path, scheduler=[2, 4])
    events = trace_of(tmp_path)
    assert steps_in(events) == {"ProfilerStep#2", "ProfilerStep#3"}
    names = [event.get("name") for event in events]
    assert names.count("aten::addmm") == 2
    assert names.count("fourfold/forward_backward") == 2
    assert [text.split(":")[0] for text in said] == [
        "overview",
        "model",
        "kernel",
        "op",
        "profiler",
    ]
    assert "aten::addmm" in said[3] and "forward_backward" in said[1] and "optimizer" in said[1]
    assert str(tmp_path / "rank0_steps_2_to_4.json") in said[-1] and "perfetto" in said[-1]


def test_without_a_scheduler_every_step_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, steps=3, scheduler=None, rank=5, ranks=[0, 5])
    assert steps_in(trace_of(tmp_path)) >= {f"ProfilerStep#{step}" for step in range(3)}
    assert (tmp_path / "rank5_steps_0_to_3.json").exists()


def test_a_run_that_ends_inside_the_window_still_leaves_its_trace(tmp_path: Path) -> None:
    run(tmp_path, steps=3, scheduler=[1, 100])
    assert steps_in(trace_of(tmp_path)) >= {"ProfilerStep#1", "ProfilerStep#2"}


def test_a_window_never_reached_is_said(tmp_path: Path) -> None:
    (text,) = run(tmp_path / "log", steps=2, scheduler=[5, 6])
    assert "nothing recorded" in text and "2 steps" in text and "step 5" in text
    assert not (tmp_path / "log").exists()


def test_when_off_nothing_happens(tmp_path: Path) -> None:
    assert run(tmp_path / "log", enable=False) == []
    assert not (tmp_path / "log").exists()


def test_detailed_prints_every_view(tmp_path: Path) -> None:
    said = run(tmp_path, scheduler=[1, 3], detailed=True)
    assert [text.split(":")[0] for text in said] == [*VIEWS, "profiler"]
    by_view = dict(zip(VIEWS, said))
    assert "aten::mm" in by_view["mem"] and "none recorded" in by_view["dist"]
    assert "Optimizer.step#SGD.step" in by_view["udf"]


@pytest.mark.parametrize(
    ("summary", "views"),
    [
        ({"mem": True, "op": False, "kernel": None}, ["overview", "model", "kernel", "mem"]),
        (dict.fromkeys(VIEWS, False), []),
    ],
)
def test_summary_turns_single_views_on_and_off(
    tmp_path: Path, summary: Mapping[str, bool | None], views: list[str]
) -> None:
    said = run(tmp_path, scheduler=[1, 2], summary=summary)
    assert [text.split(":")[0] for text in said] == [*views, "profiler"]


def test_shapes_and_memory_are_recorded_only_when_asked(tmp_path: Path) -> None:
    for asked in (True, False):
        directory = tmp_path / str(asked)
        run(directory, scheduler=[1, 2], record_shapes=asked, profile_memory=asked)
        events = trace_of(directory)
        assert any("Input Dims" in event.get("args", {}) for event in events) == asked
        assert any(event.get("name") == "[memory]" for event in events) == asked


@pytest.mark.parametrize("scheduler", [[3, 3], [-1, 2], [1], [1, 2, 3]])
def test_a_window_that_is_none_is_refused(scheduler: list[int]) -> None:
    with pytest.raises(UserError, match=r"Profiler\.scheduler=\["):
        ProfilerWindow(True, scheduler)


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(UserError, match=r"no view memory; choose from overview"):
        ProfilerWindow(True, summary={"memory": True})
