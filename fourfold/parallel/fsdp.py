"""Optimizer state sharding (ZeRO): what each stage divides, with torch's `fully_shard` (FSDP).

| stage | between micro-batches a rank holds             | weights gathered          |
|-------|------------------------------------------------|---------------------------|
| 1     | its part of the optimizer state                | once a step               |
| 2     | and of the gradients                           | once a step               |
| 3     | and of the weights                             | for each layer as it runs |

Whatever the stage, the fp32 weights the optimizer updates are divided, and gathered in the
precision the network computes in, each layer in one message. Gradients are summed, never averaged:
the loss is already divided by the tokens of the global batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fourfold.comm_timer import timed_comm
from fourfold.model.gpt import GPT
from fourfold.parallel.precision import Precision
from fourfold.parallel.shared_memory import all_gather, neighbours, reduce_scatter


class Sharding:
    """How the parts of a model on this rank are divided over the ranks of a mesh."""

    def __init__(
        self, mesh: DeviceMesh, stage: int, precision: Precision, offload: bool = False
    ) -> None:
        self.stage = stage
        self.precision = precision
        self.options: dict[str, Any] = {"mesh": mesh}
        if offload:
            self.options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

    def apply(self, model: GPT) -> None:
        """Divide the model (or the part of it), layer by layer."""
        level, frees = self.precision.level, self.stage == 3
        plain = low = MixedPrecisionPolicy(cast_forward_inputs=False)
        if level is not None:
            low = replace(plain, param_dtype=self.precision.dtype, reduce_dtype=torch.float32)
        for number, layer in model.layers.items():
            if level == "O1" and (norms := self._gathered_in_fp32(model, number)):
                # In a second message, both norms together.
                fully_shard(norms, reshard_after_forward=frees, mp_policy=plain, **self.options)
            fully_shard(layer, reshard_after_forward=frees, mp_policy=low, **self.options)
        # What is left, the embeddings, is needed at both ends of the network: kept gathered.
        ends = low if level == "O2" else plain
        fully_shard(model, reshard_after_forward=False, mp_policy=ends, **self.options)
        for module in sharded_modules(model):
            module.set_gradient_divide_factor(1.0)
            # gloo has no other sum with a factor of one.
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(NearbyAllGather())
            module.set_custom_reduce_scatter(NearbyReduceScatter())

    def _gathered_in_fp32(self, model: GPT, number: str) -> list[nn.Module]:
        """The modules of a layer whose parameters are."""
        return [
            module
            for path, module in model.layers[number].named_modules(prefix=f"layers.{number}")
            if (names := [name for name, _ in module.named_parameters(path, recurse=False)])
            and all(
                self.precision.weight_dtype(model.table, name, sharded=True) == torch.float32
                for name in names
            )
        ]

    def before_backward(self, model: nn.Module, is_last: bool) -> None:
        """What the backward pass of a micro-batch reduces, and what is kept after it."""
        assert isinstance(model, FSDPModule)
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or self.stage > 1)
        model.set_requires_all_reduce(is_last)
        model.set_reshard_after_backward(is_last or self.stage == 3)

    def drop_gathered(self, model: nn.Module) -> None:
        """Free gathered weights. After an evaluation the next step would otherwise use them, and
        miss the update in between."""
        for module in sharded_modules(model):
            module.reshard()


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def offsets_of_shard(parameter: Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """Where this rank's shard begins in what was divided over `mesh`.

    The parameter's own mesh may be another rank's: torch caches the results of operations on
    DTensors by the shape of their mesh, and a dry run in this process was several ranks in turn.
    """
    assert isinstance(parameter, DTensor)
    return compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)[1]


class NearbyAllGather(DefaultAllGather):
    """Torch's own, timed, and through shared memory between ranks of one machine."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if async_op and neighbours(input_tensor, group) is None:
            with timed_comm():
                return super().__call__(output_tensor, input_tensor, group, async_op)
        all_gather(output_tensor, input_tensor, group)
        return None


class NearbyReduceScatter(DefaultReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        assert op == dist.ReduceOp.SUM and not async_op
        reduce_scatter(output_tensor, input_tensor, group)
