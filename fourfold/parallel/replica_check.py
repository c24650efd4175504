"""Replica drift: what several ranks hold alike must be alike, to the bit.

A rank that computes wrongly, or a reduction that leaves someone out, shows first in parameters
that are held more than once. Each rank hashes its own; those that hold the same compare.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fourfold.errors import RunError
from fourfold.parallel.parameters import tied_keys
from fourfold.parallel.runner import Runner
from fourfold.shards import Shard


class ReplicaDrift(RunError):
    """Ranks that should hold the same parameter do not."""


def check_replicas(runner: Runner, when: str) -> None:
    """Raise `ReplicaDrift` on every rank if any parameter differs between its holders."""
    mesh, problem = runner.mesh, None
    found = [
        _differing(group, axis, [runner.shards[key] for key in keys])
        for group, axis, keys in _groups_of_holders(runner)
    ]
    for names, whom in [*found, _differing_here(runner)]:
        if names and problem is None:
            problem = (
                f"{when}: {len(names)} parameter(s) that must be alike differ between {whom}: "
                f"{', '.join(names[:3])}. The last checkpoint before this is the one to trust; a "
                "rank that drifts again after a restart has faulty hardware"
            )
    told = mesh.broadcast_first(problem)
    if told is not None:
        raise ReplicaDrift(told)


def _groups_of_holders(runner: Runner) -> list[tuple[ProcessGroup | None, str, list[str]]]:
    """For each axis, the keys of what its ranks hold alike, in the same order on all of them."""
    mesh, keys = runner.mesh, sorted(runner.shards)
    plain = keys if runner.sharding is None else []
    tied = [key for key in tied_keys(runner.table) if key in runner.shards]
    uncut = [k for k in keys if runner.table[runner.shards[k].name].split_dim is None]
    return [
        (mesh.group("dp"), "data-parallel", keys),
        (mesh.group("sharding"), "sharding", plain),
        (mesh.group("mp"), "model-parallel", uncut),
        (mesh.tied_embedding_group if len(tied) == 1 else None, "pipeline", tied),
    ]


def _differing(group: ProcessGroup | None, axis: str, shards: list[Shard]) -> tuple[list[str], str]:
    """Names of those that not all ranks of the group have the same bits of, and which ranks."""
    if group is None or not shards:
        return [], ""
    own = torch.tensor([_hash(shard.local) for shard in shards])
    all_hashes = torch.empty((group.size(), len(shards)), dtype=torch.int64)
    dist.all_gather(list(all_hashes.unbind()), own, group=group)
    odd = all_hashes != all_hashes.mode(dim=0).values
    names = [one.name for one, differs in zip(shards, odd.any(dim=0).tolist()) if differs]
    return names, _whom(axis, dist.get_process_group_ranks(group), odd.any(dim=1).tolist())


def _differing_here(runner: Runner) -> tuple[list[str], str]:
    """The same of the two copies of the embedding that one rank of a V-shaped pipeline holds."""
    copies = [runner.shards[key] for key in tied_keys(runner.table) if key in runner.shards]
    differ = len({_hash(copy.local) for copy in copies}) > 1
    return [copies[0].name] if differ else [], f"the two copies on rank {runner.mesh.rank}"


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
