"""Muon between ranks: rectangles of any cut are gathered, orthogonalised whole and returned."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn

from fourfold.optim import muon
from fourfold.optim.muon import Exchange, Muon, MuonOptions, rounds_of
from fourfold.shards import Box, Shard

SIZE = 4
SHAPES = {"rows": (10, 6), "columns": (6, 8), "shared": (4, 12), "copies": (6, 6), "odd": (9, 4)}


def rows(total: int, width: int, starts: list[int]) -> list[Box]:
    return [
        Box((start, 0), (stop - start, width)) for start, stop in zip(starts, [*starts[1:], total])
    ]


BOXES = {
    # Uneven rows; columns; two ranks with the same half each, as keys and values have it that are
    # fewer than the ranks; a copy on every rank; and a rank that is left nothing.
    "rows": rows(10, 6, [0, 3, 6, 9]),
    "columns": [Box((0, 2 * rank), (6, 2)) for rank in range(SIZE)],
    "shared": [Box((2 * (rank // 2), 0), (2, 12)) for rank in range(SIZE)],
    "copies": [Box((0, 0), (6, 6))] * SIZE,
    "odd": rows(9, 4, [0, 3, 6, 9]),
}


def whole(name: str, step: int) -> torch.Tensor:
    seed = sum(map(ord, name)) + 1000 * step
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[box.within(Box((0, 0), tuple(tensor.shape)))].clone()


def stepped(muon_: Muon, boxes: dict[str, Box]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for step in (1, 2, 3):
            for name, shard in muon_.matrices.items():
                shard.tensor.grad = part(whole(name, step), boxes[name])
            muon_.update(0.1, 2.0, None)
    return {name: shard.local.clone() for name, shard in muon_.matrices.items()}


def shards_of(boxes: dict[str, Box]) -> dict[str, Shard]:
    return {
        name: Shard(nn.Parameter(part(whole(name, 0), box)), SHAPES[name], box.offsets, name)
        for name, box in boxes.items()
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 10**6])
def test_every_rank_gets_its_rectangle_of_the_whole_update(
    dtype: torch.dtype | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds of one matrix a rank, or of all."""
    monkeypatch.setattr(muon, "ROUND_NUMEL", at_once)
    options = MuonOptions(iterates_in=dtype, adjust_lr_fn="match_rms_adamw")
    everything = {name: Box((0, 0), shape) for name, shape in SHAPES.items()}
    alone = stepped(Muon(shards_of(everything), options), everything)

    def work(rank: int) -> dict[str, list[list[float]]]:
        store = dist.FileStore(os.environ["FOURFOLD_STORE"], SIZE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
        boxes = {name: own[rank] for name, own in BOXES.items()}
        shards = shards_of(boxes)
        exchange = Exchange(shards, BOXES, rank, SIZE, None)
        updated = stepped(Muon(shards, options, exchange=exchange), boxes)
        dist.barrier()
        dist.destroy_process_group()
        return {name: tensor.tolist() for name, tensor in updated.items()}

    for rank, told in enumerate(on_ranks(SIZE, work)):
        for name, values in told.items():
            expected = part(alone[name], BOXES[name][rank])
            assert torch.equal(torch.tensor(values).view(expected.shape), expected), (name, rank)


def test_owners_take_turns_and_every_matrix_has_one() -> None:
    shapes = {f"{number}.{kind}": (8, wide) for number in range(6) for kind, wide in
              (("a", 8), ("b", 32))}  # fmt: skip
    rounds = list(rounds_of(shapes, 4))
    owned = [owner for one in rounds for owner in one.owners.values()]
    assert sorted(key for one in rounds for key in one.owners) == sorted(shapes)
    assert [owned.count(rank) for rank in range(4)] == [3, 3, 3, 3]
