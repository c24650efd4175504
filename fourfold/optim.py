"""AdamW as the documents configure it, the learning-rate schedule, and dynamic loss scaling.

`lr_at` is a pure function of the step: nothing of the schedule is saved or restored. `Optimizer`
owns the moments and returns them by parameter name, so a checkpoint does not know how they were
laid out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fourfold.config import Config
from fourfold.config.batch_schedule import BatchSchedule
from fourfold.shards import local


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `max_lr`, then down to `min_lr` at `decay`, constant after.

    `warmup` and `decay` are steps, as FleetX counts them; with a batch schedule they are samples,
    as Megatron does, and a step's rate follows the samples read before it.
    """

    max_lr: float
    min_lr: float
    warmup: float
    decay: float
    style: Literal["cosine", "linear", "constant"] = "cosine"
    batch_schedule: BatchSchedule | None = None

    def lr_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 1."""
        now = step if self.batch_schedule is None else self.batch_schedule.consumed(step - 1)
        if self.warmup > 0 and now <= self.warmup:
            return self.max_lr * now / self.warmup
        if self.style == "constant":
            return self.max_lr
        if now > self.decay:
            return self.min_lr
        done = (now - self.warmup) / (self.decay - self.warmup)
        left = 1 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
        return self.min_lr + left * (self.max_lr - self.min_lr)


def build_schedule(config: Config) -> Schedule:
    lr = config.Optimizer.lr
    if lr.decay_samples is not None:
        warmup, decay, batches = lr.warmup_samples or 0.0, lr.decay_samples, config.batch_schedule
    else:
        warmup, decay, batches = lr.warmup_rate * lr.decay_steps, lr.decay_steps, None
    return Schedule(lr.max_lr, lr.min_lr, warmup, decay, lr.decay_style, batches)


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


@dataclass
class ParamGroup:
    """Parameters that share weight decay and learning rate, with Adam's state of each."""

    parameters: list[torch.nn.Parameter]
    weight_decay: float
    lr_scale: float  # of the schedule's learning rate
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def of(
        cls, parameters: list[torch.nn.Parameter], weight_decay: float, lr_scale: float = 1.0
    ) -> ParamGroup:
        """The moments exist from the start, so that loading has somewhere to put them."""
        held = [local(p.data) for p in parameters]
        return cls(
            parameters,
            weight_decay,
            lr_scale,
            exp_avg=[torch.zeros_like(tensor) for tensor in held],
            exp_avg_sq=[torch.zeros_like(tensor) for tensor in held],
            steps=[torch.zeros((), dtype=torch.float32, device=tensor.device) for tensor in held],
        )

    def filled(self) -> list[int]:
        """The indices of those that are not empty on this rank: sharding can leave it none."""
        return [i for i, moment in enumerate(self.exp_avg) if moment.numel() > 0]


