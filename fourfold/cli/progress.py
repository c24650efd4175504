"""Progress of long commands on standard error: a bar, or lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from fourfold.terminal import ProgressBar, duration, is_terminal

if TYPE_CHECKING:
    from fourfold.tools.prepare.pipeline import PrepareProgress

SECONDS_BETWEEN_LINES = 10.0


class ProgressReport:
    """A bar on a terminal; elsewhere, its text as a line now and then."""

    def __init__(self, *, stays: bool = False) -> None:
        self._last_line = time.monotonic()
        self._bar = ProgressBar(sys.stderr, stays=stays) if is_terminal(sys.stderr) else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.show(0.0, "starting")
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, share: float, text: str, at_once: bool = False) -> bool:
        """Whether the text was printed as a line: `at_once`, or since the last is long ago."""
        if self._bar is not None:
            self._bar.show(share, text)
            return False
        now = time.monotonic()
        if not at_once and now - self._last_line < SECONDS_BETWEEN_LINES:
            return False
        print(text, file=sys.stderr, flush=True)
        self._last_line = now
        return True


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """To be called with the bytes done and the bytes to do."""
    begin = time.monotonic()
    with ProgressReport() as report:

        def show(done: int, total: int) -> None:
            speed = max(done, 1) / max(time.monotonic() - begin, 1e-9)
            share = done / max(total, 1)
            report.show(
                share,
                f"{what}: {share:.0%} of {total / 1e6:,.0f} MB, {speed / 1e6:,.0f} MB/s, "
                f"{(total - done) / speed:,.0f} s left",
            )

        yield show


@contextmanager
def prepare_progress() -> Iterator[Callable[[PrepareProgress], None]]:
    """To be called with what `prepare_files` reports; a phase that begins is always shown."""
    begin, phase = time.monotonic(), ""
    with ProgressReport(stays=True) as report:

        def show(progress: PrepareProgress) -> None:
            nonlocal phase
            has_read_all = progress.source_bytes == progress.source_total
            share = progress.source_bytes / max(1, progress.source_total)
            text = progress_line(progress, time.monotonic() - begin)
            if report.show(share, text, at_once=has_read_all and progress.phase != phase):
                phase = progress.phase

        yield show


def progress_line(progress: PrepareProgress, seconds: float) -> str:
    """Rates of this run; the time left from how fast it reads the input."""
    share = progress.source_bytes / max(1, progress.source_total)
    if progress.phase != "tokenizing":
        left = ""
    elif progress.source_bytes > progress.resumed_bytes:
        rate = (progress.source_bytes - progress.resumed_bytes) / max(seconds, 1e-9)
        seconds_left = (progress.source_total - progress.source_bytes) / rate
        left = f", {duration(seconds_left, short=True)} left"
    else:
        left = ", time left unknown"
    return (
        f"{progress.phase}: {share:.0%}, {progress.documents / seconds:,.0f} documents/s, "
        f"{progress.text_bytes / 1e6 / seconds:.1f} MB/s, {progress.tokens / seconds:,.0f} tokens/s"
        + left
    )
