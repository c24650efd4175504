"""The profiler: a window of steps as a Chrome trace, with tables of where the time went.

Steps are counted from 0 at the start of this process, so the window means the same in a fresh run
and in a resumed one. Outside its window, or when not enabled, the profiler costs nothing.

The tables are the views of FleetX's `Profiler.summary`:

overview  time per step, and how it divides      op      operators by their own time
device    how busy host and device were          mem     operators by the memory they took
model     phases of a step                       memcpy  copies and fills
dist      communication                          udf     ranges marked by the user's code
kernel    device kernels
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from fourfold.errors import UserError
from fourfold.metrics.meter import PROFILER_PREFIX
from fourfold.terminal import table_lines


class ProfilerWindow:
    """Make it before the first step, call `step` after every step and `close` at the end.

    `scheduler` is [start, end), or None for every step; a rank that is not one of `ranks` records
    nothing. `summary` turns single views on or off; `detailed` prints them all. The trace and the
    tables are made when the window ends.
    """

    def __init__(
        self,
        enable: bool = False,
        scheduler: Sequence[int] | None = None,
        ranks: Sequence[int] = (0,),
        profiler_log: str | os.PathLike[str] = "profiler_log",
        detailed: bool = False,
        record_shapes: bool = True,
        profile_memory: bool = True,
        summary: Mapping[str, bool | None] | None = None,
        *,
        rank: int = 0,
        echo: Callable[[str], None] = print,
    ) -> None:
        self._start, self._end = _window(scheduler)
        self._views = _chosen_views(detailed, summary or {})
        self._directory = Path(profiler_log)
        self._rank = rank
        self._echo = echo
        self._enabled = enable and rank in ranks
        self._steps_done = 0
        self._recording: profile | None = None
        self._record_shapes = record_shapes
        self._profile_memory = profile_memory
        self._open_or_finish()

    def step(self) -> None:
        """A step has ended."""
        self._steps_done += 1
        self._open_or_finish()

    def close(self) -> None:
        """Finish a window that the run ended in; print a notice if the run never reached it."""
        if self._recording:
            self._finish()
        elif self._enabled:
            self._enabled = False
            self._echo(
                f"profiler: nothing recorded: the run ended after {self._steps_done} steps "
                f"and the window starts at step {self._start}; lower Profiler.scheduler"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open_or_finish(self) -> None:
        if self._recording and self._steps_done == self._end:
            self._finish()
        elif self._recording:
            self._recording.step()
        elif self._enabled and self._steps_done == self._start:
            self._recording = self._make_recording()
            self._recording.start()

    def _make_recording(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recording = profile(
            activities=activities,
            # The window is kept here; a schedule is passed because only then steps are marked.
            schedule=lambda _: ProfilerAction.RECORD,
            record_shapes=self._record_shapes,
            profile_memory=self._profile_memory,
            acc_events=True,
        )
        recording.step_num = self._start  # so the marks carry the numbers of the window
        return recording

    def _finish(self) -> None:
        assert self._recording is not None
        recording, self._recording, self._enabled = self._recording, None, False
        recording.stop()
        steps = self._steps_done - self._start
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}_steps_{self._start}_to_{self._steps_done}.json"
        trace = self._directory / name
        recording.export_chrome_trace(str(trace))
        for table in render_views(recording.key_averages(), self._views, steps):
            self._echo(table)
        self._echo(
            f"profiler: trace of steps [{self._start}, {self._steps_done}) in {trace}; open it at "
            "https://ui.perfetto.dev or in chrome://tracing"
        )


def _window(scheduler: Sequence[int] | None) -> tuple[int, int | None]:
    if scheduler is None:
        return 0, None
    if len(scheduler) != 2 or not 0 <= scheduler[0] < scheduler[1]:
        raise UserError(
            f"Profiler.scheduler={list(scheduler)} is not a window of steps; give [start, end] "
            "with 0 <= start < end, or null for every step"
        )
    return scheduler[0], scheduler[1]


def _chosen_views(detailed: bool, summary: Mapping[str, bool | None]) -> list[str]:
    """The views to print; null in `summary` leaves a view at its default."""
    unknown = sorted(set(summary) - set(VIEWS))
    if unknown:
        raise UserError(
            f"Profiler.summary has no view {', '.join(unknown)}; choose from {', '.join(VIEWS)}"
        )
    chosen = {view: view in DEFAULT_VIEWS for view in VIEWS}
    chosen |= {view: value for view, value in summary.items() if value is not None}
    return [view for view in VIEWS if detailed or chosen[view]]


# -- views --------------------------------------------------------------------------------------

VIEWS = ("overview", "device", "model", "dist", "kernel", "op", "mem", "memcpy", "udf")
DEFAULT_VIEWS = ("overview", "model", "kernel", "op")

MOST_ROWS = 20
STEP_MARK = "ProfilerStep"
COMMUNICATION = ("c10d::", "nccl", "gloo:", "record_param_comms", "_c10d_functional")
COPIES = ("memcpy", "memset", "aten::copy_", "aten::clone", "aten::fill_", "aten::zero_")

Row = FunctionEventAvg


def render_views(rows: Iterable[Row], views: Sequence[str], steps: int) -> list[str]:
    """The text of each chosen view, from the profiler's averages over `steps` steps."""
    rows = list(rows)
    draw: dict[str, Callable[[], str]] = {
        "overview": lambda: _overview(rows, steps),
        "device": lambda: _device(rows, steps),
        "model": lambda: _ranges("model: phases of a step", _marked(rows, phases=True), steps),
        "dist": lambda: _times("dist: communication", _named(rows, COMMUNICATION), steps),
        "kernel": lambda: _times("kernel: device kernels", _kernels(rows), steps),
        "op": lambda: _times("op: operators", _operators(rows), steps),
        "mem": lambda: _memory(_operators(rows), steps),
        "memcpy": lambda: _times("memcpy: copies and fills", _named(rows, COPIES), steps),
        "udf": lambda: _ranges("udf: ranges marked in code", _marked(rows, phases=False), steps),
    }
    return [draw[view]() for view in views]


