"""Pipeline stages: the layers of each, and the stages of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from fourfold.config import Config
from fourfold.config.rules import V_SCHEDULES

Work = tuple[int, int]  # a stage and a micro-batch


def layers_of_stages(num_layers: int, stages: int, given: list[int] | None = None) -> list[range]:
    """The layers of each stage: as given, or as even as possible with the longer ones inside."""
    if given is None:
        short, longer = divmod(num_layers, stages)
        given = [short] * stages
        # The middle first, then outwards: the ends also hold the embedding and the head.
        middle_first = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))
        for stage in middle_first[:longer]:
            given[stage] += 1
    assert len(given) == stages and sum(given) == num_layers
    return [range(start, stop) for start, stop in pairwise(accumulate(given, initial=0))]


def stages_of_rank(pp_rank: int, pp: int, schedule: str, per_rank: int) -> list[int]:
    """The stages of a rank: round-robin, or V-shaped, where the second half runs backwards."""
    if schedule in V_SCHEDULES:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + turn * pp for turn in range(per_rank)]


def forward_rounds(rank_of_stage: Sequence[int], micro_batches: int) -> list[list[Work]]:
    """The order in which all ranks run a forward-only pass: round by round, what is done in each.

    In a round a rank runs one of its stages on one micro-batch, a late stage before an early one.
    The outputs of a round are sent at its end, in the order of the stages. So all messages have one
    order that every rank keeps to, and no deadlock is possible, even where a send only ends when it
    is received.
    """
    stages = len(rank_of_stage)
    done = [0] * stages  # micro-batches that each stage has run
    rounds: list[list[Work]] = []
    while done[-1] < micro_batches:
        ready = [micro_batches, *done[:-1]]  # what each stage has been given
        chosen: dict[int, Work] = {}
        for stage in reversed(range(stages)):
            if done[stage] < ready[stage]:
                chosen.setdefault(rank_of_stage[stage], (stage, done[stage]))
        for stage, _ in chosen.values():
            done[stage] += 1
        rounds.append(sorted(chosen.values()))
    return rounds


def count_stages(config: Config) -> int:
    distributed = config.Distributed
    return distributed.pp_degree * (
        distributed.virtual_pp_degree if distributed.pp_degree > 1 else 1
    )


def stages_here(config: Config, pp_rank: int) -> dict[int, range]:
    """The stages of a pipeline rank, in order, with the layers of each."""
    distributed, stages = config.Distributed, count_stages(config)
    layers = layers_of_stages(config.Model.num_layers, stages, distributed.pp_layers)
    if stages == 1:
        return {0: layers[0]}
    pp = distributed.pp_degree
    numbers = stages_of_rank(pp_rank, pp, distributed.pp_schedule, stages // pp)
    return {number: layers[number] for number in numbers}
