"""Which rectangle of each parameter this rank holds, and whether it speaks for it.

Model parallelism cuts one dimension of a matrix, sharding cuts rows of what is left: the result
is always one rectangle of the whole. Initial weights, checkpoints and the gradient norm need no
more than that.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fourfold.mesh import Mesh
from fourfold.model.gpt import GPT, ModelShape
from fourfold.model.init import whole_shapes
from fourfold.parallel.cuts import own_range, split_dim

WORD = "embeddings.word.weight"
# The last pipeline stage's own copy of the embedding, which is its head, is kept under this key.
TIED = f"{WORD}#tied"


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as a plain tensor that shares its memory."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is torch's DTensor, told without importing it, which takes a while."""
    return hasattr(tensor, "_local_tensor")


@dataclass(frozen=True)
class Held:
    """A parameter as this rank holds it."""

    name: str  # of the whole parameter; a tied copy has the name of what it copies
    parameter: nn.Parameter
    shape: tuple[int, ...]  # of the whole
    offsets: tuple[int, ...]
    replica: int  # which of the ranks that hold just this rectangle
    replicas: int

    @property
    def counts(self) -> bool:
        """Whether this rank adds it to the gradient norm: of all replicas, one does."""
        return self.replica == 0

    @property
    def writes(self) -> bool:
        """Whether this rank saves it. Replicas take turns, so that all have something to do."""
        return self.replica == zlib.crc32(self.name.encode()) % self.replicas


def named_parameters(parts: list[GPT]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the parts on this rank, with the tied copy under its own key."""
    for part in parts:
        for name, parameter in part.named_parameters():
            yield (TIED if name == WORD and not part.is_first else name), parameter


def held_parameters(
    shape: ModelShape, parameters: dict[str, nn.Parameter], mesh: Mesh
) -> dict[str, Held]:
    """What each of the parameters, given by key, is of the whole model."""
    whole = whole_shapes(shape)
    held = {}
    for key, parameter in parameters.items():
        name = key.partition("#")[0]
        offsets = _offsets(name, whole[name], parameter, mesh)
        replica, replicas = _replica(key, mesh, is_sharded(parameter))
        held[key] = Held(name, parameter, whole[name], offsets, replica, replicas)
    return held


def _offsets(
    name: str, whole: tuple[int, ...], parameter: nn.Parameter, mesh: Mesh
) -> tuple[int, ...]:
    offsets = [0] * len(whole)
    dim = split_dim(name)
    if dim is not None:
        offsets[dim] = own_range(whole[dim], mesh.place["mp"], mesh.layout.mp)[0]
    if is_sharded(parameter):
        from fourfold.parallel.shard import offsets_of_shard

        inside = offsets_of_shard(parameter)
        offsets = [outer + inner for outer, inner in zip(offsets, inside)]
    return tuple(offsets)


def _replica(key: str, mesh: Mesh, sharded: bool) -> tuple[int, int]:
    """This rank's number among the ranks with the same rectangle, and how many they are."""
    layout, place = mesh.layout, mesh.place
    replica, replicas = place["dp"], layout.dp
    if not sharded:
        replica, replicas = (
            replica * layout.sharding + place["sharding"],
            replicas * layout.sharding,
        )
    if split_dim(key.partition("#")[0]) is None:
        replica, replicas = replica * layout.mp + place["mp"], replicas * layout.mp
    if key.partition("#")[0] == WORD and layout.pp > 1:
        replica, replicas = replica + replicas * (key == TIED), replicas * 2
    return replica, replicas
