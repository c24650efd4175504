"""After the backward pass: gradients that stand on several ranks become one sum on each.

Sharded parameters come summed from torch. The rest is here:
- plain data parallelism, one message a layer, sent as soon as the layer's last gradient is there;
- what only saw its own positions under sequence parallelism, summed over the model-parallel ranks;
- the embedding, which the first and the last pipeline stage both hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fourfold.mesh import Mesh, sum_over
from fourfold.model import ParamTable
from fourfold.parallel.parameters import name_of, tied_keys
from fourfold.shards import local
from fourfold.waiting import communicating


class Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup) -> None:
        self.parameters = parameters
        self.group = group
        self.arrived = 0
        self.sent: dist.Work | None = None
        self.to_copy: list[tuple[Tensor, Tensor]] = []

    def send(self) -> None:
        """From here on the gradients are views of the message, so they are not held twice."""
        members = [p for p in self.parameters if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in members if p.grad is not None])
        self.sent = dist.all_reduce(flat, group=self.group, async_op=True)
        for parameter, piece in zip(members, flat.split([p.numel() for p in members])):
            summed = piece.view_as(parameter)
            if parameter.grad is not None and parameter.grad._is_view():
                # The optimizer's flat gradients (`Fused.tensor_fusion`) must stay where they are.
                self.to_copy.append((parameter.grad, summed))
            else:
                parameter.grad = summed

    def receive(self) -> None:
        if self.sent is None:
            self.send()
        assert self.sent is not None
        with communicating():
            self.sent.wait()
        for gradient, summed in self.to_copy:
            gradient.copy_(summed)
        self.arrived, self.sent, self.to_copy = 0, None, []


class GradientSync:
    """Plain data parallelism: every rank has all of the gradients, each of its own samples."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        masters: dict[str, nn.Parameter],
        table: ParamTable,
        group: ProcessGroup,
    ) -> None:
        """`parameters` are the network's and may be of low precision; gradients of `masters` are
        what is summed. The hooks that fill those were registered before."""
        self.micro_batches = 1  # of the batch under way; whoever runs it says how many
        by_layer: dict[str, list[str]] = {}
        for name in masters:
            in_layer = table[name_of(name)].in_every_layer
            layer = ".".join(name.split(".")[:2]) if in_layer else "rest"
            by_layer.setdefault(layer, []).append(name)
        self.buckets = []
        for layer, names in by_layer.items():
            bucket = Bucket([masters[name] for name in names], group)
            self.buckets.append(bucket)
            # The embedding gets its gradient in two places, so it waits for the end.
            if layer != "rest":
                for name in names:
                    hook = self._count(bucket)
                    parameters[name].register_post_accumulate_grad_hook(hook)

    def _count(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def arrive(_: Tensor) -> None:
            bucket.arrived += 1
            if bucket.arrived == self.micro_batches * len(bucket.parameters):
                bucket.send()

        return arrive

    def finish(self) -> None:
        for bucket in self.buckets:
            bucket.receive()


@torch.no_grad()
def sum_across_model(table: ParamTable, masters: dict[str, nn.Parameter], mesh: Mesh) -> None:
    """With sequence parallelism: complete the gradients of what is applied between the blocks."""
    partial = [p for key, p in masters.items() if table[name_of(key)].partial_gradient]
    sum_over(mesh.group("mp"), [local(p.grad) for p in partial if p.grad is not None])


@torch.no_grad()
def sum_tied(table: ParamTable, masters: dict[str, nn.Parameter], mesh: Mesh) -> None:
    """The tied embedding's gradient is the sum of its two uses, on both of its copies."""
    copies = [masters[key] for key in tied_keys(table) if key in masters]
    gradients = [local(p.grad) for p in copies if p.grad is not None]
    if len(gradients) == 2:
        # Both ends of a V-shaped pipeline are on one rank.
        gradients[0] += gradients[1]
        gradients[1].copy_(gradients[0])
    elif gradients:
        sum_over(mesh.tied_embedding_group, gradients)
