"""Ranks as threads, and tensors cut into rectangles in every possible way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from fourfold import checkpoint
from fourfold.checkpoint import RankGroup, Shard
from fourfold.shards import Box
from helpers.checkpoint_samples import Tensors


def rank_groups(
    size: int, session: str = "a session", timeout_seconds: float = 20.0
) -> list[RankGroup]:
    """The views of `size` threads, with an `agree` that fails rather than hangs."""
    barrier = threading.Barrier(size, timeout=20.0)
    said: list[Any] = [None] * size

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(word: Any) -> list[Any]:
            said[rank] = word
            barrier.wait()
            heard = list(said)
            barrier.wait()
            return heard

        return gather

    def group_of(rank: int) -> RankGroup:
        gather = gather_of(rank)

        def agree(text: str | None) -> str | None:
            return next((word for word in gather(text) if word is not None), None)

        return RankGroup(rank, size, session, agree, timeout_seconds, gather)

    return [group_of(rank) for rank in range(size)]


def on_all(together: list[RankGroup], work: Callable[[RankGroup], object]) -> list[Any]:
    """What `work` returns, or raises, on each rank."""
    results: list[Any] = [None] * len(together)

    def run(ranks: RankGroup) -> None:
        try:
            results[ranks.rank] = work(ranks)
        except BaseException as error:
            results[ranks.rank] = error

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def rows_of(tensors: Tensors, ranks: RankGroup) -> dict[str, torch.Tensor | Shard]:
    """An even cut along the first dimension; what has none is the last rank's."""
    pieces: dict[str, torch.Tensor | Shard] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            if ranks.rank == ranks.size - 1:
                pieces[name] = tensor
            continue
        first, last = (len(tensor) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        offsets = (first,) + (0,) * (tensor.dim() - 1)
        pieces[name] = Shard(tensor[first:last], tuple(tensor.shape), offsets)
    return pieces


def save_rows(
    output_dir: Path, step: int, tensors: Tensors, state: dict[str, Any], size: int, **options: Any
) -> list[Any]:
    """What `save` gives on each of `size` ranks."""
    return on_all(
        rank_groups(size, **options),
        lambda ranks: checkpoint.save(
            output_dir, step, rows_of(tensors, ranks), state, ranks=ranks
        ),
    )


def cut(tensor: torch.Tensor, box: Box) -> Shard:
    index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))
    return Shard(tensor[index], tuple(tensor.shape), box.offsets)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], most: int) -> list[Box]:
    """Up to `most` boxes that tile `shape`, some perhaps empty, by cutting one in two at a time."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most - 1)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        for start, stop in ((0, at), (at, box.shape[axis])):
            offsets, sizes = list(box.offsets), list(box.shape)
            offsets[axis] += start
            sizes[axis] = stop - start
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


@st.composite
def dealt(
    draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]], ranks: int
) -> list[dict[str, Box]]:
    """Every tensor tiled, its pieces given to different ranks: for each rank, name -> box."""
    hands: list[dict[str, Box]] = [{} for _ in range(ranks)]
    for name, shape in shapes.items():
        boxes = draw(tilings(shape, ranks))
        order = draw(st.permutations(range(ranks)))
        for rank, box in zip(order, boxes, strict=False):
            hands[rank][name] = box
    return hands
