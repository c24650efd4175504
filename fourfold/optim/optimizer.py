"""`Optimizer`: AdamW as the documents configure it; if asked for, Muon beside it and an average of
the weights.

With Muon the matrices of the layers are Muon's (`fourfold/optim/muon.py`) and everything else,
embeddings, head, norms and biases, is AdamW's. Each parameter's learning rate is the schedule's
times the `lr_scale` of its row in the table of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fourfold.config import Config
from fourfold.config.optimizer_section import default_ns_dtype
from fourfold.cost.workload import is_muons
from fourfold.device import is_cpu
from fourfold.optim.muon import Muon, MuonOptions, exchange_between
from fourfold.parallel import Runner
from fourfold.shards import Shard, local


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
    """AdamW over named fp32 parameters, with the clip folded into the update, and Muon.

    With `tensor_fusion` each group is one flat tensor: parameters, gradients and moments become
    views of it, and the update is two long loops instead of hundreds of short ones.
    """

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
        muon: Muon | None = None,
        ema: EMA | None = None,
    ) -> None:
        """`decayed` are the keys of those that weight decay applies to, at the schedule's learning
        rate whatever `lr_scales` makes of a parameter's own; `muon` updates the matrices it was
        made with, which are among the parameters."""
        self.parameters = parameters
        self.betas = betas
        self.epsilon = epsilon
        self.grad_clip = grad_clip
        self.tensor_fusion = tensor_fusion
        self.muon = muon
        self.ema = ema
        self.updates = 0
        alike: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
        for name, parameter in parameters.items():
            if muon is None or name not in muon.matrices:
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
        if self.muon is not None:
            self.muon.update(learning_rate, divisor, found_inf)
        self.updates += 1
        if self.ema is not None:
            self.ema.update(self.updates, found_inf)

    def zero_grad(self) -> None:
        """Clear the gradients; flat ones are views that must stay in place."""
        for group in self.groups:
            for parameter in group.parameters:
                if not self.tensor_fusion:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        if self.muon is not None:
            for key in self.muon.matrices:
                self.parameters[key].grad = None

    def named_moments(self) -> dict[str, Tensor]:
        """`<parameter>.<moment>` for every parameter and each of its `moments`, as views."""
        return {
            f"{key}.{name}": moment
            for key in self.parameters
            for name, moment in self.moments(key).items()
        }

    def moments(self, key: str) -> dict[str, Tensor]:
        """The state of one parameter, by torch's names: AdamW's two, Muon's one."""
        if self.muon is not None and key in self.muon.matrices:
            return {"momentum_buffer": self.muon.momentum[key]}
        parameter = self.parameters[key]
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
    return parameter.untyped_storage()._cdata == flat.untyped_storage()._cdata


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


# -- the average of weights -----------------------------------------------------------------------


class EMA:
    """The exponential moving average of every parameter of this rank, by key, as its fp32 weights
    are divided."""

    def __init__(self, shards: Mapping[str, Shard], decay: float) -> None:
        """It begins as the weights are."""
        self.shards = dict(shards)
        self.decay = decay
        self.values = {key: shard.local.clone() for key, shard in shards.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the weights as they are now."""
        for key, shard in self.shards.items():
            self.values[key].copy_(shard.local)

    @torch.no_grad()
    def update(self, updates: int, found_inf: Tensor | None = None) -> None:
        """Take in the weights after `updates` updates; nothing where `found_inf` is one."""
        # Early on the average of few: a run is not to end with a memory of random weights.
        moves = 1 - min(self.decay, (1 + updates) / (10 + updates))
        filled = [key for key, value in self.values.items() if value.numel() > 0]
        averages = [self.values[key] for key in filled]
        weights = [self.shards[key].local for key in filled]
        if found_inf is None:
            torch._foreach_lerp_(averages, weights, moves)
            return
        share = moves * (1 - found_inf)
        for average, weight in zip(averages, weights):
            average.lerp_(weight, share.to(average.dtype))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are the average while this lasts; what was made of them is not."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for key, shard in self.shards.items():
            held = shard.local.clone()
            shard.local.copy_(self.values[key])
            self.values[key].copy_(held)


# -- as configured --------------------------------------------------------------------------------


def build_optimizer(config: Config, runner: Runner) -> Optimizer:
    """The configured optimizer over the fp32 weights of this rank; a collective."""
    section = config.Optimizer
    decayed = runner.decayed()
    rows = {key: runner.table[shard.name] for key, shard in runner.shards.items()}
    lr_scales = {key: row.lr_scale for key, row in rows.items()}
    muon = None
    if section.name == "Muon":
        matrices = {key: shard for key, shard in runner.shards.items() if is_muons(rows[key])}
        muon = Muon(
            matrices,
            _muon_options(config),
            lr_scales=lr_scales,
            spared=frozenset(matrices.keys() - decayed),
            exchange=exchange_between(
                matrices, runner.table, runner.mesh, sharded=runner.sharding is not None
            ),
        )
    return Optimizer(
        runner.masters,
        decayed=decayed,
        weight_decay=section.weight_decay,
        betas=(section.adam_beta1, section.adam_beta2),
        epsilon=section.adam_epsilon,
        grad_clip=section.grad_clip,
        tensor_fusion=config.Fused.tensor_fusion,
        lr_scales=lr_scales,
        muon=muon,
        ema=None if section.ema_decay is None else EMA(runner.shards, section.ema_decay),
    )


def _muon_options(config: Config) -> MuonOptions:
    section, peak = config.Optimizer.muon, config.Optimizer.lr.max_lr
    dtype = section.ns_dtype or default_ns_dtype(on_cpu=is_cpu(config.Global.device))
    return MuonOptions(
        momentum=section.momentum,
        nesterov=section.nesterov,
        weight_decay=section.weight_decay,
        ns_steps=section.ns_steps,
        adjust_lr_fn=section.adjust_lr_fn,
        lr_ratio=1.0 if section.lr is None else section.lr / peak,
        iterates_in=torch.bfloat16 if dtype == "bfloat16" else None,
    )
