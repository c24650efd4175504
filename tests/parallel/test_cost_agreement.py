"""One price: every command names the same numbers, and they are what a rank really holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.layout_table import CASES, SCHEDULES, Case
from helpers.rank_tensors import counted_ranks
from helpers.traces import Workshop
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineSchedule,
    get_schedule_class,
)

from fourfold.cost.memory import memory_of, micro_batches_in_flight, stage_parameters
from fourfold.cost.rank_memory import rank_memory
from fourfold.cost.workload import Spread, spread_of, workload_of
from fourfold.model import ModelShape, count_parameters
from fourfold.plan.cluster import parse_cluster
from fourfold.plan.dry_run import dry_run, orders_of
from fourfold.plan.machine import load_coefficients
from fourfold.plan.planner import candidate_of

# -- micro-batches in flight ----------------------------------------------------------------------

FREES = {_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT}


class Stage:
    """As much of torch's stage as its schedules ask for to lay out what every rank does."""

    def __init__(self, index: int, pp: int, stages: int) -> None:
        self.stage_index, self.group_size, self.num_stages, self.group_rank = index, pp, stages, 0
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.device, self.submod = torch.device("cpu"), torch.nn.Identity()
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.group = None


def laid_out(name: str, pp: int, virtual: int, micro_batches: int) -> _PipelineSchedule:
    kind: Any = get_schedule_class(name)
    stages = [Stage(turn * pp, pp, pp * virtual) for turn in range(virtual)]
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(given, n_microbatches=micro_batches, loss_fn=lambda loss, _: loss)


def most_held(order: list[_Action]) -> int:
    """Of what a rank's stages have run forward and not yet backward, each stage by itself."""
    held: set[tuple[int, int | None]] = set()
    most = 0
    for action in order:
        work = (action.stage_index, action.microbatch_index)
        if action.computation_type == _ComputationType.FORWARD:
            held.add(work)
        most = max(most, len(held))
        if action.computation_type in FREES:
            held.discard(work)
    return most


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1F1B", 1), ("Interleaved1F1B", 3), *SCHEDULES.values()]
)
def test_micro_batches_in_flight_are_those_the_schedule_holds(schedule: str, virtual: int) -> None:
    met = 0
    for pp, micro_batches in itertools.product((2, 3, 4, 8), (1, 2, 4, 6, 8, 12, 16, 24)):
        try:
            orders = orders_of(laid_out(schedule, pp, virtual, micro_batches))
        except ValueError:
            continue  # a number of micro-batches the schedule cannot run
        spread = Spread(pp=pp, virtual=virtual, schedule=schedule, micro_batches=micro_batches)
        for rank in range(pp):
            counted = most_held(orders[rank]) / virtual
            assert micro_batches_in_flight(spread, rank) == counted, (pp, micro_batches, rank)
        met += 1
    assert met > 8


# -- commands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("priced"))


QUICK = {"dp2", "pp2 mp2 sp", "pp2 interleaved", "pp2 zbv", "sh2 stage3", "dp2 pp2 mp2"}
CLUSTER = "1x8xA100-80G"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
        if case.dtype != "float64"
    ],
)
def test_every_command_names_the_same_price(case: Case, workshop: Workshop) -> None:
    config = workshop.config(case.world, "priced", [*case.overrides(), "Global.device=cpu"])
    shares = rank_memory(config)  # `fourfold layout`, and the banner of a run
    assert shares == counted_ranks(config)
    assert sum(share.counted for share in shares) == count_parameters(ModelShape.of(config.Model))
    workload, spread = workload_of(config, on_cpu=True), spread_of(config)
    planned = candidate_of(workload, spread, parse_cluster(CLUSTER), load_coefficients())
    for share in {(share.first_layer, share.layers): share for share in shares}.values():
        ran = dry_run(config, share.rank)
        place = ran.layout.coordinates(share.rank)
        network, software = workload.network, workload.software
        price = memory_of(network, spread, software, place["pp"])
        assert share.activation_bytes == int(price["activations"] + price["logits"])
        if place["pp"] == planned.fullest_stage:
            assert float(planned.memory.total) == float(price.total)
        assert ran.parameters == int(stage_parameters(network, spread, place["pp"], place["mp"]))
        assert (ran.share.state_bytes, ran.kept) == (share.state_bytes, share.parameters)
