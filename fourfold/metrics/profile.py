"""Profiles a window of steps and leaves a Chrome trace, with tables of where the time went.

Steps are counted from 0 at the start of this process, so the window means the same in a fresh run
and in a resumed one. Outside its window, or when not enabled, the profiler costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from fourfold.errors import UserError
from fourfold.metrics.views import DEFAULT_VIEWS, VIEWS, render_views


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
        """Finish a window the run ended in; say so when the run never reached it."""
        if self._recording:
            self._finish()
        elif self._enabled:
            self._enabled = False
            self._echo(
                f"profiler: nothing recorded, for the run ended after {self._steps_done} steps "
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
            # The window is kept here; a schedule is given because only then steps are marked.
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
    wanted = {view: view in DEFAULT_VIEWS for view in VIEWS}
    wanted |= {view: value for view, value in summary.items() if value is not None}
    return [view for view in VIEWS if detailed or wanted[view]]