def _name(row: Row) -> str:
    return row.key or ""


def _on_host(row: Row) -> bool:
    return row.device_type == DeviceType.CPU


def _operators(rows: list[Row]) -> list[Row]:
    return [row for row in rows if _on_host(row) and not row.is_user_annotation]


def _kernels(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not _on_host(row) and not row.is_user_annotation]


def _named(rows: list[Row], starts: Sequence[str]) -> list[Row]:
    real = [row for row in rows if not row.is_user_annotation]
    return [row for row in real if _name(row).lower().startswith(tuple(starts))]


def _marked(rows: list[Row], phases: bool) -> list[Row]:
    """Ranges marked in code: the phases the meter times, or all others."""
    marked = [row for row in rows if _on_host(row) and row.is_user_annotation]
    return [row for row in marked if _name(row).startswith(PROFILER_PREFIX) == phases]


def _wall_time(rows: list[Row]) -> float:
    steps = [row for row in rows if _on_host(row) and _name(row).startswith(STEP_MARK)]
    return sum(row.cpu_time_total for row in steps)


def _overview(rows: list[Row], steps: int) -> str:
    parts = {
        "wall time": _wall_time(rows),
        "operators on the host, all threads": _total(_operators(rows)),
        "kernels on the device, all streams": _total(_kernels(rows)),
        "of these, communication": _total(_named(rows, COMMUNICATION)),
        "of these, copies and fills": _total(_named(rows, COPIES)),
    }
    cells = [[name, f"{total / 1e3 / steps:.3f}"] for name, total in parts.items()]
    return _table(f"overview: {steps} steps", ["", "ms/step"], cells)


def _device(rows: list[Row], steps: int) -> str:
    cells = [
        [
            where,
            f"{sum(row.count for row in busy) / steps:.0f}",
            f"{_total(busy) / 1e3 / steps:.3f}",
            f"{_total(busy) / max(_wall_time(rows), 1e-9):.1%}",
        ]
        for where, busy in (("host", _operators(rows)), ("device", _kernels(rows)))
    ]
    return _table("device: busy time", ["", "calls/step", "ms/step", "of wall time"], cells)


def _total(rows: list[Row]) -> float:
    return sum(_own_time(row) for row in rows)


def _own_time(row: Row) -> float:
    return row.self_cpu_time_total if _on_host(row) else row.self_device_time_total


def _times(title: str, rows: list[Row], steps: int) -> str:
    """Rows by the time they took themselves, without what they called."""
    total = _total(rows)
    ranked = sorted(rows, key=_own_time, reverse=True)
    cells = [
        [
            _name(row),
            f"{row.count}",
            f"{_own_time(row) / 1e3 / steps:.3f}",
            f"{_own_time(row) / max(total, 1e-9):.1%}",
        ]
        for row in ranked
    ]
    return _table(title, ["name", "calls", "own ms/step", "share"], cells)


def _ranges(title: str, rows: list[Row], steps: int) -> str:
    """Rows by the whole time between their start and end."""
    ranked = sorted(rows, key=lambda row: row.cpu_time_total, reverse=True)
    cells = [
        [
            _name(row).removeprefix(PROFILER_PREFIX),
            f"{row.count}",
            f"{row.cpu_time_total / 1e3 / steps:.3f}",
        ]
        for row in ranked
    ]
    return _table(title, ["name", "calls", "ms/step"], cells)


def _memory(rows: list[Row], steps: int) -> str:
    """Operators by the memory they allocated and did not free themselves."""
    allocating = [row for row in rows if row.self_cpu_memory_usage or row.self_device_memory_usage]
    ranked = sorted(
        allocating,
        key=lambda row: row.self_cpu_memory_usage + row.self_device_memory_usage,
        reverse=True,
    )
    cells = [
        [
            _name(row),
            f"{row.count}",
            f"{row.self_cpu_memory_usage / 2**20 / steps:.3f}",
            f"{row.self_device_memory_usage / 2**20 / steps:.3f}",
        ]
        for row in ranked
    ]
    return _table(
        "mem: operators by memory", ["name", "calls", "host MiB/step", "device MiB/step"], cells
    )


def _table(title: str, header: list[str], cells: list[list[str]]) -> str:
    """Plain text, the first column to the left and the numbers to the right."""
    if not cells:
        return f"{title}\n  none recorded\n"
    shown = [[row[0][:60], *row[1:]] for row in cells[:MOST_ROWS]]
    lines = table_lines([header, *shown], "<>")
    left_out = len(cells) - len(shown)
    if left_out:
        lines.append(f"and {left_out} more")
    return "\n".join([title, *(f"  {line}" for line in lines), ""])
