"""The device mesh: the layout, this process's place on each axis, and its process groups.

The rank order is the documents': data outermost, then pipeline, sharding, and model innermost.
A run of one process has a mesh too, whose groups are all None and whose sums are its inputs.

Every collective times out after `timeout_seconds`. Where one rank may be busy for longer (it builds
an index, or reads a checkpoint) the ranks first meet through the rendezvous store, and wait for
whoever is missing as long as it makes progress.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fourfold import heartbeat
from fourfold.comm_timer import timed_comm
from fourfold.device import environment_int
from fourfold.errors import UserError
from fourfold.meeting import STORE_FILE, Meetings, open_store
from fourfold.placement import Placement, place_ranks, same_gpu

AXES = ("dp", "pp", "sharding", "mp")
T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The degrees of the four axes. Degree 1 means the axis is off."""

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    mp: int = 1
    stage: int = 1

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        return (self.dp, self.pp, self.sharding, self.mp)

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.sharding * self.mp

    @property
    def data_degree(self) -> int:
        """Into how many parts the global batch is cut: data and sharding ranks read different
        samples."""
        return self.dp * self.sharding

    @property
    def axes(self) -> list[str]:
        """The axes that are on, outermost first."""
        return [axis for axis, degree in zip(AXES, self.degrees) if degree > 1]

    def columns(self, axis: str) -> list[list[int]]:
        """Every set of ranks that differ on `axis` alone."""
        ranks = torch.arange(self.world_size).view(self.degrees)
        rows = ranks.movedim(AXES.index(axis), -1).reshape(-1, self.degrees[AXES.index(axis)])
        return rows.tolist()

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of `rank` on each axis."""
        place = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees)):
            rank, place[axis] = divmod(rank, degree)
        return place

    def __str__(self) -> str:
        parts = [f"{axis}{degree}" for axis, degree in zip(AXES, self.degrees)]
        if self.sharding > 1:
            parts[2] += f"(stage {self.stage})"
        return " x ".join(parts)

    def check(self, running: int) -> None:
        """Refuse a number of processes that is not the layout's."""
        if self.world_size != running:
            raise UserError(
                f"the layout {self} needs {self.world_size} process(es) and {running} "
                f"{'is' if running == 1 else 'are'} running; start it with --nproc "
                f"{self.world_size}, or change the degrees under Distributed"
            )


def world_size() -> int:
    """How many processes the launcher started; torchrun and its like set WORLD_SIZE."""
    return environment_int("WORLD_SIZE", 1)


def _gpu_identity(device: torch.device) -> int:
    """A number for the GPU of this process, the same in every process that uses it; 0 for none."""
    if device.type == "cpu":
        return 0
    return 1 + zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode())


def connect(layout: Layout, device: torch.device, timeout_seconds: float = 600.0) -> Mesh:
    """Join the other processes of the run; `Mesh.close` leaves them again."""
    rank = environment_int("RANK", 0)
    if layout.world_size == 1:
        return Mesh(layout)
    # The host's own messages go through gloo; a GPU's tensors through nccl.
    on_cpu = device.type == "cpu"
    store = open_store(rank, layout.world_size, timeout_seconds)
    placement = None
    if STORE_FILE not in os.environ:  # else all of them are on this machine
        placement = place_ranks(
            PrefixStore("placement", store),
            rank,
            layout.world_size,
            layout.columns("mp"),
            _gpu_identity(device),
        )
    dist.init_process_group(
        "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=None if on_cpu else device,
    )
    if problem := _difference(layout, device):
        dist.destroy_process_group()
        raise UserError(problem)
    meetings = Meetings(store, rank, layout.world_size, timeout_seconds)
    return Mesh(layout, rank, device.type, timeout_seconds, meetings, placement)


