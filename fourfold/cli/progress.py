"""Progress of `fourfold data prepare`: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.data.prepare import Progress

SECONDS_BETWEEN_LINES = 10.0


class PrepareProgress:
    """Shows what `prepare_files` reports, on standard error."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._last_line = self._begin
        self._phase = ""
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True)
            )
            self._task = self._bar.add_task("starting", total=1.0)

    def __enter__(self) -> PrepareProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        seconds = time.monotonic() - self._begin
        text = progress_line(progress, seconds)
        if self._bar is not None:
            share = progress.source_bytes / max(1, progress.source_total)
            self._bar.update(self._task, completed=share, description=text)
            return
        finished = progress.source_bytes == progress.source_total
        due = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        if due or (finished and progress.phase != self._phase):
            print(text, file=sys.stderr, flush=True)
            self._last_line = time.monotonic()
            self._phase = progress.phase


def progress_line(progress: Progress, seconds: float) -> str:
    """Rates of this run; the time left from how fast it reads the input."""
    share = progress.source_bytes / max(1, progress.source_total)
    if progress.phase != "tokenizing":
        left = ""
    elif progress.source_bytes > progress.resumed_bytes:
        rate = (progress.source_bytes - progress.resumed_bytes) / max(seconds, 1e-9)
        left = f", {_duration((progress.source_total - progress.source_bytes) / rate)} left"
    else:
        left = ", time left unknown"
    return (
        f"{progress.phase}: {share:.0%}, {progress.documents / seconds:,.0f} documents/s, "
        f"{progress.text_bytes / 1e6 / seconds:.1f} MB/s, {progress.tokens / seconds:,.0f} tokens/s"
        + left
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
