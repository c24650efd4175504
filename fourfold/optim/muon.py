"""Muon: the momentum of a matrix, orthogonalised by Newton-Schulz iterations, is its update.

The arithmetic is `torch.optim.Muon`'s, to the bit where both iterate in bfloat16. An orthogonalised
matrix depends on all of it, so under model parallelism and sharding a rank's rectangle is not
enough: the ranks of a pipeline stage gather each matrix on one of them, its owner, which
orthogonalises it and sends everyone their rectangle back. Owners take turns, so the work is divided
over all ranks of the stage, data replicas among them.

A round is the matrices of one gather and one return, both a single `all_to_all_single`. Every rank
goes through the same rounds in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fourfold.comm_timer import timed_comm
from fourfold.mesh import Layout, Mesh
from fourfold.model import ParamTable
from fourfold.parallel.parameters import box_on
from fourfold.shards import Box, Shard

AdjustLr = Literal["original", "match_rms_adamw"]

# Of the iteration x -> a x + (b x xT + c (x xT)^2) x; torch's, which are Keller Jordan's.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
# An owner takes several small matrices in a round, up to this many numbers.
ROUND_NUMEL = 4 * 1024 * 1024


@dataclass(frozen=True)
class MuonOptions:
    """In torch's words."""

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    ns_steps: int = 5
    adjust_lr_fn: AdjustLr = "original"
    lr_ratio: float = 1.0  # of its learning rate to the one the schedule gives
    iterates_in: torch.dtype | None = torch.bfloat16  # None: as the weights


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype | None) -> Tensor:
    """Newton-Schulz: singular values between about 0.7 and 1.2, the vectors of `matrix`."""
    a, b, c = COEFFICIENTS
    x = matrix if dtype is None else matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    # The largest singular value is at most this norm.
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjusted(shape: tuple[int, ...], rule: AdjustLr, lr_scale: float = 1.0) -> float:
    """What the learning rate of a matrix is multiplied with: torch's `adjust_lr_fn`.

    `match_rms_adamw` is Moonlight's: the update gets the root mean square that AdamW's usually
    have, so that AdamW's learning rate and weight decay are right for it.

    `lr_scale` is what muP makes of AdamW's rate, one over the width. What an orthogonal update
    changes in activations does not depend on the width, so `original` needs no more; Moonlight's
    factor grows with the width's root, and that is taken back.
    """
    rows, columns = shape
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns) * lr_scale)


