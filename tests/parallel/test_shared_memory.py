"""Collectives through shared memory: torch's results, and what happens when a rank is lost."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch.distributed import ProcessGroup

from fourfold.errors import RunError
from fourfold.parallel import shared_memory
from fourfold.parallel.shared_memory import all_gather, all_reduce, reduce_scatter, summed

# Less than a message, and several messages with a rest.
SIZES = (1, 7, 1000, 2 * shared_memory.HALF_BYTES // 4 + 3)


def world(rank: int, size: int, timeout_seconds: float = 60.0) -> ProcessGroup:
    store = dist.FileStore(os.environ["FOURFOLD_STORE"], size)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.parametrize("size", [2, 3])
def test_results_are_those_of_torch_and_alike_on_all_ranks(size: int) -> None:
    def work(rank: int) -> bool:
        group = world(rank, size)
        torch.manual_seed(rank)
        for numel in SIZES:
            own = torch.randint(-99, 99, (numel,)).float()
            theirs, ours = own.clone(), own.clone()
            dist.all_reduce(theirs)
            all_reduce(ours, group)
            assert torch.equal(ours, theirs) and torch.equal(summed(own, group), theirs)
            theirs, ours = own.clone(), own.clone()
            dist.all_reduce(theirs, dist.ReduceOp.MAX)
            all_reduce(ours, group, dist.ReduceOp.MAX)
            assert torch.equal(ours, theirs)
            theirs, ours = torch.empty(numel * size), torch.empty(numel * size)
            dist.all_gather_single(theirs, own)
            all_gather(ours, own, group)
            assert torch.equal(ours, theirs)
            part, expected = torch.empty(numel), torch.empty(numel)
            whole = torch.randint(-99, 99, (numel * size,)).float()
            dist.reduce_scatter_single(expected, whole)
            reduce_scatter(part, whole, group)
            assert torch.equal(part, expected)
        # Sums that depend on their order have the same bits on all ranks.
        found = summed(torch.randn(5000).bfloat16(), group)
        first = found.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, found)
        return shared_memory.neighbours(own, group) is not None

    assert all(on_ranks(size, work))


def test_a_tensor_in_any_order_is_summed_element_by_element() -> None:
    def work(rank: int) -> bool:
        group = world(rank, 2)
        x = torch.arange(12.0).view(3, 4).t() * (rank + 1)
        total = summed(x, group)
        return torch.equal(total, torch.arange(12.0).view(3, 4).t() * 3)

    assert on_ranks(2, work) == [True, True]


def test_ranks_that_cannot_connect_go_through_torch() -> None:
    def work(rank: int) -> bool:
        group = world(rank, 2)
        if rank == 1:
            shared_memory._address = lambda name: b"\0nobody-" + os.urandom(8)  # type: ignore[assignment]
            shared_memory.CONNECT_SECONDS = 0.2
        x = torch.ones(3)
        all_reduce(x, group)
        return torch.equal(x, torch.full((3,), 2.0)) and (
            shared_memory.neighbours(x, group) is None
        )

    shared_memory.CONNECT_SECONDS, before = 0.2, shared_memory.CONNECT_SECONDS
    try:
        assert on_ranks(2, work) == [True, True]
    finally:
        shared_memory.CONNECT_SECONDS = before


@pytest.mark.parametrize(
    ("leaves", "said"),
    [(True, "connection closed by rank 1"), (False, "timed out waiting for rank 1")],
    ids=["ended", "late"],
)
def test_a_lost_rank_is_named(leaves: bool, said: str) -> None:
    def work(rank: int) -> str:
        group = world(rank, 2, timeout_seconds=60.0 if leaves else 1.0)
        x = torch.ones(3)
        all_reduce(x, group)
        if rank == 1:
            if not leaves:
                time.sleep(2.5)
            return "gone"
        try:
            all_reduce(x, group)
        except RunError as error:
            return str(error)
        return "nothing"

    assert said in on_ranks(2, work)[0]
