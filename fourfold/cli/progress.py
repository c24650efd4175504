"""Progress of long commands on standard error: a bar, or lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from fourfold.errors import heard_or_not, say
from fourfold.terminal import ProgressBar, duration, is_terminal

if TYPE_CHECKING:
    from fourfold.metrics.sinks import StepProgress
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


class SupervisorConsole:
    """What the ranks of a run say, by way of their supervisor: `echo` and `tell` are its own.

    On a terminal lines of steps move a bar in their place, as they do where one process trains;
    elsewhere every line is printed as it came.
    """

    def __init__(self, max_steps: int, nproc: int, saved_step: Callable[[], int | None]) -> None:
        self._max_steps = max_steps
        self._nproc = nproc
        self._saved_step = saved_step
        # Drawn by `echo`, without a thread: ranks are forked from this process.
        self._bar = ProgressBar(sys.stdout, redraws=False) if is_terminal(sys.stdout) else None
        self._steps: StepProgress | None = None
        self._has_steps = False  # since the last start of the ranks

    def echo(self, line: str) -> None:
        if self._bar is None:
            say(line, sys.stdout)
            return
        from fourfold.metrics.sinks import StepProgress
        from fourfold.tools.targets import parse_line

        record = parse_line(line)
        is_step = record is not None and record.kind == "train" and record.loss is not None
        with heard_or_not(sys.stdout):
            if not is_step:
                self._bar.print_above(line)
            if not self._has_steps:
                # Time is counted from the last line before the first step.
                if not is_step or self._steps is None:
                    start = self._saved_step() or 0
                    self._steps = StepProgress(self._bar, self._max_steps, start, time.monotonic)
                self._has_steps = is_step
            if is_step:
                assert record is not None and record.loss is not None and self._steps is not None
                rate = record.tokens_per_device
                total = None if rate is None else rate * self._nproc
                self._steps.log(record.step, record.loss, total)

    def tell(self, line: str) -> None:
        """The supervisor's own words; where it restarts the ranks, their steps begin anew."""
        self.close()
        say(line, sys.stderr)

    def close(self) -> None:
        self._steps, self._has_steps = None, False
        if self._bar is not None:
            with heard_or_not(sys.stdout):
                self._bar.close()


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