class Muon:
    """The matrices of this rank and their momentum, by key."""

    def __init__(
        self,
        matrices: Mapping[str, Shard],
        options: MuonOptions,
        *,
        lr_scales: Mapping[str, float] | None = None,
        spared: frozenset[str] = frozenset(),
        exchange: Exchange | None = None,
    ) -> None:
        """`spared` are those without weight decay; without an `exchange` this rank has all of each
        matrix and updates it alone."""
        self.matrices = dict(matrices)
        self.options = options
        self.lr_scales = lr_scales or {}
        self.spared = spared
        self.exchange = exchange
        self.momentum = {key: torch.zeros_like(one.local) for key, one in matrices.items()}

    @property
    def itemsize(self) -> int:
        """Bytes of a number on its way between ranks."""
        return 4 if self.options.iterates_in is None else self.options.iterates_in.itemsize

    def update(
        self, learning_rate: float, divisor: float | Tensor, found_inf: Tensor | None
    ) -> None:
        """One step with gradients divided by `divisor`; none where `found_inf` is one."""
        skips = None if found_inf is None else found_inf > 0
        if self.exchange is None:
            for key in self.matrices:
                self._apply(key, self._orthogonalize(self._direction(key, divisor, skips)),
                            learning_rate, skips)  # fmt: skip
            return
        for this_round in self.exchange.rounds:
            directions = {key: self._direction(key, divisor, skips) for key in this_round.owners}
            if self.options.iterates_in is not None:
                # As the iteration would round them; in half the bytes.
                directions = {k: one.to(self.options.iterates_in) for k, one in directions.items()}
            whole = self.exchange.gather(this_round, directions)
            own = {key: self._orthogonalize(matrix) for key, matrix in whole.items()}
            for key, update in self.exchange.scatter(this_round, own, directions).items():
                self._apply(key, update, learning_rate, skips)

    def _direction(self, key: str, divisor: float | Tensor, skips: Tensor | None) -> Tensor:
        """What is to be orthogonalised, of this rank's rectangle; the momentum moves on."""
        gradient, buffer = self.matrices[key].gradient, self.momentum[key]
        if buffer.numel() == 0:  # sharding has left this rank nothing
            return buffer
        assert gradient is not None, "every parameter is used"
        if isinstance(divisor, Tensor):
            gradient = gradient / divisor.to(gradient.dtype)
        elif divisor != 1.0:
            gradient = gradient / divisor
        momentum = self.options.momentum
        if skips is None:
            buffer.lerp_(gradient, 1 - momentum)
        else:
            buffer.copy_(torch.where(skips, buffer, buffer.lerp(gradient, 1 - momentum)))
        return gradient.lerp(buffer, momentum) if self.options.nesterov else buffer

    def _orthogonalize(self, matrix: Tensor) -> Tensor:
        return orthogonalize(matrix, self.options.ns_steps, self.options.iterates_in)

    def _apply(self, key: str, update: Tensor, learning_rate: float, skips: Tensor | None) -> None:
        shard, options = self.matrices[key], self.options
        weight, rate = shard.local, learning_rate * options.lr_ratio
        scale = self.lr_scales.get(key, 1.0)
        decay = 0.0 if key in self.spared else options.weight_decay
        before = None if skips is None else weight.clone()
        weight.mul_(1 - rate * decay)
        weight.add_(update, alpha=-rate * adjusted(shard.shape, options.adjust_lr_fn, scale))
        if before is not None and skips is not None:
            weight.copy_(torch.where(skips, before, weight))


# -- between the ranks of a pipeline stage --------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """Matrices that are gathered in one message; `owners` are ranks of the group, by key."""

    owners: dict[str, int]


