"""Data parallelism (DDP): the gradient all-reduce, and the check that replicas stay equal.

Gradients of sharded parameters come summed from torch. The rest is here:

- plain data parallelism, one message a layer, sent as soon as the layer's last gradient is ready;
- parameters that saw only this rank's positions under sequence parallelism, or its heads alone,
  summed over the model-parallel ranks;
- the embedding, which the first and the last pipeline stage both hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fourfold.comm_timer import timed_comm
from fourfold.errors import RunError
from fourfold.mesh import Mesh, sum_over
from fourfold.model import ParamTable
from fourfold.parallel.parameters import name_of, tied_keys
from fourfold.parallel.shared_memory import all_reduce, neighbours
from fourfold.shards import Shard, local


class Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup) -> None:
        self.parameters = parameters
        self.group = group
        self.arrived = 0
        self.is_sent = False
        self.sent: dist.Work | None = None  # None also if it has come back
        self.to_copy: list[tuple[Tensor, Tensor]] = []

    def send(self) -> None:
        """From here on the gradients are views of the message, so they are not stored twice."""
        self.is_sent = True
        members = [p for p in self.parameters if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in members if p.grad is not None])
        if neighbours(flat, self.group) is None:
            self.sent = dist.all_reduce(flat, group=self.group, async_op=True)
        else:
            # Done at once: gloo's threads would take longer, and take the time from the backward
            # pass, which needs every core.
            all_reduce(flat, self.group)
        for parameter, piece in zip(members, flat.split([p.numel() for p in members])):
            summed = piece.view_as(parameter)
            if parameter.grad is not None and parameter.grad._is_view():
                # The optimizer's flat gradients (`Fused.tensor_fusion`) must stay where they are.
                self.to_copy.append((parameter.grad, summed))
            else:
                parameter.grad = summed

    def receive(self) -> None:
        if not self.is_sent:
            self.send()
        if self.sent is not None:
            with timed_comm():
                self.sent.wait()
        for gradient, summed in self.to_copy:
            gradient.copy_(summed)
        self.arrived, self.is_sent, self.sent, self.to_copy = 0, False, None, []


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
def sum_across_model(
    table: ParamTable, masters: dict[str, nn.Parameter], mesh: Mesh, sequence_parallel: bool
) -> None:
    """Complete the gradients that model-parallel ranks have parts of.

    With sequence parallelism those of what is applied between the blocks; always those of what is
    applied to a rank's own heads, and of keys and values that several ranks have the same of.
    """
    degree, group = mesh.layout.mp, mesh.group("mp")
    partial, shared = [], []
    for key, parameter in masters.items():
        row = table[name_of(key)]
        if row.partial_gradient == "heads" or (row.partial_gradient and sequence_parallel):
            partial.append(parameter)
        elif row.split_dim is not None and row.pieces(degree) < degree:
            shared.append((parameter, row.pieces(degree)))
    sum_over(group, [local(p.grad) for p in partial if p.grad is not None])
    # A place for every piece, of which a rank fills its own: then one sum serves all of them.
    pieces = [
        _in_its_place(local(p.grad), mesh.coordinates["mp"] * count // degree, count)
        for p, count in shared
        if p.grad is not None
    ]
    sum_over(group, [every for every, _ in pieces])
    for (parameter, _), (every, place) in zip(shared, pieces):
        local(cast(Tensor, parameter.grad)).copy_(every[place])


def _in_its_place(gradient: Tensor, place: int, count: int) -> tuple[Tensor, int]:
    every = gradient.new_zeros((count, *gradient.shape))
    every[place] = gradient
    return every, place


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
        group = mesh.tied_embedding_group
        (gradient,) = gradients
        if group is not None and gradient.is_contiguous():
            all_reduce(gradient, group)  # where it is: as large as it is, each copy counts
        else:
            sum_over(group, gradients)


# -- replica drift --------------------------------------------------------------------------------


class ReplicaDrift(RunError):
    """Ranks that should hold the same parameter do not."""


def check_replicas(
    table: ParamTable, shards: Mapping[str, Shard], mesh: Mesh, sharded: bool, when: str
) -> None:
    """Raise `ReplicaDrift` on every rank if any parameter differs between its replicas.

    A rank that computes wrongly, or a reduction that leaves someone out, shows first in parameters
    that are held more than once. Each rank hashes its own; those that hold the same compare.
    """
    problem = None
    found = [
        _differing(holders, [shards[key] for key in holders.keys])
        for holders in _groups_of_holders(table, shards, mesh, sharded)
    ]
    for names, whom in [*found, _differing_here(table, shards, mesh.rank)]:
        if names and problem is None:
            problem = (
                f"{when}: {len(names)} parameter(s) that must be alike differ between {whom}: "
                f"{', '.join(names[:3])}. The last checkpoint before this is the one to trust; a "
                "rank that drifts again after a restart has faulty hardware"
            )
    told = mesh.broadcast_first(problem)
    if told is not None:
        raise ReplicaDrift(told)


class _Holders(NamedTuple):
    """Ranks that replicate parameters: all of a group, or each run of `neighbours` in it."""

    group: ProcessGroup | None
    axis: str
    keys: list[str]
    neighbours: int


def _groups_of_holders(
    table: ParamTable, shards: Mapping[str, Shard], mesh: Mesh, sharded: bool
) -> list[_Holders]:
    """For each axis, the keys of what its ranks replicate, in the same order on all of them."""
    layout = mesh.layout
    keys = sorted(shards)
    plain = [] if sharded else keys
    tied = [key for key in tied_keys(table) if key in shards]
    by_pieces: dict[int, list[str]] = {}
    for key in keys:
        by_pieces.setdefault(table[shards[key].name].pieces(layout.mp), []).append(key)
    return [
        _Holders(mesh.group("dp"), "data-parallel", keys, layout.dp),
        _Holders(mesh.group("sharding"), "sharding", plain, layout.sharding),
        *(
            _Holders(mesh.group("mp"), "model-parallel", alike, layout.mp // pieces)
            for pieces, alike in sorted(by_pieces.items())
            if pieces < layout.mp
        ),
        _Holders(mesh.tied_embedding_group if len(tied) == 1 else None, "pipeline", tied, 2),
    ]


def _differing(holders: _Holders, shards: list[Shard]) -> tuple[list[str], str]:
    """Names of those that are not bitwise equal where they are held, and on which ranks."""
    group = holders.group
    if group is None or not shards:
        return [], ""
    own = torch.tensor([_hash(shard.local) for shard in shards])
    all_hashes = torch.empty((group.size(), len(shards)), dtype=torch.int64)
    dist.all_gather(list(all_hashes.unbind()), own, group=group)
    together = all_hashes.view(-1, holders.neighbours, len(shards))
    odd = (together != together.mode(dim=1, keepdim=True).values).view_as(all_hashes)
    names = [one.name for one, differs in zip(shards, odd.any(dim=0).tolist()) if differs]
    ranks = dist.get_process_group_ranks(group)
    return names, _whom(holders.axis, ranks, odd.any(dim=1).tolist())


def _differing_here(
    table: ParamTable, shards: Mapping[str, Shard], rank: int
) -> tuple[list[str], str]:
    """The same for the two copies of the embedding that one rank of a V-shaped pipeline holds."""
    copies = [shards[key] for key in tied_keys(table) if key in shards]
    differ = len({_hash(copy.local) for copy in copies}) > 1
    return [copies[0].name] if differ else [], f"the two copies on rank {rank}"


def _whom(axis: str, ranks: list[int], odd: list[bool]) -> str:
    """The ranks to suspect: those that are not with the majority, where there is one."""
    few = [rank for rank, differs in zip(ranks, odd) if differs]
    if 2 * len(few) < len(ranks):
        return f"rank {', '.join(map(str, few))} and the other {axis} ranks"
    return f"{axis} ranks {', '.join(map(str, ranks))}"


def _hash(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    digest = hashlib.blake2b(content.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
