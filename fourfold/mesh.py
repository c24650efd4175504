"""Where this process stands: the layout, its place on each axis, and the groups it talks to.

The rank order is the documents': data outermost, then pipeline, sharding, and model innermost.
A run of one process has a mesh too, whose groups are all None and whose sums are what was given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from fourfold.errors import UserError
from fourfold.waiting import communicating

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
        """How many ways the global batch is cut: data and sharding ranks read different samples."""
        return self.dp * self.sharding

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
    return _environment_int("WORLD_SIZE", 1)


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"the environment variable {name}={text!r} is not a whole number; unset it or "
            "start through a launcher that sets it"
        ) from None


def select_device(wanted: str) -> torch.device:
    """`auto` takes a GPU when there is one; `gpu` and `cuda` insist on it."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"Global.device={wanted} but this machine has no usable GPU; "
            "set Global.device to auto or cpu"
        )
    device = torch.device("cuda", _environment_int("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device


def connect(layout: Layout, device: torch.device, timeout_seconds: float = 600.0) -> Mesh:
    """Join the other processes of the run; `Mesh.close` leaves them again."""
    rank = _environment_int("RANK", 0)
    if layout.world_size == 1:
        return Mesh(layout)
    # The host's own messages go through gloo; a GPU's tensors through nccl.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=_store(layout.world_size, timeout_seconds),
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    _check_alike(layout)
    return Mesh(layout, rank, device.type)


def _check_alike(layout: Layout) -> None:
    """Refuse ranks of different layouts, which would wait for each other in different groups."""
    mine = torch.tensor(astuple(layout))
    theirs = [torch.empty_like(mine) for _ in range(layout.world_size)]
    dist.all_gather(theirs, mine)
    others = {rank: Layout(*row.tolist()) for rank, row in enumerate(theirs)}
    if odd := [rank for rank, other in others.items() if other != others[0]]:
        dist.destroy_process_group()
        raise UserError(
            f"rank {odd[0]} has the layout {others[odd[0]]} and rank 0 has {others[0]}; give every "
            "machine the same configuration and, where the layout is chosen, the same cluster.yaml"
        )


@contextmanager
def fake_mesh(layout: Layout, rank: int) -> Iterator[Mesh]:
    """One rank of a layout that does not run: its groups are there, what is sent goes nowhere."""
    if layout.world_size == 1:
        yield Mesh(layout)
        return
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        yield Mesh(layout, rank)
    finally:
        dist.destroy_process_group()


def _store(size: int, timeout_seconds: float) -> Store:
    """Where the processes meet: a file of our own launcher, else the launcher's address.

    A process that is started again must not find the addresses of its predecessors, so each
    attempt has a space of its own.
    """
    if path := os.environ.get("FOURFOLD_STORE"):
        return FileStore(path, size)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"WORLD_SIZE={size} is set but {name} is not; start through fourfold train "
                "--nproc, torchrun or srun, which set both"
            )
    timeout = timedelta(seconds=timeout_seconds)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"fourfold/attempt{attempt}", store)


class Mesh:
    """This process among the others: places, groups, and the few things all must agree on."""

    def __init__(self, layout: Layout, rank: int = 0, device_type: str = "cpu") -> None:
        self.layout = layout
        self.rank = rank
        self.place = layout.coordinates(rank)
        self.device_mesh: DeviceMesh | None = None
        self.ends_group: ProcessGroup | None = None
        if layout.world_size > 1:
            self.device_mesh = init_device_mesh(device_type, layout.degrees, mesh_dim_names=AXES)
        if layout.pp > 1:
            self.ends_group = self._join_ends()

    @property
    def size(self) -> int:
        return self.layout.world_size

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch is this rank's."""
        return self.place["dp"] * self.layout.sharding + self.place["sharding"]

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

    def _join_ends(self) -> ProcessGroup | None:
        """The first and the last pipeline rank of this rank's column, if it is one of them.

        Every process takes part in the making of every group, in the same order.
        """
        own = None
        last = (self.layout.pp - 1) * self.layout.sharding * self.layout.mp
        for first in range(self.size):
            if self.layout.coordinates(first)["pp"] == 0:
                pair = [first, first + last]
                group = dist.new_group(pair)
                own = group if self.rank in pair else own
        return own

    # -- what all ranks must see alike ------------------------------------------------------

    def total(self, *values: float) -> list[float]:
        """Each value summed over all ranks, to the same bits on every one of them."""
        if self.size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        with communicating():
            dist.all_reduce(summed)
        return summed.tolist()

    def everyone(self, *values: float) -> list[list[float]]:
        """The values of every rank, by rank."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        gathered = torch.empty(self.size, len(values), dtype=torch.float64)
        dist.all_gather(list(gathered.unbind()), own)
        return gathered.tolist()

    def agree(self, text: str | None) -> str | None:
        """The text of the first rank that gives one, on every rank, or None if none does.

        Plain bytes travel, nothing is unpickled.
        """
        if self.size == 1:
            return text
        own = b"" if text is None else b"+" + text.encode()
        lengths = [int(row[0]) for row in self.everyone(len(own))]
        speaker = next((rank for rank, length in enumerate(lengths) if length > 0), None)
        if speaker is None:
            return None
        message = torch.zeros(lengths[speaker], dtype=torch.uint8)
        if speaker == self.rank:
            message.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        dist.broadcast(message, src=speaker)
        return bytes(message.tolist())[1:].decode()

    def gather(self, text: str) -> list[str]:
        """The text of every rank, by rank. Plain bytes travel, nothing is unpickled."""
        if self.size == 1:
            return [text]
        own = text.encode()
        lengths = [int(row[0]) for row in self.everyone(len(own))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
        rows = torch.empty(self.size, max(lengths), dtype=torch.uint8)
        dist.all_gather(list(rows.unbind()), padded)
        texts = (bytes(row[:length].numpy()) for row, length in zip(rows, lengths))
        return [text.decode() for text in texts]

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; a `UserError` of one of them is raised on all."""
        done: list[T] = []
        problem: UserError | None = None
        try:
            done.append(work())
        except UserError as error:
            problem = error
        told = self.agree(None if problem is None else f"rank {self.rank}: {problem}")
        if told is not None:
            raise problem or UserError(told)
        return done[0]

    def in_turn(self, work: Callable[[], T]) -> T:
        """The same, but on rank 0 before the others, which find what it left on the disk."""
        done: list[T] = []
        for turn in (self.rank == 0, self.rank != 0):
            self.together((lambda: done.append(work())) if turn else (lambda: None))
        return done[0]

    def close(self) -> None:
        """Leave the others. After a failure this is not called: it would wait for the lost."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def sum_over(group: ProcessGroup | None, tensors: Sequence[torch.Tensor]) -> None:
    """Sum each tensor over a group, in place, with one message for all of one type."""
    if group is None:
        return
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        # Flat, also because gloo mixes up the elements of tensors that are not contiguous.
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        with communicating():
            dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in same])
        for tensor, piece in zip(same, pieces):
            tensor.copy_(piece.view_as(tensor))
