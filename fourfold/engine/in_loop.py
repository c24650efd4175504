"""Between steps, with the weights as they are: texts that the run writes, and tasks it is measured
by (`Engine.samples`, `Engine.eval_tasks`).

How a text is written and a task measured is known by tools above the engine. Who starts a run hands
in what opens them (`OpenInLoop`); the engine says when, and where the results go.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from fourfold.comm_timer import excluded
from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.metrics import Sinks
from fourfold.metrics.sinks import TextSample
from fourfold.parallel import Runner

if TYPE_CHECKING:
    from fourfold.engine.loop import Engine
    from fourfold.engine.run_data import RunData
    from fourfold.signals import StopRequest

Numbers = dict[str, float]


class InLoop(Protocol):
    """Prepared before the first step: every file is read, every text is tokens.

    All ranks make the same calls, and have the same results.
    """

    notices: list[str]  # what the user should know

    def samples(self, runner: Runner) -> list[TextSample]:
        """Continue the prompts of `Engine.samples`."""

    def tasks(self, runner: Runner) -> Iterator[tuple[str, str, Numbers]]:
        """Measure `Engine.eval_tasks`, one after the other: name, kind and results."""


OpenInLoop = Callable[[Config, "RunData"], InLoop]


@dataclass(frozen=True)
class DueInLoop:
    """What follows a step."""

    samples: bool = False
    tasks: bool = False

    def __bool__(self) -> bool:
        return self.samples or self.tasks


def due_in_loop(run: Engine, step: int) -> DueInLoop:
    engine = run.config.Engine
    if run.in_loop is None:
        return DueInLoop()
    return DueInLoop(
        engine.samples.wanted and engine.eval_freq > 0 and step % engine.eval_freq == 0,
        bool(engine.eval_tasks)
        and engine.eval_tasks_freq > 0
        and step % engine.eval_tasks_freq == 0,
    )


def wanted_in_loop(config: Config) -> bool:
    return config.Engine.samples.wanted or bool(config.Engine.eval_tasks)


@excluded()
def run_in_loop(run: Engine, due: DueInLoop, sinks: Sinks, stop: StopRequest) -> bool:
    """Write and measure what is due; returns whether any rank was asked to stop meanwhile.

    A collective. Random states are as before; whatever training draws, it draws from the step.
    """
    if run.in_loop is None or not due:
        return False
    with _random_states(run.device):
        try:
            if due.samples:
                start = time.perf_counter()
                written = run.in_loop.samples(run.runner)
                sinks.samples(written, step=run.step, seconds=time.perf_counter() - start)
            return due.tasks and _measure(run, sinks, stop)
        except UserError as error:
            # Such as logits that are not finite, on all ranks alike: nothing to end a run for.
            sinks.notice(f"after step {run.step}: {error}", level="WARNING")
            return False
        finally:
            run.runner.drop_gathered()


def _measure(run: Engine, sinks: Sinks, stop: StopRequest) -> bool:
    assert run.in_loop is not None
    start = time.perf_counter()
    for name, kind, numbers in run.in_loop.tasks(run.runner):
        seconds = time.perf_counter() - start
        sinks.task(name, kind, numbers, step=run.step, seconds=seconds)
        (stops,) = run.mesh.all_reduce(stop.reason() is not None)
        if stops:
            sinks.notice(f"the tasks after step {run.step} were cut short by a stop")
            return True
        start = time.perf_counter()
    return False


@contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    """Other packages seed what they like."""
    plain, arrays, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(arrays)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
