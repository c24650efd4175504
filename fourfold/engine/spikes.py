"""Loss spikes: a detector that all ranks agree on, and what a run does about what it finds.

The loss and the gradient norm of a step are compared with a band around those of the steps before:
the median, plus `threshold` times the spread. The spread is taken from the changes from step to
step, so that a loss that is still falling does not widen the band: 1.4826 / sqrt(2) times their
median absolute value, which for independent normal noise is its standard deviation; and at least a
small share of the median, so that a very quiet run has a band too. Both numbers are sums over all
ranks with the same bits on each, so every rank comes to the same decision without asking.

The band of step s is made of the steps up to s - 2. On a GPU the host reads a step's numbers only
when the next one is queued; with the band of two steps before, the device can hold an update back
by itself, and CPU and GPU decide alike. Going back to a checkpoint happens when the host knows,
which on a GPU is one step later; that step is dropped with the others.

Documents are named from the losses of the tokens, which are kept for the steps that are not yet
known (`fourfold.trace`).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold import checkpoint
from fourfold.atomic_files import replace_text
from fourfold.config.batch_schedule import ranges_of
from fourfold.config.engine_section import SpikesSection
from fourfold.data import Batch
from fourfold.data.provenance import DocumentText
from fourfold.engine import resuming, saving
from fourfold.engine.run_data import text_of_ranges
from fourfold.engine.updates import SpikeLimits, StepResult, updates_of
from fourfold.metrics import Sinks
from fourfold.trace import StepReport, TokenLosses, gradient_norms, report_lines
from fourfold.trace.step_report import by_layer

if TYPE_CHECKING:
    from fourfold.engine.loop import Engine
    from fourfold.engine.monitoring import Monitoring
    from fourfold.signals import StopRequest

# Of the median: the least spread that a band has. The norm of the gradient varies by itself.
LOSS_SPREAD, NORM_SPREAD = 0.02, 0.25
NORMAL = 1.4826 / math.sqrt(2)
DIRECTORY = "spikes"
# In a spike that lasts, the first steps are the ones to look at.
MOST_REPORTS = 8


@dataclass(frozen=True)
class Spike:
    """A step outside the band."""

    result: StepResult
    limits: SpikeLimits

    @property
    def step(self) -> int:
        return self.result.step

    def words(self) -> str:
        loss, norm, limits = self.result.loss, self.result.norm, self.limits
        parts = []
        if loss > limits.loss:
            parts.append(f"the loss is {loss:.4f} (usual up to {limits.loss:.4f})")
        if norm > limits.norm:
            parts.append(f"the gradient norm is {norm:.4f} (usual up to {limits.norm:.4f})")
        return f"spike at step {self.step}: {' and '.join(parts)}"


class SpikeDetector:
    """The band, as a function of the results before; the same on every rank."""

    def __init__(self, section: SpikesSection) -> None:
        self.window, self.threshold = section.window, section.threshold
        self.warm_up = section.warm_up
        # One more than the band: that of the step before is not in it yet.
        self.results: deque[tuple[int, float, float]] = deque(maxlen=section.window + 1)

    def limits(self, step: int) -> SpikeLimits:
        """What the loss and the norm of `step` may come to."""
        known = [row for row in self.results if row[0] <= step - 2][-self.window :]
        if step <= self.warm_up or len(known) < self.window:
            return SpikeLimits()
        losses, norms = [row[1] for row in known], [row[2] for row in known]
        return SpikeLimits(
            _upper(losses, self.threshold, LOSS_SPREAD),
            _upper(norms, self.threshold, NORM_SPREAD),
            usual=statistics.median(losses),
        )

    def take(self, result: StepResult) -> Spike | None:
        """A result that has become known; steps come in their order."""
        limits = self.limits(result.step)
        if result.finite:
            # Those outside the band too: its middle does not move by a few, and where many follow
            # each other the run is at another level, not in a spike.
            self.results.append((result.step, result.loss, result.norm))
            if limits.exceeded_by(result.loss, result.norm):
                return Spike(result, limits)
        return None


def _upper(values: list[float], threshold: float, least_spread: float) -> float:
    middle = statistics.median(values)
    change = statistics.median(abs(one - other) for one, other in pairwise(values))
    return middle + threshold * max(NORMAL * change, least_spread * abs(middle))


class Spikes:
    """The detector of a run, and its answer: a warning, an update held back, or going back."""

    def __init__(self, run: Engine, section: SpikesSection) -> None:
        self.run = run
        self.action, self.most = section.action, section.most
        self.steps_left_out = section.steps
        self.detector = SpikeDetector(section)
        self.found: list[Spike] = []
        self.rewinds = 0
        self._in_a_row = 0
        self._last_spike = -1
        self._losses: TokenLosses | None = None
        self._batches: dict[int, Batch] = {}
        self._norms: dict[int, dict[str, float]] = {}

    # -- in every step ------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on, keep what a report needs."""
        self._losses = TokenLosses(self.run.runner, steps=2)
        self._losses.attach()

    def begin(self, step: int, batch: Batch) -> None:
        if self._losses is not None:
            self._losses.begin(step, batch)
            self._batches = {one: kept for one, kept in self._batches.items() if one >= step - 1}
            self._batches[step] = batch

    def limits(self, step: int) -> SpikeLimits | None:
        """Beyond which the update of a step is held back."""
        return self.detector.limits(step) if self.action == "skip" else None

    def look(self, result: StepResult) -> None:
        """Before the update, where the gradient is still there and its numbers are known."""
        limits = self.detector.limits(result.step)
        if self._losses is not None and limits.exceeded_by(result.loss, result.norm):
            norms = gradient_norms(self.run.runner, result.loss_scale)
            self._norms = {result.step: by_layer(norms)}

    def take(self, result: StepResult) -> None:
        spike = self.detector.take(result)
        if spike is not None:
            self.found.append(spike)

    # -- the answer ---------------------------------------------------------------------------

    def answer(self, watch: Monitoring, stop: StopRequest, save: bool) -> bool:
        """Do what is configured about the spikes found; returns whether the run went back.

        A collective: every rank has found the same.
        """
        found, self.found = self.found, []
        for spike in found:
            report = self._report(spike)
            fields = self._fields(spike, report)
            self._tell(spike, report, fields, watch.sinks)
            if self.action == "rewind" and save:
                if self.rewinds < self.most:
                    self._rewind(spike, fields, watch, stop)
                    return True
                watch.sinks.notice(
                    f"the run has gone back {self.rewinds} times (Engine.spikes.most="
                    f"{self.most}) and goes on through this spike",
                    level="ERROR",
                )
        return False

    def _fields(self, spike: Spike, report: Path | None) -> dict[str, Any]:
        """What records say of it."""
        return {
            "loss": spike.result.loss,
            "grad_norm": spike.result.norm,
            "loss_limit": spike.limits.loss,
            "norm_limit": spike.limits.norm,
            "report": None if report is None else str(report.relative_to(self.run.output_dir)),
        }

    def _tell(
        self, spike: Spike, report: Path | None, fields: dict[str, Any], sinks: Sinks
    ) -> None:
        action = self.action
        samples = [*self.run.batch_schedule.samples_of(spike.step - 1)]
        sinks.event("spike", step=spike.step, action=action, sample_ids=samples, **fields)
        held = "; its update was held back" if action == "skip" else ""
        see = f"; see {report.with_suffix('.txt')}" if report is not None else ""
        sinks.notice(f"{spike.words()}{held}{see}", level="WARNING")

    def _report(self, spike: Spike) -> Path | None:
        """Write which documents it was; where, on rank 0."""
        self._in_a_row = self._in_a_row + 1 if spike.step == self._last_spike + 1 else 1
        self._last_spike = spike.step
        batch = self._batches.get(spike.step)
        if self._losses is None or batch is None or self._in_a_row > MOST_REPORTS:
            return None
        made = StepReport.make(
            self._losses,
            batch,
            self.run.data.samples["train"],
            DocumentText(self.run.data.tokenizer()),
            step=spike.step,
            loss=spike.result.loss,
            grad_norm=spike.result.norm,
            usual=spike.limits.usual,
            gradient_norms=self._norms.get(spike.step),
        )
        if self.run.mesh.rank > 0:
            return None
        told = made.to_dict() | {"action": self.action, "spike": spike.words()}
        try:
            return write_report(self.run.output_dir / DIRECTORY, told)
        except OSError:
            return None  # a full disk; the event in the log names the samples

    def _rewind(
        self, spike: Spike, fields: dict[str, Any], watch: Monitoring, stop: StopRequest
    ) -> None:
        """Back to a checkpoint before the spike, and on without the samples of its steps."""
        run = self.run
        saving.finish(run, watch.sinks)
        if run.copies is not None:
            run.copies.finish(watch.sinks)
        run.updates.results(of_all=True)  # of a step that is dropped
        before = spike.step - self.steps_left_out
        restored = resuming.restore_from(run, self._checkpoint_before(before, spike.step))
        first = max(before, restored.step)
        schedule = run.batch_schedule
        bad = [s for step in range(first, spike.step) for s in schedule.samples_of(step)]
        rewinds = self.rewinds + 1
        run.take(restored)
        self.rewinds = rewinds
        run.config.leave_out(run.config.left_out.joined(ranges_of(bad)))
        run.batch_schedule = run.config.batch_schedule
        run.mesh.rank_0_first(run.data.change_batches)
        run.updates = updates_of(run.runner, run.optimizer)
        run.updates.before_update = self.look
        watch.rewind(run.step)
        left = text_of_ranges(ranges_of(bad))
        watch.sinks.event(
            "rewind",
            step=run.step,
            spike_step=spike.step,
            sample_ids=bad,
            number=rewinds,
            most=self.most,
            **fields,  # the record of the spike is dropped with those of its steps
        )
        watch.sinks.notice(
            f"went back from step {spike.step} to {restored.path} and continues without {left} "
            f"({rewinds} of at most {self.most} times)",
            level="WARNING",
        )
        if run.copies is not None:
            run.copies.begin()  # those of the steps that were dropped do not count any more
        # What is left out belongs to the checkpoint: a run resumed from it must know.
        saving.save(run, watch.meter, watch.sinks, stop, final=False)

    def _checkpoint_before(self, step: int, spike: int) -> Path:
        """The newest that has nothing of the steps after `step`; else the oldest there is."""

        def choose() -> str:
            found = {
                int(path.name[5:]): path
                for path in checkpoint.candidates(self.run.output_dir)
                if path.name[5:].isdecimal()
            }
            earlier = [saved for saved in found if saved <= step]
            usable = [saved for saved in found if saved < spike]
            return str(found[max(earlier) if earlier else min(usable)])

        mesh = self.run.mesh
        told = mesh.broadcast_first(choose() if mesh.rank == 0 else None)
        assert told is not None
        return Path(told)

    # -- a checkpoint's share -----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"band": [list(row) for row in self.detector.results], "rewinds": self.rewinds}

    def restore(self, state: dict[str, Any] | None) -> None:
        self.detector.results.clear()
        self.found = []
        if state is not None:
            self.detector.results.extend((int(s), float(x), float(n)) for s, x, n in state["band"])
            self.rewinds = int(state["rewinds"])


def write_report(directory: Path, told: dict[str, Any]) -> Path:
    """Write a report as JSON and as text; under another name where the step has one already."""
    directory.mkdir(exist_ok=True)
    base, number = f"step_{told['step']}", 1
    while (directory / f"{base}.json").exists():
        number += 1
        base = f"step_{told['step']}_{number}"
    lines = [told["spike"], "", *report_lines(told)]
    replace_text(directory / f"{base}.txt", "\n".join(lines) + "\n")
    path = directory / f"{base}.json"
    replace_text(path, json.dumps(_finite(told), indent=2) + "\n")
    return path


def _finite(value: Any) -> Any:
    """Without the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
