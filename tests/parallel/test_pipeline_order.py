"""Evaluation and generation through a pipeline: no order of messages may lock the ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layout_runs import Runs
from helpers.layout_table import SCHEDULES
from torch import Tensor

from fourfold.engine import Engine
from fourfold.parallel.stages import forward_rounds, stages_of_rank

slow = pytest.mark.slow


def ranks_of(schedule: str, pp: int) -> list[int]:
    """The rank of each stage."""
    name, per_rank = SCHEDULES.get(schedule, ("1F1B", 1))
    owner = {
        stage: rank for rank in range(pp) for stage in stages_of_rank(rank, pp, name, per_rank)
    }
    return [owner[stage] for stage in range(pp * per_rank)]


@pytest.mark.parametrize("schedule", ["1f1b", *SCHEDULES])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 1), (2, 7), (4, 3), (4, 8), (8, 32)])
def test_all_is_done_once_and_in_order(schedule: str, pp: int, micro_batches: int) -> None:
    owner = ranks_of(schedule, pp)
    rounds = forward_rounds(owner, micro_batches)
    when = {work: number for number, doing in enumerate(rounds) for work in doing}
    assert len(when) == sum(map(len, rounds)) == len(owner) * micro_batches
    for micro in range(micro_batches):
        assert all(when[s, micro] < when[t, micro] for s, t in pairwise(range(len(owner))))
    for doing in rounds:
        assert len({owner[stage] for stage, _ in doing}) == len(doing), "one thing at a time"
    # Ranks are idle while the pipeline fills and drains, and next to never in between.
    chunks = len(owner) // pp
    assert len(rounds) <= chunks * micro_batches + 2 * len(owner)


def send_and_wait(engine: Engine) -> None:
    """Let a message end only when it has been received, as one too large for nccl's buffers does.

    All messages of two ranks, to and fro, take their turns, as on one communicator of nccl's.
    """
    send, receive, acknowledged = dist.send, dist.recv, torch.zeros(1)

    class Done:
        def wait(self) -> bool:
            return True

    def blocking_send(message: Tensor, group: Any, group_dst: int) -> Done:
        send(message, group=group, group_dst=group_dst)
        receive(acknowledged, group=group, group_src=group_dst)
        return Done()

    def blocking_receive(message: Tensor, group: Any, group_src: int) -> Done:
        receive(message, group=group, group_src=group_src)
        send(acknowledged, group=group, group_dst=group_src)
        return Done()

    dist.isend, dist.irecv = blocking_send, blocking_receive  # type: ignore[assignment]
    dist.recv = blocking_receive  # type: ignore[assignment]


@pytest.mark.parametrize(
    "layout",
    [
        "pp2",
        "pp2 interleaved",
        "pp2 zbv",
        pytest.param("pp2 gpipe", marks=slow),
        pytest.param("pp2 bfs", marks=slow),
        pytest.param("pp2 izb", marks=slow),
        pytest.param("pp2 dualpipe", marks=slow),
        pytest.param("pp4", marks=slow),
        pytest.param("pp4 interleaved", marks=slow),
        pytest.param("pp4 zbv", marks=slow),
        pytest.param("pp2 interleaved sh2 stage3", marks=slow),
    ],
)
def test_messages_that_wait_to_be_received_do_not_lock_an_evaluation(
    layout: str, runs: Runs
) -> None:
    def evaluate(prepare: Callable[[Engine], None]) -> Callable[[Engine], float]:
        def work(engine: Engine) -> float:
            prepare(engine)
            share = float(engine.runner.evaluate(engine.data.loaders["valid"].batch(0)))
            engine.data.close()
            return engine.mesh.all_reduce(share)[0]

        return work

    settings = ("Model.num_layers=8", "Distributed.timeout_seconds=60")
    settings = (*settings, "Data.batch_size.micro_batch_size=1")
    (expected,) = runs.on_ranks("one", "one", evaluate(lambda engine: None), *settings)
    for found in runs.on_ranks(layout, "pipeline", evaluate(send_and_wait), *settings):
        assert found == pytest.approx(expected, rel=1e-6)
