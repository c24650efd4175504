"""Collectives through shared memory, for ranks of a group that are processes of one machine.

On a CPU gloo sends everything through sockets, even to the process next door: the kernel copies it
twice, and an all-reduce of 4 MB takes as long as a matrix product. Here each rank has a piece of
memory (`memfd_create`) that the others of its group have mapped; what it has to say it copies
there, all meet, and each takes what it needs.

    all_reduce, summed, all_gather, reduce_scatter    as in torch.distributed, or by it: on a GPU,
                                                      and where ranks are on several machines

Each rank's memory has two halves, used in turns: whoever writes into a half again has met the
others since, so they have read what was there. Ranks meet by a byte on a Unix socket, which also
tells of a rank that died. Neither memory nor sockets have a name in any file system, so nothing is
left of a process that is killed.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fourfold.comm_timer import timed_comm
from fourfold.errors import RunError

# Of one rank, for one meeting. Twice this for every rank of a group stays in the caches.
HALF_BYTES = 4 << 20
# Processes that see each other's sockets are on one machine, so they answer at once.
CONNECT_SECONDS = 10.0
ADDRESS_BYTES = 16

Operation = Callable[..., Tensor]
OPERATIONS: dict[ReduceOp.RedOpType, Operation] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
}


def all_reduce(x: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
    """Reduce `x`, which is contiguous, over the group in place; the same bits on all its ranks."""
    with timed_comm():
        if (near := neighbours(x, group)) is None:
            dist.all_reduce(x, op, group=group)
        else:
            near.all_reduce(x.view(-1), x.view(-1), OPERATIONS[op])


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the group as a new tensor, contiguous: gloo mixes up the elements of others."""
    with timed_comm():
        if (near := neighbours(x, group)) is None:
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
        else:
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            near.all_reduce(x.contiguous().view(-1), total.view(-1), torch.add)
    return total