def _difference(layout: Layout, device: torch.device) -> str | None:
    """Why these ranks cannot work together, the same on each: different layouts, which would wait
    for each other in different groups, or one GPU for two ranks."""
    mine = torch.tensor([*astuple(layout), _gpu_identity(device)])
    theirs = [torch.empty_like(mine) for _ in range(layout.world_size)]
    dist.all_gather(theirs, mine)
    others = {rank: Layout(*row.tolist()[:-1]) for rank, row in enumerate(theirs)}
    if odd := [rank for rank, other in others.items() if other != others[0]]:
        return (
            f"rank {odd[0]} has the layout {others[odd[0]]} and rank 0 has {others[0]}; give every "
            "machine the same configuration and, where the layout is chosen, the same cluster.yaml"
        )
    return same_gpu([int(row[-1]) for row in theirs])


@contextmanager
def fake_mesh(layout: Layout, rank: int, device_type: str = "cpu") -> Iterator[Mesh]:
    """One rank of a layout that does not run: its groups exist, but nothing is sent."""
    if layout.world_size == 1:
        yield Mesh(layout)
        return
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        yield Mesh(layout, rank, device_type)
    finally:
        dist.destroy_process_group()


class Mesh:
    """This process among the others: coordinates, groups, and the few things all must agree on."""

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        device_type: str = "cpu",
        timeout_seconds: float = 600.0,
        meetings: Meetings | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.coordinates = layout.coordinates(rank)
        self.device_mesh: DeviceMesh | None = None
        self.tied_embedding_group: ProcessGroup | None = None
        self._stage_group: ProcessGroup | None = None
        self._timeout = timedelta(seconds=timeout_seconds)
        self._meetings = meetings
        self.placement = placement
        if layout.world_size > 1:
            self.device_mesh = self._join_axes(device_type)
        if layout.pp > 1:
            self.tied_embedding_group = self._join_tied_embedding()

    def _join_axes(self, device_type: str) -> DeviceMesh:
        """The axes that are on. Torch's `init_device_mesh` would make every group of every axis,
        even those of other ranks and of a single rank, and would not pass on the timeout."""
        axes = self.layout.axes
        if len(axes) == 1:
            return DeviceMesh.from_group(_world(), device_type, mesh_dim_names=(axes[0],))
        groups = [self._join(self.layout.columns(axis)) for axis in axes]
        ranks = torch.arange(self.size).view([self.degree(axis) for axis in axes])
        return DeviceMesh.from_group(
            [group for group in groups if group is not None],
            device_type,
            mesh=ranks,
            mesh_dim_names=tuple(axes),
        )

    def _join(self, columns: list[list[int]]) -> ProcessGroup | None:
        """The group of this rank's column, if it is in one; every process must call this."""
        world = _world()
        if world.bound_device_id is not None:
            backend = world._get_backend(world.bound_device_id)
            if backend.supports_splitting:
                # One call for all columns, in which every process takes part.
                return dist.split_group(split_ranks=columns, timeout=self._timeout)
        own = next((column for column in columns if self.rank in column), None)
        if own is None:
            return None
        return dist.new_group(own, timeout=self._timeout, use_local_synchronization=True)

    @property
    def size(self) -> int:
        return self.layout.world_size

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch is this rank's."""
        return self.coordinates["dp"] * self.layout.sharding + self.coordinates["sharding"]

    def degree(self, axis: str) -> int:
        return self.layout.degrees[AXES.index(axis)]

    def group(self, axis: str) -> ProcessGroup | None:
        """The ranks that differ from this one on `axis` alone; None where the axis is off."""
        if self.device_mesh is None or self.degree(axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    def axis(self, name: str) -> DeviceMesh:
        """One axis, as torch's `parallelize_module` takes it."""
        assert self.device_mesh is not None
        return self.device_mesh[name]

    @cached_property
    def sharding_mesh(self) -> DeviceMesh:
        """The axes that read different samples, as torch's `fully_shard` takes them."""
        assert self.device_mesh is not None
        axes = ("dp", "sharding") if self.layout.dp > 1 else "sharding"
        return self.device_mesh[axes]

    def _join_tied_embedding(self) -> ProcessGroup | None:
        """The first and the last pipeline rank of this rank's column, if it is one of them."""
        if self.layout.pp == 2:
            return self.group("pp")
        return self._join([[column[0], column[-1]] for column in self.layout.columns("pp")])

    def stage_group(self) -> ProcessGroup | None:
        """All ranks of this rank's pipeline stage; None where it is alone. Every process must ask,
        the first time together."""
        axes = [axis for axis in self.layout.axes if axis != "pp"]
        if len(axes) <= 1:
            return self.group(axes[0]) if axes else None
        if self.layout.pp == 1:
            return _world()
        if self._stage_group is None:
            everyone = range(self.size)
            places = {rank: self.layout.coordinates(rank)["pp"] for rank in everyone}
            stages = range(self.layout.pp)
            self._stage_group = self._join(
                [[rank for rank in everyone if places[rank] == stage] for stage in stages]
            )
        return self._stage_group

    # -- what all ranks must see alike ------------------------------------------------------

    def all_reduce(self, *values: float) -> list[float]:
        """All-reduce: each value summed over all ranks, with the same bits on every rank."""
        if self.size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        with timed_comm():
            dist.all_reduce(summed)
        return summed.tolist()

    def all_reduce_(self, values: torch.Tensor) -> None:
        """The same in place, for values on the device, which are not waited for."""
        if self.size > 1:
            with timed_comm():
                dist.all_reduce(values)

    def all_gather(self, *values: float) -> list[list[float]]:
        """The values of every rank, by rank."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        gathered = torch.empty(self.size, len(values), dtype=torch.float64)
        dist.all_gather(list(gathered.unbind()), own)
        return gathered.tolist()

    def _meet(self) -> None:
        """Before a collective that some rank may be late for."""
        if self._meetings is not None:
            self._meetings.meet()

    def broadcast_first(self, text: str | None) -> str | None:
        """The text of the first rank that has one, on every rank, or None if none has.

        Plain bytes travel, nothing is unpickled. The others wait for a busy rank as long as it
        makes progress.
        """
        if self.size == 1:
            return text
        self._meet()
        own = b"" if text is None else b"+" + text.encode()
        lengths = [int(row[0]) for row in self.all_gather(len(own))]
        speaker = next((rank for rank, length in enumerate(lengths) if length > 0), None)
        if speaker is None:
            return None
        message = torch.zeros(lengths[speaker], dtype=torch.uint8)
        if speaker == self.rank:
            message.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        dist.broadcast(message, src=speaker)
        return bytes(message.tolist())[1:].decode()

    def gather(self, text: str) -> list[str]:
        """The text of every rank, by rank; it is sent and waited for as in `broadcast_first`."""
        if self.size == 1:
            return [text]
        self._meet()
        own = text.encode()
        lengths = [int(row[0]) for row in self.all_gather(len(own))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
        rows = torch.empty(self.size, max(lengths), dtype=torch.uint8)
        dist.all_gather(list(rows.unbind()), padded)
        texts = (bytes(row[:length].numpy()) for row, length in zip(rows, lengths))
        return [text.decode() for text in texts]

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; a `UserError` of one of them is raised on all."""
        done: list[T] = []
        problem: UserError | None = None
        try:
            done.append(work())
        except UserError as error:
            problem = error
        told = self.broadcast_first(None if problem is None else f"rank {self.rank}: {problem}")
        if told is not None:
            raise problem or UserError(told)
        return done[0]

    def rank_0_first(self, work: Callable[[], T]) -> T:
        """The same, but on rank 0 before the others, which find what it left on the disk."""
        done: list[T] = []
        for turn in (self.rank == 0, self.rank != 0):
            self.on_all_ranks((lambda: done.append(work())) if turn else (lambda: None))
        return done[0]

    def close(self) -> None:
        """Leave the process group. Not called after a failure: a collective with dead ranks would
        hang."""
        if self.size > 1 and dist.is_initialized():
            heartbeat.relay(None)
            dist.destroy_process_group()


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def sum_over(group: ProcessGroup | None, tensors: Sequence[torch.Tensor]) -> None:
    """All-reduce each tensor over a group, in place, with one message per dtype."""
    if group is None:
        return
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        # Flat, also because gloo mixes up the elements of tensors that are not contiguous.
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        with timed_comm():
            dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in same])
        for tensor, piece in zip(same, pieces):
            tensor.copy_(piece.view_as(tensor))