class Optimizer:
    """AdamW over named fp32 parameters, with the clip folded into the update.

    With `tensor_fusion` each decay group is one flat tensor: parameters, gradients and moments
    become views of it, and the update is two long loops instead of hundreds of short ones.
    """

    MOMENTS = ("exp_avg", "exp_avg_sq")  # its state of a parameter, each of the parameter's shape

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        *,
        decayed: Collection[str],
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        grad_clip: float,
        tensor_fusion: bool = False,
        lr_scales: Mapping[str, float] | None = None,
    ) -> None:
        """`decayed` are the keys of those that weight decay applies to. It does so at the
        schedule's learning rate, whatever `lr_scales` makes of a parameter's own."""
        self.parameters = parameters
        self.betas = betas
        self.epsilon = epsilon
        self.grad_clip = grad_clip
        self.tensor_fusion = tensor_fusion
        self.updates = 0
        alike: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
        for name, parameter in parameters.items():
            scale = 1.0 if lr_scales is None else lr_scales.get(name, 1.0)
            alike.setdefault((name in decayed, scale), []).append(parameter)
        self.groups = [
            ParamGroup.of(
                [_flatten(members)] if tensor_fusion else members,
                weight_decay / scale if decays else 0.0,
                scale,
            )
            for (decays, scale), members in alike.items()
        ]

    @torch.no_grad()
    def update(
        self,
        learning_rate: float,
        norm: float | Tensor,
        loss_scale: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step with gradients divided by the loss scale and clipped to `grad_clip`.

        `norm` is the norm after unscaling. The fused kernel divides while it reads, so neither
        unscaling nor clipping makes a pass of its own over the gradients. On a GPU the numbers may
        stay there; where `found_inf` turns out to be one, nothing is changed.
        """
        divisor = loss_scale
        if self.grad_clip > 0:
            divisor = divisor * (_at_least(norm, self.grad_clip) / self.grad_clip)
        for group in self.groups:
            filled = group.filled()
            if not filled:
                continue
            parameters = [group.parameters[i] for i in filled]
            assert all(p.grad is not None for p in parameters), "every parameter is used"
            # torch's functional form: its optimizer classes would import the compiler first.
            adamw(
                [local(p.data) for p in parameters],
                [local(cast(Tensor, p.grad)) for p in parameters],
                [group.exp_avg[i] for i in filled],
                [group.exp_avg_sq[i] for i in filled],
                [],
                [group.steps[i] for i in filled],
                fused=True,
                grad_scale=_scale_like(group.steps[0], divisor),
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=learning_rate * group.lr_scale,
                weight_decay=group.weight_decay,
                eps=self.epsilon,
                maximize=False,
            )
        self.updates += 1

    def zero_grad(self) -> None:
        """Clear the gradients; flat ones are views that must stay in place."""
        for group in self.groups:
            for parameter in group.parameters:
                if not self.tensor_fusion:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def named_moments(self) -> dict[str, Tensor]:
        """`<parameter>.<moment>` for every parameter and each of `MOMENTS`, as views."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, moment in self._moments(parameter).items():
                moments[f"{name}.{key}"] = moment
        return moments

    def _moments(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        for group in self.groups:
            for owner, first, second in zip(group.parameters, group.exp_avg, group.exp_avg_sq):
                if owner is parameter:
                    return {"exp_avg": first, "exp_avg_sq": second}
                if self.tensor_fusion and _is_view_of(parameter, owner):
                    start = parameter.storage_offset()
                    piece = slice(start, start + parameter.numel())
                    return {
                        "exp_avg": first[piece].view_as(parameter),
                        "exp_avg_sq": second[piece].view_as(parameter),
                    }
        raise AssertionError("every parameter is in a group")

    def restore_updates(self, updates: int) -> None:
        """Set the number of updates done, which corrects Adam's bias."""
        self.updates = updates
        for group in self.groups:
            for step in group.steps:
                step.fill_(float(updates))


def _scale_like(step: Tensor, divisor: float | Tensor) -> Tensor | None:
    """None where nothing is divided: then the kernel does not write back the gradients."""
    if isinstance(divisor, Tensor):
        return divisor.to(step.dtype)
    return None if divisor == 1.0 else torch.full_like(step, divisor)


def _at_least(norm: float | Tensor, least: float) -> float | Tensor:
    return norm.clamp(min=least) if isinstance(norm, Tensor) else max(norm, least)


def _is_view_of(parameter: Tensor, flat: Tensor) -> bool:
    return parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def _flatten(members: list[torch.nn.Parameter]) -> torch.nn.Parameter:
    """One tensor that holds all members end to end; they become views of it, and so their grads."""
    total = sum(p.numel() for p in members)
    like = members[0]
    flat = torch.nn.Parameter(torch.empty(total, dtype=like.dtype, device=like.device))
    flat.grad = torch.zeros_like(flat)
    start = 0
    with torch.no_grad():
        for parameter in members:
            stop = start + parameter.numel()
            flat[start:stop].copy_(parameter.reshape(-1))
            parameter.data = flat.data[start:stop].view_as(parameter)
            parameter.grad = flat.grad[start:stop].view_as(parameter)
            start = stop
    return flat


def build_optimizer(
    config: Config,
    masters: dict[str, torch.nn.Parameter],
    decayed: Collection[str],
    lr_scales: Mapping[str, float] | None = None,
) -> Optimizer:
    """The configured optimizer over the fp32 weights of this rank; the rest as in `Optimizer`."""
    section = config.Optimizer
    return Optimizer(
        masters,
        decayed=decayed,
        weight_decay=section.weight_decay,
        betas=(section.adam_beta1, section.adam_beta2),
        epsilon=section.adam_epsilon,
        grad_clip=section.grad_clip,
        tensor_fusion=config.Fused.tensor_fusion,
        lr_scales=lr_scales,
    )
