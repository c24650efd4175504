"""The parameters of this rank: which shard of each it holds, and how many others hold the same.

They are kept by *key*: the name of the parameter, and for the copy of the word embedding that the
last pipeline stage has as its head, that name with `#tied` after it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fourfold.mesh import Layout, Mesh
from fourfold.model import GPT, ParamTable
from fourfold.model.params import Param
from fourfold.shards import Box, Shard, is_sharded

TIED_SUFFIX = "#tied"


def tied_key(name: str) -> str:
    """The key of the last stage's copy of a parameter."""
    return f"{name}{TIED_SUFFIX}"


def name_of(key: str) -> str:
    """Of the parameter kept under this key."""
    return key.removesuffix(TIED_SUFFIX)


def tied_keys(table: ParamTable) -> list[str]:
    """Of the parameter that is also the head, and of its copy."""
    return [] if table.tied is None else [table.tied, tied_key(table.tied)]


def named_parameters(parts: list[GPT]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the parts on this rank, by key."""
    for part in parts:
        for name, parameter in part.named_parameters():
            is_copy = part.table[name].tied_to_head and not part.is_first
            yield (tied_key(name) if is_copy else name), parameter


def local_shards(
    table: ParamTable, parameters: dict[str, nn.Parameter], mesh: Mesh
) -> dict[str, Shard]:
    """What each of the parameters, given by key, is of the whole model."""
    shards = {}
    for key, parameter in parameters.items():
        name = name_of(key)
        replica, replicas = _replica(table, key, mesh, is_sharded(parameter))
        offsets = _offsets(table, name, parameter, mesh)
        shards[key] = Shard(parameter, table[name].shape, offsets, name, replica, replicas)
    return shards


def box_on(row: Param, layout: Layout, place: dict[str, int], *, sharded: bool) -> Box:
    """The rectangle of a parameter that the rank at `place` holds."""
    offsets, shape = [0] * len(row.shape), list(row.shape)
    if row.split_dim is not None:
        start, stop = row.cut(place["mp"], layout.mp)
        offsets[row.split_dim], shape[row.split_dim] = start, stop - start
    if sharded:
        # As torch.chunk cuts rows: the last ranks may have fewer, or none.
        chunk = -(-shape[0] // layout.sharding)
        first = min(place["sharding"] * chunk, shape[0])
        offsets[0], shape[0] = offsets[0] + first, min(chunk, shape[0] - first)
    return Box(tuple(offsets), tuple(shape))


def _offsets(table: ParamTable, name: str, parameter: nn.Parameter, mesh: Mesh) -> tuple[int, ...]:
    offsets = box_on(table[name], mesh.layout, mesh.coordinates, sharded=False).offsets
    if is_sharded(parameter):
        from fourfold.parallel.fsdp import offsets_of_shard

        inside = offsets_of_shard(parameter, mesh.sharding_mesh)
        offsets = tuple(outer + inner for outer, inner in zip(offsets, inside))
    return offsets


def _replica(table: ParamTable, key: str, mesh: Mesh, sharded: bool) -> tuple[int, int]:
    """This rank's number among the ranks with the same rectangle, and how many they are."""
    layout, place, row = mesh.layout, mesh.coordinates, table[name_of(key)]
    replica, replicas = place["dp"], layout.dp
    if not sharded:
        replica, replicas = (
            replica * layout.sharding + place["sharding"],
            replicas * layout.sharding,
        )
    alike = layout.mp // row.pieces(layout.mp)  # neighbours on the model axis
    replica, replicas = replica * alike + place["mp"] % alike, replicas * alike
    if row.tied_to_head and layout.pp > 1:
        replica, replicas = replica + replicas * (key != row.name), replicas * 2
    return replica, replicas
