"""The learning rate as a function of the step, and dynamic loss scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fourfold.config import Config
from fourfold.config.batch_schedule import BatchSchedule

Style = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
WsdStyle = Literal["linear", "1-sqrt", "cosine", "exponential"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `max_lr`, then by `style` down to `min_lr` at `decay`, constant after.

    `warmup` and `decay` are steps, as FleetX counts them; with a batch schedule they are samples,
    as Megatron does, and a step's rate follows the samples read before it. With style "wsd"
    (warm-up, stable, decay) the rate stays at `max_lr` until the last `wsd_decay` before `decay`.
    """

    max_lr: float
    min_lr: float
    warmup: float
    decay: float
    style: Style = "cosine"
    batch_schedule: BatchSchedule | None = None
    wsd_decay: float = 0.0
    wsd_style: WsdStyle = "linear"

    def lr_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 1."""
        now = step if self.batch_schedule is None else self.batch_schedule.consumed(step - 1)
        if self.warmup > 0 and now <= self.warmup:
            return self.max_lr * now / self.warmup
        if self.style == "constant":
            return self.max_lr
        if now > self.decay:
            return self.min_lr
        if self.style == "inverse_sqrt":
            # Continuous with the warm-up, as Megatron has it.
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(now, 1)))
        return self.min_lr + self._left(now) * (self.max_lr - self.min_lr)

    def _left(self, now: float) -> float:
        """The share of the way from `max_lr` to `min_lr` that is still ahead."""
        if self.style == "wsd":
            stable_until = self.decay - self.wsd_decay
            if now <= stable_until:
                return 1.0
            return _remaining((now - stable_until) / self.wsd_decay, self.wsd_style)
        done = (now - self.warmup) / (self.decay - self.warmup)
        return _remaining(done, "linear" if self.style == "linear" else "cosine")


def _remaining(done: float, style: WsdStyle) -> float:
    """From 1 to 0 as `done` goes from 0 to 1."""
    if style == "linear":
        return 1 - done
    if style == "1-sqrt":
        return 1 - math.sqrt(done)
    if style == "exponential":
        return 2 * 0.5**done - 1
    return 0.5 * (math.cos(math.pi * done) + 1)


def build_schedule(config: Config) -> Schedule:
    """In samples if the configuration gives a length in samples, else in steps."""
    lr = config.Optimizer.lr
    if lr.decay_samples is not None:
        warmup, decay, wsd = lr.warmup_samples or 0.0, lr.decay_samples, lr.wsd_decay_samples
        counted = config.batch_schedule
    else:
        warmup, decay, wsd = lr.warmup_rate * lr.decay_steps, lr.decay_steps, lr.wsd_decay_steps
        counted = None
    return Schedule(
        lr.max_lr,
        lr.min_lr,
        warmup,
        decay,
        lr.decay_style,
        counted,
        wsd_decay=wsd or 0.0,
        wsd_style=lr.wsd_decay_style,
    )


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16: halved on overflow, doubled after a thousand good steps."""

    value: float
    good_steps: int = 0

    GROWTH_INTERVAL = 1000
    SMALLEST = 1.0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.value = max(self.value / 2, self.SMALLEST)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.GROWTH_INTERVAL:
            self.value *= 2
            self.good_steps = 0

    @property
    def exhausted(self) -> bool:
        """An overflow at the smallest scale: lowering the scale cannot help."""
        return self.value <= self.SMALLEST


class DeviceLossScale:
    """`LossScale` on the device, by the same rule."""

    def __init__(self, start: LossScale, device: torch.device) -> None:
        self.value = torch.full((), start.value, dtype=torch.float64, device=device)
        self.good_steps = torch.full_like(self.value, start.good_steps)

    def update(self, overflowed: Tensor) -> None:
        good = self.good_steps + 1
        grows = good == LossScale.GROWTH_INTERVAL
        halved = (self.value / 2).clamp(min=LossScale.SMALLEST)
        doubled = torch.where(grows, self.value * 2, self.value)
        self.value = torch.where(overflowed, halved, doubled)
        self.good_steps = torch.where(overflowed | grows, torch.zeros_like(good), good)
