"""Monitoring of a run: the meter, the profiler, the sinks, how evenly the ranks work, and how the
run compares at its end with what a plan predicted of it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from fourfold import storage
from fourfold.checkpoint import write_times
from fourfold.comm_timer import comm_times
from fourfold.config import Config
from fourfold.cost.flops import flops_per_token, megatron_deepspeed_flops_per_token
from fourfold.engine.probes import GpuProbe, queued_seconds
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.metrics import (
    LinkWatch,
    Meter,
    OwnTimes,
    ProfilerWindow,
    RankTimes,
    Sinks,
    Step,
    StepOutcome,
    Stragglers,
    compare_ranks,
    find_machines,
    open_sinks,
    peak_flops,
)
from fourfold.metrics.jsonl import RunFacts, processor_of
from fourfold.metrics.lines import FleetXLines, LineStyle, MegatronLines
from fourfold.metrics.meter import device_memory, host_memory
from fourfold.metrics.progress import KubeflowProgress
from fourfold.metrics.stragglers import Straggler
from fourfold.model import ModelShape
from fourfold.parallel import Precision

if TYPE_CHECKING:
    from fourfold.metrics.prometheus import MetricsPort

# Each rank has figures for every machine; beyond this, gathering them would be noticed.
MOST_MACHINES = 128


class Monitoring:
    """Opened before the first step and closed by `closing`, in the reverse order.

    Every rank has a meter; only rank 0 has somewhere to write to.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        precision: Precision,
        done_steps: int,
        closing: ExitStack,
        prediction: Prediction | None = None,
    ) -> None:
        self.mesh = mesh
        seq_len = config.Data.dataset.max_seq_len
        self.peak = peak_flops(config.Global.peak_tflops, device, precision.dtype)
        self.meter = Meter(
            batch_schedule=config.batch_schedule,
            seq_len=seq_len,
            world_size=mesh.size,
            logging_freq=config.Engine.logging_freq,
            flops_per_token=flops_per_token(ModelShape.of(config.Model), seq_len),
            peak_flops=self.peak.flops,
        )
        self.style = line_style(config, mesh.size)
        self.sinks, port = Sinks(), None
        if mesh.rank == 0:
            output_dir = storage.local_path(config.Engine.save_load.output_dir)
            port = _metrics_port(config, done_steps)
            self.sinks = open_sinks(
                output_dir,
                tensorboard=config.Engine.tensorboard,
                tensorboard_dir=config.Engine.tensorboard_dir,
                wandb=config.Engine.wandb,
                trackers=config.Engine.trackers,
                config=config.to_dict(),
                style=self.style,
                resume_step=done_steps,
                max_steps=config.Engine.max_steps,
                port=port,
                progress=KubeflowProgress.from_environment(os.environ, config.Engine.max_steps),
            )
        closing.callback(self.sinks.close)
        if port is not None:
            self.sinks.notice(f"metrics are served at {port.url}/metrics and {port.url}/healthz")
        self.sinks.run(
            RunFacts(
                layout=str(mesh.layout),
                world_size=mesh.size,
                peak_flops=self.peak.flops,
                peak_source=self.peak.source,
                threads=torch.get_num_threads(),
                torch=torch.__version__,
                processor=processor_of(),
            )
        )
        self.profiler = _profiler(config, mesh, self.sinks)
        closing.callback(self.profiler.close)
        self.evenness = RankComparison(mesh, device) if mesh.size > 1 else None
        self.comparison = None if prediction is None else PredictionCheck(prediction)
        self.reported_step = done_steps

    def end_step(self, outcomes: Sequence[StepOutcome]) -> None:
        """At the end of a step: take in the outcomes that are known by now."""
        for outcome in outcomes:
            self._take(outcome)
        self.profiler.step()

    def _take(self, outcome: StepOutcome) -> None:
        """Count the step; at the end of a logging window, record it."""
        record = self.meter.end_step(outcome)
        if self.mesh.rank == 0:
            # The others print no line that would take these up.
            self.style.take_loss(outcome.loss)
            samples = self.meter.batch_schedule.batch_of(outcome.step - 1)
            self.sinks.end_step(outcome.step, outcome.loss, samples * self.meter.seq_len)
        if record is not None and self.comparison is not None:
            self.comparison.take(record)
        if record is not None:
            if self.evenness is not None:
                record = self._with_ranks(record, self.evenness)
            self.sinks.train(record)

    def rewind(self, step: int) -> None:
        """The run goes on after an earlier step: what was recorded of later ones is dropped."""
        self.sinks.rewind(step)
        self.meter.restart()
        self.reported_step, self.waited_before = step, comm_times.copy()

    def compare(self, step: int) -> None:
        """At the end: predicted against measured; a collective."""
        if self.comparison is None:
            return
        device, host = device_memory(), host_memory()
        own = device.peak_allocated_bytes if device is not None else host.peak_rss_bytes
        peaks = [int(row[0]) for row in self.mesh.all_gather(own or 0)]
        self.comparison.tell(self.sinks, step, peaks, self.meter.logging_freq)

    def _with_ranks(self, record: Step, evenness: RankComparison) -> Step:
        """Add what the other ranks measured; a collective, called at the same steps."""
        steps, self.reported_step = record.step - self.reported_step, record.step
        times, slow = evenness.look(record, steps)
        for one in slow:
            self.sinks.notice(one.text, level="WARNING")
            fields = asdict(one)
            del fields["text"]  # said already
            self.sinks.event("straggler", step=record.step, **fields)
        return replace(record, ranks=times)


