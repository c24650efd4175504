"""Collectives with known answers: every group of a layout, every kind of message a run sends.

Each rank fills its tensors with numbers that follow from its place, so what must arrive is known
without a reference. Numbers are small integers: their sums are exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fourfold.device import select_device
from fourfold.mesh import AXES, Layout, Mesh, connect

SIZES = (1, 1000, 262_144)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@dataclass(frozen=True)
class Member:
    """This rank among those of a group."""

    group: ProcessGroup
    index: int
    size: int
    device: torch.device

    def filled(self, by: int, size: int, dtype: torch.dtype) -> Tensor:
        """What member `by` sends: its number in every element, plus the element's place in 7."""
        places = torch.arange(size, device=self.device) % 7
        return (places + by).to(dtype)


def check_collectives(layout: Layout, device: str) -> list[dict[str, Any]]:
    """On a rank: every axis of the layout above 1, every kind; what went wrong, if anything."""
    chosen = select_device(device)
    mesh = connect(layout, chosen)
    rows = []
    for axis, place in _places(mesh, chosen):
        for name, check in CHECKS.items():
            wrong = [
                f"{size} x {str(dtype).removeprefix('torch.')}"
                for size in SIZES
                for dtype in DTYPES
                if not check(place, size, dtype)
            ]
            rows.append({"axis": axis, "kind": name, "ranks": place.size, "wrong": wrong})
    mesh.close()
    return rows


def _places(mesh: Mesh, device: torch.device) -> Iterator[tuple[str, Member]]:
    for axis in AXES:
        group = mesh.group(axis)
        if group is not None and group.size() > 1:
            yield axis, Member(group, group.rank(), group.size(), device)


def _all_reduce(place: Member, size: int, dtype: torch.dtype) -> bool:
    own = place.filled(place.index, size, dtype)
    dist.all_reduce(own, group=place.group)
    summed = sum(place.filled(by, size, dtype) for by in range(place.size))
    largest = place.filled(place.index, size, dtype)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=place.group)
    return _same(own, summed) and _same(largest, place.filled(place.size - 1, size, dtype))


def _all_gather(place: Member, size: int, dtype: torch.dtype) -> bool:
    own = place.filled(place.index, size, dtype)
    whole = own.new_empty(size * place.size)
    dist.all_gather_single(whole, own, group=place.group)
    return _same(whole, torch.cat([place.filled(by, size, dtype) for by in range(place.size)]))


def _reduce_scatter(place: Member, size: int, dtype: torch.dtype) -> bool:
    """Member `by` gives each of the others another piece."""
    own = torch.empty(size, dtype=dtype, device=place.device)
    whole = torch.cat([place.filled(place.index + to, size, dtype) for to in range(place.size)])
    dist.reduce_scatter_single(own, whole, group=place.group)
    return _same(own, sum(place.filled(by + place.index, size, dtype) for by in range(place.size)))


def _broadcast(place: Member, size: int, dtype: torch.dtype) -> bool:
    arrived = []
    for root in range(place.size):
        own = place.filled(place.index, size, dtype)
        dist.broadcast(own, group=place.group, group_src=root)
        arrived.append(_same(own, place.filled(root, size, dtype)))
    return all(arrived)


def _send_and_receive(place: Member, size: int, dtype: torch.dtype) -> bool:
    """Around the ring, as a pipeline sends: all at once."""
    following, before = (place.index + 1) % place.size, (place.index - 1) % place.size
    own, got = place.filled(place.index, size, dtype), place.filled(0, size, dtype)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own, group=place.group, group_peer=following),
            dist.P2POp(dist.irecv, got, group=place.group, group_peer=before),
        ]
    )
    for work in works:
        work.wait()
    return _same(got, place.filled(before, size, dtype))


def _same(arrived: Tensor, expected: Tensor | int) -> bool:
    return isinstance(expected, Tensor) and bool(torch.equal(arrived, expected))


CHECKS: dict[str, Callable[[Member, int, torch.dtype], bool]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "send and receive": _send_and_receive,
}
