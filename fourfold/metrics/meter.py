"""The meter: times the steps of a run and makes one record per logging window.

A window is the `logging_freq` steps up to the one logged (fewer after a resume between two
multiples). Times are wall-clock means per step over the window. Evaluating and saving happen
between steps: their time is reported, but does not count towards the cost of a batch.

Besides the times a record has the memory of this process and its device and, with several ranks,
how evenly they worked (`stragglers.py`).
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import record_function

from fourfold import heartbeat
from fourfold.config.batch_schedule import BatchSchedule
from fourfold.metrics.jsonl import timestamp
from fourfold.metrics.stragglers import RankTimes

BETWEEN_STEPS = ("evaluate", "save")
PROFILER_PREFIX = "fourfold/"


@dataclass(frozen=True)
class StepOutcome:
    """What the loop knows about a step when it ends."""

    step: int  # global, the first is 1
    epoch: int
    batch: int  # the first is 0
    loss: float
    learning_rate: float  # of the next step, as FleetX logs it
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: int = 0  # updates skipped so far
    layer_norms: dict[str, float] | None = None  # of the gradient, by group of layers


@dataclass(frozen=True, kw_only=True)
class Step(StepOutcome):
    """One training record: the last step of a window, and means over the window."""

    global_batch_size: int  # of this step
    samples: int  # seen so far, by all ranks
    tokens: int  # the same
    reader_seconds: float
    batch_seconds: float  # includes reader_seconds
    steps_per_second: float
    ips_total: float  # tokens per second of all ranks
    ips: float  # tokens per second of one rank
    mfu: float | None
    rss_bytes: int | None
    peak_rss_bytes: int | None
    device_bytes: int | None
    peak_device_bytes: int | None
    seconds: dict[str, float]  # mean per step of every phase that was timed
    time: str  # ISO 8601, with the offset from UTC
    ranks: RankTimes | None = None  # how evenly they worked, where there are several


class Meter:
    """Wrap the parts of a step in `timed`, then call `end_step` once.

    The clock starts with the first `timed` phase (or, without any, when the meter is made), so
    whatever is set up before the loop does not count as part of step 1.
    """

    def __init__(
        self,
        *,
        batch_schedule: BatchSchedule,
        seq_len: int,
        world_size: int = 1,
        logging_freq: int = 1,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`peak_flops` is one device's, in FLOP/s; without it the MFU is None."""
        assert seq_len > 0 and world_size > 0 and logging_freq > 0
        self.batch_schedule = batch_schedule
        self.seq_len = seq_len
        self.world_size = world_size
        self.logging_freq = logging_freq
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._clock = clock
        self._window_start = clock()
        self._window_steps = 0
        self._phase_seconds: defaultdict[str, float] = defaultdict(float)
        self._in_phase = False
        self._started = False

    @contextmanager
    def timed(self, phase: str, step: int) -> Iterator[None]:
        """Count the time of this block as `phase`; a phase inside another belongs to the outer.

        The supervisor learns of it by a heartbeat. A profiler that is recording shows the phase as
        a range.
        """
        heartbeat.beat(step, phase)
        if self._in_phase:
            yield
            return
        start = self._clock()
        if not self._started:
            self._window_start, self._started = start, True
        self._in_phase = True
        try:
            with record_function(PROFILER_PREFIX + phase):
                yield
        finally:
            self._in_phase = False
            self._phase_seconds[phase] += self._clock() - start

    def is_logged(self, step: int) -> bool:
        """Whether a window ends with this step."""
        return step % self.logging_freq == 0

    def end_step(self, outcome: StepOutcome) -> Step | None:
        """The record of the window that ends here, or None when the step is not to be logged."""
        step = outcome.step
        self._window_steps += 1
        if not self.is_logged(step):
            return None
        steps = self._window_steps
        seconds, batch_seconds = self._close_window()
        # A clock too coarse to see the step has no rate to tell; 0 keeps every sink readable.
        steps_per_second = 1 / batch_seconds if batch_seconds > 0 else 0.0
        samples = self.batch_schedule.consumed(step)
        window_samples = samples - self.batch_schedule.consumed(step - steps)
        ips_total = steps_per_second * window_samples / steps * self.seq_len
        host, device = host_memory(), device_memory()
        return Step(
            **vars(outcome),
            global_batch_size=self.batch_schedule.batch_of(step - 1),
            samples=samples,
            tokens=samples * self.seq_len,
            reader_seconds=seconds.get("reader", 0.0),
            batch_seconds=batch_seconds,
            steps_per_second=steps_per_second,
            ips_total=ips_total,
            ips=ips_total / self.world_size,
            mfu=self._mfu(ips_total),
            rss_bytes=host.rss_bytes,
            peak_rss_bytes=host.peak_rss_bytes,
            device_bytes=device.allocated_bytes if device else None,
            peak_device_bytes=device.peak_allocated_bytes if device else None,
            seconds=seconds,
            time=timestamp(),
        )

    def restart(self) -> None:
        """Begin a new window: the steps of the one under way are dropped."""
        self._window_start, self._window_steps = self._clock(), 0
        self._phase_seconds.clear()

    def _close_window(self) -> tuple[dict[str, float], float]:
        """Seconds of each phase and of a batch, per step of the window; then a new window."""
        now, steps = self._clock(), self._window_steps
        totals = dict(self._phase_seconds)
        between = sum(totals.get(phase, 0.0) for phase in BETWEEN_STEPS)
        batch_seconds = (now - self._window_start - between) / steps
        self._window_start, self._window_steps = now, 0
        self._phase_seconds.clear()
        return {phase: total / steps for phase, total in totals.items()}, batch_seconds

    def _mfu(self, ips_total: float) -> float | None:
        if self.peak_flops is None or self.flops_per_token is None:
            return None
        return self.flops_per_token * ips_total / (self.peak_flops * self.world_size)


# -- memory -------------------------------------------------------------------------------------

PROC_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class HostMemory:
    """In bytes; None where the system does not report a number, never a guess."""

    rss_bytes: int | None
    peak_rss_bytes: int | None


@dataclass(frozen=True)
class DeviceMemory:
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def host_memory() -> HostMemory:
    """Resident memory of this process. The peak counts from the start of the process."""
    fields = _proc_status()
    peak = fields.get("VmHWM")
    return HostMemory(fields.get("VmRSS"), peak if peak is not None else _peak_from_rusage())


def device_memory() -> DeviceMemory | None:
    """Memory torch holds on the current CUDA (or ROCm) device; None when none is in use."""
    if not torch.cuda.is_initialized():
        return None
    return DeviceMemory(
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )


def _proc_status() -> dict[str, int]:
    """The kB lines of /proc/self/status in bytes; empty where there is no such file."""
    try:
        lines = PROC_STATUS.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {
        word[0].rstrip(":"): int(word[1]) * 1024
        for word in words
        if len(word) == 3 and word[2] == "kB"
    }


def _peak_from_rusage() -> int | None:
    # A peak inherited from the parent at fork is included here, which is why /proc comes first.
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return peak * unit