class RankComparison:
    """Gathers every rank's figures of a window, in one collective, and compares them."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """A collective."""
        self.mesh = mesh
        self.on_cpu = device.type == "cpu"
        machines = find_machines(mesh)
        self.links = LinkWatch(machines) if 1 < len(machines) <= MOST_MACHINES else None
        stages = [mesh.layout.coordinates(rank)["pp"] for rank in range(mesh.size)]
        self.stragglers = Stragglers(machines, stages, on_gpu=not self.on_cpu)
        self.probe = None if self.on_cpu else GpuProbe(device)
        self.waited_before, self.queued_before = comm_times.copy(), queued_seconds()

    def look(self, record: Step, steps: int) -> tuple[RankTimes | None, list[Straggler]]:
        """How evenly all worked, and whom to name."""
        spent, queued = comm_times.since(self.waited_before), queued_seconds()
        queued, self.queued_before = queued - self.queued_before, queued
        self.waited_before = comm_times.copy()
        own = OwnTimes(
            record.batch_seconds,
            spent.communication / steps,
            spent.bubble / steps,
            record.reader_seconds,
            queued / steps,
            0.0 if self.probe is None else self.probe.last_seconds(),
            write_times.take(),
            () if self.links is None else tuple(self.links.look()),
        )
        rows = [OwnTimes.of(row) for row in self.mesh.all_gather(*own.values())]
        slow = self.stragglers.look(rows, steps)
        # On a GPU the calls only queue work, so waiting cannot be distinguished from computing.
        return (compare_ranks(rows) if self.on_cpu else None), slow


def _metrics_port(config: Config, done_steps: int) -> MetricsPort | None:
    engine = config.Engine
    if engine.metrics_port is None:
        return None
    from fourfold.metrics.prometheus import MetricsPort

    return MetricsPort(
        engine.metrics_host,
        engine.metrics_port,
        silence_seconds=config.Distributed.timeout_seconds,
        max_steps=engine.max_steps,
        start_step=done_steps,
    )


def _profiler(config: Config, mesh: Mesh, sinks: Sinks) -> ProfilerWindow:
    section = config.Profiler
    missing = [rank for rank in section.ranks if rank >= mesh.size]
    if section.enable and (missing or not section.ranks):
        raise UserError(
            f"Profiler.ranks={section.ranks} and the run has the ranks 0 to {mesh.size - 1}; name "
            "some of these"
        )
    # A rank without sinks says it where its own output goes: to its log.
    echo = sinks.notice if mesh.rank == 0 else print
    return ProfilerWindow(**section.model_dump(), rank=mesh.rank, echo=echo)


def line_style(config: Config, world_size: int) -> LineStyle:
    """The requested log style, with what it has to know about the run."""
    if config.Engine.log_style == "fleetx":
        return FleetXLines()
    seq_len = config.Data.dataset.max_seq_len
    flops = megatron_deepspeed_flops_per_token(
        ModelShape.of(config.Model), seq_len, recomputes=config.Model.use_recompute
    )
    return MegatronLines(config.Engine.max_steps, seq_len, world_size, flops * seq_len)


# -- the prediction of a plan ---------------------------------------------------------------------


WARM_UP_STEPS = 2  # the first steps also allocate, compile and fill caches


@dataclass(frozen=True)
class Prediction:
    step_seconds: float
    bytes_per_rank: float  # of the rank that needs most
    band: float  # share by which the time may be off
    global_batch: int  # of the step predicted; a batch that grows begins with smaller ones

    def line(self) -> str:
        return (
            f"expected: {self.step_seconds:.3g} s a step (±{self.band:.0%}), at most "
            f"{self.bytes_per_rank / 1e9:.2f} GB a process"
        )


@dataclass
class PredictionCheck:
    """Collects what logging windows measured, for one sentence and one event at the end."""

    expected: Prediction
    times: list[float] = field(default_factory=list)  # of a step, one for each window

    def take(self, record: Step) -> None:
        if record.global_batch_size == self.expected.global_batch:
            self.times.append(record.batch_seconds)

    def tell(self, sinks: Sinks, step: int, peaks: Sequence[int], logging_freq: int) -> None:
        """`peaks` are the most bytes that each rank held."""
        left_out = -(-WARM_UP_STEPS // logging_freq)
        times = self.times[left_out:] or self.times[-1:]
        if not times:
            return
        expected, seconds, most = self.expected, statistics.median(times), max(peaks)
        fields: dict[str, Any] = {
            "predicted_step_seconds": expected.step_seconds,
            "measured_step_seconds": seconds,
            "predicted_bytes": round(expected.bytes_per_rank),
            "measured_bytes": most,
        }
        sinks.event("prediction", step=step, **fields)
        sinks.notice(
            f"predicted {expected.step_seconds:.3g} s a step, measured {seconds:.3g} "
            f"({expected.step_seconds / seconds - 1:+.0%}); predicted "
            f"{expected.bytes_per_rank / 1e9:.2f} GB a process, measured at most "
            f"{most / 1e9:.2f}" + (f" ({expected.bytes_per_rank / most - 1:+.0%})" if most else "")
        )
