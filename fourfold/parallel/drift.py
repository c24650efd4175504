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

from fourfold.parallel.cuts import split_dim
from fourfold.parallel.pieces import TIED, WORD, Held, local
from fourfold.parallel.runner import Runner


class ReplicaDrift(Exception):
    """Ranks that should hold the same parameter do not. Not a mistake of the user."""


def check_replicas(runner: Runner, when: str) -> None:
    """Raise `ReplicaDrift` on every rank if any parameter differs between its holders."""
    mesh, problem = runner.mesh, None
    for group, axis, keys in _groups_of_holders(runner):
        different = _different(group, [runner.held[key] for key in keys])
        if different and problem is None:
            problem = (
                f"{when}: {len(different)} parameter(s) differ between {axis} ranks that must hold "
                f"them alike, seen by rank {mesh.rank}: {', '.join(different[:3])}. "
                "The last checkpoint before this is the one to trust; a rank that drifts again "
                "after a restart has faulty hardware"
            )
    told = mesh.agree(problem)
    if told is not None:
        raise ReplicaDrift(told)


def _groups_of_holders(runner: Runner) -> list[tuple[ProcessGroup | None, str, list[str]]]:
    """For each axis, the keys of what its ranks hold alike, in the same order on all of them."""
    mesh, keys = runner.mesh, sorted(runner.held)
    plain = keys if runner.sharding is None else []
    tied = [key for key in keys if key in (WORD, TIED)]
    return [
        (mesh.group("dp"), "data-parallel", keys),
        (mesh.group("sharding"), "sharding", plain),
        (
            mesh.group("mp"),
            "model-parallel",
            [k for k in keys if split_dim(k.split("#")[0]) is None],
        ),
        (mesh.ends_group if len(tied) == 1 else None, "pipeline", tied),
    ]


def _different(group: ProcessGroup | None, held: list[Held]) -> list[str]:
    """Names of those that not all ranks of the group have the same bits of."""
    if group is None or not held:
        return []
    own = torch.tensor([_hash(local(one.parameter.data)) for one in held])
    all_hashes = torch.empty((group.size(), len(held)), dtype=torch.int64)
    dist.all_gather(list(all_hashes.unbind()), own, group=group)
    alike = (all_hashes == all_hashes[0]).all(dim=0)
    return [one.name for one, same in zip(held, alike.tolist()) if not same]


def _hash(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    digest = hashlib.blake2b(content.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