def all_gather(whole: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Every rank's `own` one after the other into `whole`, of which `own` may be a part."""
    with timed_comm():
        if (near := neighbours(own, group)) is None:
            dist.all_gather_single(whole, own, group=group)
        else:
            near.all_gather(whole.view(-1), own.view(-1))


def reduce_scatter(own: Tensor, whole: Tensor, group: ProcessGroup) -> None:
    """This rank's part of the sum of `whole` over the ranks of the group into `own`."""
    with timed_comm():
        if (near := neighbours(whole, group)) is None:
            dist.reduce_scatter_single(own, whole, group=group)
        else:
            near.reduce_scatter(own.view(-1), whole.view(-1))


# -- the ranks of a group next to each other ------------------------------------------------------


class Neighbours:
    """A group of processes on this machine, as one of them sees it."""

    def __init__(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        memories: list[mmap.mmap],
        names: list[int],
        timeout_seconds: float,
    ) -> None:
        """`sockets` to the others, by their rank in the group; `names` are the ranks in the job."""
        self.rank = rank
        self.size = len(memories)
        self.sockets = sockets
        self.memories = memories
        self.names = names
        self.timeout_seconds = timeout_seconds
        self.half = 0
        for connection in sockets.values():
            connection.settimeout(timeout_seconds)

    def all_reduce(self, x: Tensor, into: Tensor, operation: Operation) -> None:
        if self.size == 2:
            # Both add the same two numbers.
            for piece, result in zip(self._pieces(x), self._pieces(into)):
                operation(piece, self._say(piece)[1 - self.rank], out=result)
            return
        for piece, result in zip(self._pieces(x), self._pieces(into)):
            said = [each.tensor_split(self.size) for each in self._say(piece)]
            parts = result.tensor_split(self.size)
            _reduce([each[self.rank] for each in said], parts[self.rank], operation)
            for part, told in zip(parts, self._say(parts[self.rank], [len(p) for p in parts])):
                part.copy_(told)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        into = [list(self._pieces(part)) for part in whole.chunk(self.size)]
        for number, piece in enumerate(self._pieces(own)):
            for parts, said in zip(into, self._say(piece)):
                if parts[number].data_ptr() != piece.data_ptr():
                    parts[number].copy_(said)

    def reduce_scatter(self, own: Tensor, whole: Tensor) -> None:
        columns = whole.view(self.size, -1)
        wide = max(1, HALF_BYTES // (whole.itemsize * self.size))
        for start in range(0, columns.shape[1], wide):
            mine = columns[:, start : start + wide]
            said = [each.view_as(mine)[self.rank] for each in self._say(mine)]
            _reduce(said, own[start : start + wide], torch.add)

    def _pieces(self, x: Tensor) -> Iterator[Tensor]:
        """As much as can be said at once."""
        return iter(x.split(HALF_BYTES // x.itemsize))

    def _say(self, x: Tensor, sizes: list[int] | None = None) -> list[Tensor]:
        """What all ranks say here, flat, of the same size or of `sizes`; of use until the next
        time."""
        sizes = sizes or [x.numel()] * self.size
        start, self.half = self.half * HALF_BYTES, 1 - self.half
        said = [
            torch.frombuffer(memory, dtype=x.dtype, count=size, offset=start)
            if size
            else x.new_empty(0)
            for memory, size in zip(self.memories, sizes)
        ]
        said[self.rank].view_as(x).copy_(x)
        self._meet()
        return said

    def _meet(self) -> None:
        """Return when every rank is here."""
        for peer, connection in self.sockets.items():
            try:
                connection.send(b"+")
            except OSError as error:
                raise self._lost(peer) from error
        for peer, connection in self.sockets.items():
            try:
                answer = connection.recv(1)
            except TimeoutError as error:
                raise RunError(
                    f"rank {self.names[self.rank]} timed out waiting for rank {self.names[peer]}: "
                    f"it did not come to the same collective within {self.timeout_seconds:g} s"
                ) from error
            except OSError as error:
                raise self._lost(peer) from error
            if not answer:
                raise self._lost(peer)

    def _lost(self, peer: int) -> RunError:
        return RunError(
            f"rank {self.names[self.rank]}: connection closed by rank {self.names[peer]}, which "
            "has ended or was killed"
        )


def _reduce(given: list[Tensor], into: Tensor, operation: Operation) -> None:
    """In the order of the ranks, whoever does it."""
    if len(given) == 1:
        into.copy_(given[0])
        return
    operation(given[0], given[1], out=into)
    for other in given[2:]:
        operation(into, other, out=into)


# -- who is near ----------------------------------------------------------------------------------

_known: WeakKeyDictionary[ProcessGroup, Neighbours | None] = WeakKeyDictionary()


def neighbours(x: Tensor, group: ProcessGroup) -> Neighbours | None:
    """The group's ranks if all are on this machine; at its first message a collective."""
    if not x.is_cpu:
        return None
    if group not in _known:
        _known[group] = _connect(group) if dist.get_backend(group) == "gloo" else None
    return _known[group]


def _connect(group: ProcessGroup) -> Neighbours | None:
    """Every rank listens at an address of its own, and calls those before it.

    Whatever keeps any of them from it, all do without.
    """
    own = secrets.token_bytes(ADDRESS_BYTES)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        try:
            listener.bind(_address(own))
            listener.listen(group.size())
            listener.settimeout(CONNECT_SECONDS)
        except OSError:
            own = bytes(ADDRESS_BYTES)
        addresses = torch.empty(group.size(), ADDRESS_BYTES, dtype=torch.uint8)
        said = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        dist.all_gather(list(addresses.unbind()), said, group=group)
        called = _called(group.rank(), [bytes(row.numpy()) for row in addresses])
        # Nobody waits for a call that another machine cannot make.
        if _all_agree(called is not None, group):
            assert called is not None
            try:
                found = _introduced(group, listener, called)
            except OSError:
                found = None
            if _all_agree(found is not None, group):
                return found
    return None


def _all_agree(yes: bool, group: ProcessGroup) -> bool:
    agreed = torch.tensor([yes], dtype=torch.uint8)
    dist.all_reduce(agreed, ReduceOp.MIN, group=group)
    return bool(agreed.item())


def _called(rank: int, addresses: list[bytes]) -> dict[int, socket.socket] | None:
    """Connections to the ranks before this one, which need not answer yet; None if one fails."""
    sockets = dict[int, socket.socket]()
    try:
        for peer in range(rank):
            sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer].settimeout(CONNECT_SECONDS)
            sockets[peer].connect(_address(addresses[peer]))
            sockets[peer].sendall(rank.to_bytes(4, "little"))
    except OSError:
        for connection in sockets.values():
            connection.close()
        return None
    return sockets


def _introduced(
    group: ProcessGroup, listener: socket.socket, sockets: dict[int, socket.socket]
) -> Neighbours:
    rank = group.rank()
    for _ in range(rank + 1, group.size()):
        answered, _ = listener.accept()
        answered.settimeout(CONNECT_SECONDS)
        sockets[int.from_bytes(answered.recv(4, socket.MSG_WAITALL), "little")] = answered
    memories = _exchanged_memories(rank, dict(sorted(sockets.items())))
    names = dist.get_process_group_ranks(group)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return Neighbours(rank, sockets, memories, names, timeout.total_seconds())


def _exchanged_memories(rank: int, sockets: dict[int, socket.socket]) -> list[mmap.mmap]:
    """Every rank's memory, by rank."""
    own = os.memfd_create("fourfold")
    try:
        os.ftruncate(own, 2 * HALF_BYTES)
        for connection in sockets.values():
            socket.send_fds(connection, [b"+"], [own])
        memories = {rank: mmap.mmap(own, 2 * HALF_BYTES)}
    finally:
        os.close(own)
    for peer, connection in sockets.items():
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if len(descriptors) != 1:
            raise ConnectionError(f"rank {peer} sent no memory")
        memories[peer] = mmap.mmap(descriptors[0], 2 * HALF_BYTES)
        os.close(descriptors[0])
    return [memories[each] for each in sorted(memories)]


def _address(name: bytes) -> bytes:
    """In the abstract namespace, which needs no file."""
    return b"\0fourfold-" + name.hex().encode()
