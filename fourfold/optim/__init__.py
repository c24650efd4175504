"""The optimizer's side of a step: AdamW, Muon, the average of weights, the learning rate.

`lr_at` is a pure function of the step: nothing of the schedule is saved or restored. `Optimizer`
owns the moments and returns them by parameter name, so a checkpoint does not know how they were
laid out.
"""

from fourfold.optim.optimizer import EMA, Optimizer, build_optimizer
from fourfold.optim.schedule import DeviceLossScale, LossScale, Schedule, build_schedule

__all__ = [
    "EMA",
    "DeviceLossScale",
    "LossScale",
    "Optimizer",
    "Schedule",
    "build_optimizer",
    "build_schedule",
]
