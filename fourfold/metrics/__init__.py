"""Metrics of a run and where they go: the log line, JSONL, TensorBoard, W&B, the loss picture.

`Meter` times steps and makes one `Step` record per logging window; `open_sinks` returns the object
that writes records, evaluations, events and notices to every sink. Nothing here knows how a step is
run. rich, matplotlib, tensorboard and wandb are imported when first used.
"""

from fourfold.metrics.jsonl import read_jsonl
from fourfold.metrics.machines import LinkWatch, RankMachines, find_machines
from fourfold.metrics.meter import Meter, Step, StepOutcome
from fourfold.metrics.peaks import Peak, peak_flops
from fourfold.metrics.plot import plot_losses
from fourfold.metrics.profiler import ProfilerWindow
from fourfold.metrics.sinks import Console, Sinks, open_sinks
from fourfold.metrics.stragglers import OwnTimes, RankTimes, Stragglers, compare_ranks

__all__ = [
    "Console",
    "LinkWatch",
    "Meter",
    "OwnTimes",
    "Peak",
    "ProfilerWindow",
    "RankMachines",
    "RankTimes",
    "Sinks",
    "Step",
    "StepOutcome",
    "Stragglers",
    "compare_ranks",
    "find_machines",
    "open_sinks",
    "peak_flops",
    "plot_losses",
    "read_jsonl",
]
