"""AdamW as the documents configure it, the learning rate as a function of the step, loss scale.

`lr_at` is pure: nothing of the schedule is saved or restored. `Optimizer` owns the moments and
gives them out by parameter name, so a checkpoint does not know how they were laid out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.model.names import is_bias, is_norm


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `max_lr`, cosine to `min_lr` at `decay_steps`, constant after."""

    max_lr: float
    min_lr: float
    warmup_rate: float
    decay_steps: int

    def lr_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 1."""
        warmup_steps = self.warmup_rate * self.decay_steps
        if warmup_steps > 0 and step <= warmup_steps:
            return self.max_lr * step / warmup_steps
        if step > self.decay_steps:
            return self.min_lr
        done = (step - warmup_steps) / (self.decay_steps - warmup_steps)
        return self.min_lr + 0.5 * (math.cos(math.pi * done) + 1) * (self.max_lr - self.min_lr)


@dataclass
class LossScale:
    """fp16's dynamic scale: halved on overflow, doubled after a thousand good steps."""

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
        """An overflow at the smallest scale is no longer a matter of scaling."""
        return self.value <= self.SMALLEST


def is_decayed(name: str) -> bool:
    """Weight decay spares biases and LayerNorms; embeddings do decay, as in the originals."""
    return not is_bias(name) and not is_norm(name)


class Optimizer:
    """AdamW over named fp32 parameters, with the clip folded into the update.

    With `tensor_fusion` each decay group is one flat tensor: parameters, gradients and moments
    become views of it, and the update is two long loops instead of hundreds of short ones.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        *,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        grad_clip: float,
        tensor_fusion: bool = False,
    ) -> None:
        self.parameters = parameters
        self.grad_clip = grad_clip
        self.tensor_fusion = tensor_fusion
        self.updates = 0
        decayed = {name: p for name, p in parameters.items() if is_decayed(name)}
        spared = {name: p for name, p in parameters.items() if not is_decayed(name)}
        groups = [(decayed, weight_decay), (spared, 0.0)]
        self.flats = [_flatten(members) for members, _ in groups] if tensor_fusion else []
        tensors = [[flat] for flat in self.flats] or [
            list(members.values()) for members, _ in groups
        ]
        self.adamw = torch.optim.AdamW(
            [{"params": ps, "weight_decay": decay} for ps, (_, decay) in zip(tensors, groups)],
            lr=0.0,
            betas=betas,
            eps=epsilon,
            fused=True,
        )
        self._create_state()

    def _create_state(self) -> None:
        """Moments exist from the start, so that loading has somewhere to put them."""
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                self.adamw.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the gradients as they stand (still times the loss scale)."""
        owners = self.flats or list(self.parameters.values())
        gradients = [p.grad for p in owners if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, foreach=True)

    def update(self, learning_rate: float, norm: float, loss_scale: float = 1.0) -> None:
        """One step with gradients divided by the loss scale and clipped to `grad_clip`.

        `norm` is the norm after unscaling. The fused kernel divides while it reads, so neither
        unscaling nor clipping makes a pass of its own over the gradients.
        """
        divisor = loss_scale
        if self.grad_clip > 0:
            divisor *= max(norm, self.grad_clip) / self.grad_clip
        device = next(iter(self.parameters.values())).device
        self.adamw.grad_scale = (  # type: ignore[attr-defined]
            torch.tensor(divisor, dtype=torch.float32, device=device) if divisor != 1.0 else None
        )
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.updates += 1

    def zero_grad(self) -> None:
        # Flat gradients are views that must stay where they are; others are freed.
        self.adamw.zero_grad(set_to_none=not self.tensor_fusion)

    def named_moments(self) -> dict[str, Tensor]:
        """`<parameter>.exp_avg` and `<parameter>.exp_avg_sq` for every parameter, as views."""
        return {
            f"{name}.{key}": self._moment(parameter, key)
            for key in ("exp_avg", "exp_avg_sq")
            for name, parameter in self.parameters.items()
        }

    def _moment(self, parameter: torch.nn.Parameter, key: str) -> Tensor:
        if not self.tensor_fusion:
            return self.adamw.state[parameter][key]
        flat = next(flat for flat in self.flats if _is_view_of(parameter, flat))
        start = parameter.storage_offset()
        return self.adamw.state[flat][key][start : start + parameter.numel()].view_as(parameter)

    def restore_updates(self, updates: int) -> None:
        """Set the number of updates done, which corrects Adam's bias."""
        self.updates = updates
        for state in self.adamw.state.values():
            state["step"].fill_(float(updates))


def _is_view_of(parameter: Tensor, flat: Tensor) -> bool:
    return parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def _flatten(members: dict[str, torch.nn.Parameter]) -> torch.nn.Parameter:
    """One tensor that holds all members end to end; they become views of it, and so their grads."""
    total = sum(p.numel() for p in members.values())
    first = next(iter(members.values()))
    flat = torch.nn.Parameter(torch.empty(total, dtype=first.dtype, device=first.device))
    flat.grad = torch.zeros_like(flat)
    start = 0
    with torch.no_grad():
        for parameter in members.values():
            stop = start + parameter.numel()
            flat[start:stop].copy_(parameter.reshape(-1))
            parameter.data = flat.data[start:stop].view_as(parameter)
            parameter.grad = flat.grad[start:stop].view_as(parameter)
            start = stop
    return flat