class Exchange:
    """Who has which rectangle of each matrix, who orthogonalises it, and the messages between."""

    def __init__(
        self,
        matrices: Mapping[str, Shard],
        boxes: Mapping[str, list[Box]],
        own_rank: int,
        size: int,
        group: ProcessGroup | None,
    ) -> None:
        """`boxes` are the rectangles of all ranks of the group, by their order in it."""
        for key, shard in matrices.items():
            own = boxes[key][own_rank]
            assert own == shard.box or own.volume() == shard.box.volume() == 0, key
        self.shapes = {key: shard.shape for key, shard in matrices.items()}
        self.boxes = boxes
        self.own_rank = own_rank
        self.size = size
        self.group = group
        self.rounds = list(rounds_of(self.shapes, size))

    def gather(self, this_round: Round, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole matrices of the round that this rank owns."""
        mine = [
            [parts[key] for key, owner in this_round.owners.items()
             if owner == to and self._sends(key, self.own_rank, owner)]
            for to in range(self.size)
        ]  # fmt: skip
        owned = [key for key, owner in this_round.owners.items() if owner == self.own_rank]
        shapes = [
            [self.boxes[key][sender].shape for key in owned
             if self._sends(key, sender, self.own_rank)]
            for sender in range(self.size)
        ]  # fmt: skip
        like = next(iter(parts.values()))
        arrived = self._exchange(mine, shapes, like)
        whole = {key: like.new_empty(self.shapes[key]) for key in owned}
        for sender, pieces in enumerate(arrived):
            keys = (key for key in owned if self._sends(key, sender, self.own_rank))
            for key, piece in zip(keys, pieces, strict=True):
                whole[key][self._place(key, sender)] = piece
        return whole

    def scatter(
        self, this_round: Round, owned: Mapping[str, Tensor], parts: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """This rank's rectangles of the round's results, each from its owner, in the order of the
        owners."""
        mine = [
            [one[self._place(key, to)] for key, one in owned.items() if self._has(key, to)]
            for to in range(self.size)
        ]
        keys = [
            [key for key, owner in this_round.owners.items()
             if owner == sender and self._has(key, self.own_rank)]
            for sender in range(self.size)
        ]  # fmt: skip
        shapes = [[self.boxes[key][self.own_rank].shape for key in some] for some in keys]
        arrived = self._exchange(mine, shapes, next(iter(parts.values())))
        return {
            key: piece for some, pieces in zip(keys, arrived) for key, piece in zip(some, pieces)
        }

    def bytes_sent(self, itemsize: int) -> tuple[int, int]:
        """Of a step, by this rank to others, gathering and returning."""
        gathered = returned = 0
        for key, owner in ((k, o) for one in self.rounds for k, o in one.owners.items()):
            if owner != self.own_rank:
                sends = self._sends(key, self.own_rank, owner)
                gathered += self.boxes[key][self.own_rank].volume() if sends else 0
                continue
            others = [box for rank, box in enumerate(self.boxes[key]) if rank != owner]
            returned += sum(box.volume() for box in others)
        return gathered * itemsize, returned * itemsize

    def _has(self, key: str, rank: int) -> bool:
        return self.boxes[key][rank].volume() > 0

    def _place(self, key: str, rank: int) -> tuple[slice, ...]:
        return self.boxes[key][rank].within(Box((0, 0), self.shapes[key]))

    def _sends(self, key: str, rank: int, owner: int) -> bool:
        """Whether `rank` is the one of those with its rectangle that sends it to the owner: the
        nearest, which may be the owner itself."""
        box = self.boxes[key][rank]
        holders = (other for other, held in enumerate(self.boxes[key]) if held == box)
        return box.volume() > 0 and rank == min(holders, key=lambda other: abs(other - owner))

    def _exchange(
        self, sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor
    ) -> list[list[Tensor]]:
        """One message to every rank; what arrived from each, in `shapes`."""
        # As bytes: not every backend knows every dtype.
        message = torch.cat(
            [piece.reshape(-1) for some in sent for piece in some] or [like.new_empty(0)]
        )
        sizes = [sum(math.prod(shape) for shape in some) for some in shapes]
        arrived = message.new_empty(sum(sizes))
        with timed_comm():
            dist.all_to_all_single(
                arrived.view(torch.uint8),
                message.view(torch.uint8),
                [size * arrived.itemsize for size in sizes],
                [sum(piece.numel() for piece in some) * message.itemsize for some in sent],
                group=self.group,
            )
        return [
            [
                piece.view(shape)
                for piece, shape in zip(part.split(list(map(math.prod, some))), some)
            ]
            for part, some in zip(arrived.split(sizes), shapes)
        ]


def rounds_of(shapes: Mapping[str, tuple[int, ...]], size: int) -> Iterator[Round]:
    """Matrices alike go together, so that all owners of a round take the same time."""
    keys = sorted(shapes, key=lambda key: (-math.prod(shapes[key]), shapes[key], key))
    while keys:
        each = max(1, ROUND_NUMEL // math.prod(shapes[keys[0]]))
        some, keys = keys[: each * size], keys[each * size :]
        yield Round({key: place % size for place, key in enumerate(some)})


def exchange_between(
    matrices: Mapping[str, Shard], table: ParamTable, mesh: Mesh, *, sharded: bool
) -> Exchange | None:
    """The one of this rank's stage, or None where the rank is alone in it; a collective."""
    layout, pp_rank = mesh.layout, mesh.coordinates["pp"]
    group = mesh.stage_group()
    ranks = stage_ranks(layout, pp_rank)
    if len(ranks) == 1 or not matrices:
        return None
    places = [layout.coordinates(rank) for rank in ranks]
    boxes = {
        key: [box_on(table[shard.name], layout, place, sharded=sharded) for place in places]
        for key, shard in matrices.items()
    }
    return Exchange(matrices, boxes, ranks.index(mesh.rank), len(ranks), group)


def stage_ranks(layout: Layout, pp_rank: int) -> list[int]:
    """All ranks of a pipeline stage, in the order of their group."""
    everyone = range(layout.world_size)
    return [rank for rank in everyone if layout.coordinates(rank)["pp"] == pp_rank]
