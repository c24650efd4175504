"""Group sharding: what each stage divides, in terms of torch's `fully_shard`.

| stage | between micro-batches a rank holds             | weights gathered          |
|-------|------------------------------------------------|---------------------------|
| 1     | its part of the optimizer state                | once a step               |
| 2     | and of the gradients                           | once a step               |
| 3     | and of the weights                             | for each layer as it runs |

Whatever the stage, the fp32 weights the optimizer updates are divided, and gathered in the
precision the network computes in. Gradients are summed, never averaged: the loss is already
divided by the tokens of the global batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from fourfold.model.gpt import GPT
from fourfold.parallel.precision import Precision
from fourfold.waiting import communicating


def apply_sharding(
    model: GPT, mesh: DeviceMesh, stage: int, precision: Precision, offload: bool
) -> None:
    """Divide the model (or the part of it) over the ranks of `mesh`, layer by layer."""
    reshard = stage == 3
    offloads: OffloadPolicy = OffloadPolicy()
    if offload:
        offloads = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    low = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision.level == "O2":
        low = MixedPrecisionPolicy(
            param_dtype=precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # LayerNorms stay in fp32, so they are gathered apart from the rest of their layer.
        for norm in [module for module in model.modules() if isinstance(module, nn.LayerNorm)]:
            fully_shard(
                norm,
                mesh=mesh,
                reshard_after_forward=reshard,
                offload_policy=offloads,
                mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            )
    for layer in model.layers.values():
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=reshard, offload_policy=offloads, mp_policy=low
        )
    # What is left, the embeddings, is needed at both ends of the network: gathered all the while.
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False, offload_policy=offloads, mp_policy=low
    )
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no other sum with a factor of one.
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(TimedAllGather())
        module.set_custom_reduce_scatter(TimedReduceScatter())


class TimedAllGather(DefaultAllGather):
    """Torch's own, with its time counted."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        with communicating():
            return super().__call__(*given, **named)


class TimedReduceScatter(DefaultReduceScatter):
    def __call__(self, *given: Any, **named: Any) -> Any:
        with communicating():
            return super().__call__(*given, **named)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_micro_batch(model: GPT, stage: int, is_last: bool) -> None:
    """Before the backward pass of a micro-batch: what is reduced and what is kept after it."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last or stage > 1)
    model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or stage == 3)


def drop_gathered(model: nn.Module) -> None:
    """Forget gathered weights. After an evaluation the next step would otherwise use them, and
    miss the update in between."""
    for module in sharded_modules(model):
        module.reshard()
