"""`fourfold plan --dry-run`: one rank of any layout, built and run by the real code in no memory.

The process group is torch's fake one, of the full size of the world, and the tensors have shapes
but no memory, so a rank of 175 billion parameters takes seconds on a laptop. One micro-batch goes
forward and backward through the parts of the rank, a second one shows what every further one adds,
and the reductions at the end of the step run as they are. Dropout, which neither holds nor sends
anything between ranks, is left out; messages between pipeline stages are counted from their shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineSchedule,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.config import Config
from fourfold.cost.memory import holding_of, stage_parameters
from fourfold.cost.rank_memory import RankMemory, memory_of_rank
from fourfold.cost.traffic import traffic_of
from fourfold.cost.workload import spread_of, workload_of
from fourfold.device import is_cpu
from fourfold.errors import UserError
from fourfold.mesh import AXES, Layout, Mesh
from fourfold.model.gpt import GPT
from fourfold.optim import build_optimizer
from fourfold.parallel import Runner, layout_of
from fourfold.plan.operations import COLLECTIVES, groups_among, in_no_memory
from fourfold.shards import local
from fourfold.terminal import in_bytes

AGREED_NUMBERS = 4  # loss, squared norm, requests to stop and to save, in double precision


@dataclass(frozen=True)
class Holding:
    """Bytes one rank holds when its gradients are whole, before the update."""

    # That are multiplied with; sharded, the fp32 ones are divided and count as masters.
    weights: int
    masters: int
    gradients: int
    moments: int
    ema: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.gradients + self.moments + self.ema


@dataclass(frozen=True)
class DryRun:
    layout: Layout
    share: RankMemory  # by formula
    parameters: int  # of this rank's stages and its slice of them, before sharding divides them
    kept: int  # of these, what sharding leaves it
    holding: Holding
    micro_batches: int
    per_micro_batch: Traffic
    per_step: Traffic  # on top of the micro-batches'
    timeline: Timeline | None

    @property
    def traffic(self) -> Traffic:
        """Of a whole step."""
        return self.per_step.plus(self.per_micro_batch, self.micro_batches)


def dry_run(config: Config, rank: int) -> DryRun:
    """Build rank `rank` of the configured layout and count what it holds and sends."""
    layout = layout_of(config)
    if not 0 <= rank < layout.world_size:
        raise UserError(
            f"--rank {rank}: the layout {layout} has the ranks 0 to {layout.world_size - 1}"
        )
    with in_no_memory(config, rank) as (still, runner, fake):
        return _dry_run(still, runner, fake)


def _dry_run(config: Config, runner: Runner, fake: FakeTensorMode) -> DryRun:
    mesh = runner.mesh
    with fake:
        optimizer = build_optimizer(config, runner)
        once, twice = (_count(config, runner, micro_batches) for micro_batches in (1, 2))
        moments = _bytes(optimizer.named_moments().values())
        averaged = 0 if optimizer.ema is None else _bytes(optimizer.ema.values.values())
        holding = replace(_holding(runner, moments), ema=averaged)
    each = twice.plus(once, -1)
    micro_batches = config.Engine.accumulate_steps
    end = once.plus(each, -1)
    each = each.plus(_messages(runner))
    if mesh.size > 1:
        end.add("control", "all-reduce", AGREED_NUMBERS * 8)
    if optimizer.muon is not None and (exchange := optimizer.muon.exchange) is not None:
        for kind, sent in zip(("gather", "return"), exchange.bytes_sent(optimizer.muon.itemsize)):
            end.add("muon", kind, sent, calls=len(exchange.rounds))
    timeline = None
    if runner.pipeline is not None:
        schedule = runner.pipeline.schedule_of(micro_batches)
        timeline = timeline_of(schedule, mesh.coordinates["pp"])
    parameters = sum(parameter.numel() for parameter in runner.parameters.values())
    kept = sum(shard.local.numel() for shard in runner.shards.values())
    share = memory_of_rank(config, mesh.rank)
    return DryRun(mesh.layout, share, parameters, kept, holding, micro_batches, each, end, timeline)


def _count(config: Config, runner: Runner, micro_batches: int) -> Traffic:
    """Of a step of `micro_batches`, without what goes between pipeline stages."""
    with Counting(runner.mesh) as counting:
        for micro_batch in range(micro_batches):
            for part in runner.parts:
                if runner.sharding is not None:
                    runner.sharding.before_backward(part, micro_batch == micro_batches - 1)
                _forward_backward(config, runner, part)
        runner.reduce_gradients()
    return counting.traffic


def _forward_backward(config: Config, runner: Runner, part: GPT) -> None:
    size, length = runner.micro_batch_size, config.Data.dataset.max_seq_len
    tokens = torch.zeros((size, length), dtype=torch.int64)
    inputs = tokens
    if not part.is_first:
        assert runner.pipeline is not None
        inputs = torch.empty_like(runner.pipeline.boundary, requires_grad=True)
    part.train()
    output = part(inputs, tokens, torch.ones((size, length)), tokens)
    output.backward(torch.empty_like(output))


def _messages(runner: Runner) -> Traffic:
    """What this rank sends to other stages for one micro-batch: outputs on, gradients back."""
    sent, pipeline = Traffic(), runner.pipeline
    if pipeline is None:
        return sent
    size = pipeline.boundary.numel() * pipeline.boundary.itemsize
    for number in pipeline.parts:
        for other in (number - 1, number + 1):
            if 0 <= other < pipeline.num_stages and other not in pipeline.parts:
                sent.add("pp", SENT, size)
    return sent


def _holding(runner: Runner, moments: int) -> Holding:
    masters = list(runner.masters.values())
    separate = [one for key, one in runner.masters.items() if one is not runner.parameters[key]]
    weights = _bytes(runner.parameters.values())
    if runner.sharding is not None:
        weights, separate = 0, masters
    gradients = _bytes(one.grad for one in masters if one.grad is not None)
    return Holding(weights, _bytes(separate), gradients, moments)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.itemsize for tensor in tensors)


# -- as text ------------------------------------------------------------------------------------


def dry_run_lines(config: Config, rank: int) -> Iterator[str]:
    """What `--dry-run` prints, with what the planner's formulas say beside it."""
    ran = dry_run(config, rank)
    layout, share, held = ran.layout, ran.share, ran.holding
    place = layout.coordinates(rank)
    placed = ", ".join(f"{axis} {place[axis]}" for axis in AXES)
    yield f"rank {rank} of {layout.world_size}, layout {layout}: {placed}"
    workload = workload_of(config, on_cpu=is_cpu(config.Global.device))
    spread = spread_of(config)
    given = workload.network, spread
    planned = stage_parameters(*given, place["pp"], place["mp"])
    planned_bytes = sum(holding_of(*given, workload.software, place["pp"], place["mp"]).values())
    yield (
        f"{share.layers} layer(s) from {share.first_layer}: {ran.parameters:,} parameters "
        f"({planned:,.0f} planned), of which this rank keeps {ran.kept:,}"
    )
    averaged = f", average of weights {in_bytes(held.ema)}" if held.ema else ""
    yield (
        f"holds at the update: weights {in_bytes(held.weights)}, master weights "
        f"{in_bytes(held.masters)}, gradients {in_bytes(held.gradients)}, moments "
        f"{in_bytes(held.moments)}{averaged}: {held.total:,} bytes ({planned_bytes:,.0f} planned)"
    )
    if layout.sharding > 1:
        yield (
            f"in the middle of a step: weights gathered {in_bytes(share.weight_bytes)}, gradients "
            f"{in_bytes(share.gradient_bytes)}"
        )
    if ran.timeline is not None:
        yield f"{config.Distributed.pp_schedule}: {ran.timeline.text()}"
        yield (
            f"idle {ran.timeline.idle:,} of {ran.timeline.slots:,} slots "
            f"({ran.timeline.idle_share:.2%}); a forward pass is one, a backward pass two"
        )
    yield from _traffic_lines(ran)
    planned = traffic_of(*given, workload.software, place["pp"])
    listed = [f"{axis} {_size(int(size))}" for axis, size in planned.items() if size]
    if listed:
        yield f"planned to send, an all-reduce counted twice: {', '.join(listed)}"


def _traffic_lines(ran: DryRun) -> Iterator[str]:
    if not ran.traffic.calls:
        yield "sends nothing"
        return
    yield f"sends, in a step of {ran.micro_batches:,} micro-batch(es), calls and bytes:"
    yield f"  {'axis':9} {'':14} {'each micro-batch':>24} {'once':>24} {'whole step':>28}"
    whole = ran.traffic
    for axis, kind in sorted(whole.calls):
        cells = [
            f"{traffic.calls[axis, kind]:,}, {_size(traffic.bytes_[axis, kind])}"
            if traffic.calls[axis, kind]
            else "-"
            for traffic in (ran.per_micro_batch, ran.per_step, whole)
        ]
        yield f"  {axis:9} {kind:14} {cells[0]:>24} {cells[1]:>24} {cells[2]:>28}"


def _size(bytes_: int) -> str:
    return in_bytes(bytes_) if bytes_ >= 1e5 else f"{bytes_:,} B"


# -- counting collectives, by axis and kind -------------------------------------------------------


SENT = "send"

Kind = tuple[str, str]  # axis, what is done


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of each kind. A collective's bytes are those of its whole tensor."""

    calls: Counter[Kind] = field(default_factory=Counter)
    bytes_: Counter[Kind] = field(default_factory=Counter)

    def add(self, axis: str, kind: str, bytes_: int, calls: int = 1) -> None:
        self.calls[axis, kind] += calls
        self.bytes_[axis, kind] += bytes_

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        total = Traffic(Counter(self.calls), Counter(self.bytes_))
        for kind in other.calls:
            total.add(*kind, times * other.bytes_[kind], times * other.calls[kind])
            if not total.calls[kind]:
                del total.calls[kind], total.bytes_[kind]
        return total


class Counting(TorchDispatchMode):
    """Every call of torch.distributed while this is active goes to `traffic`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.traffic = Traffic()
        # What is agreed on by all ranks is not counted here, so a group that has all is an axis's.
        self.axes = {
            group.group_name: axis for axis in AXES if (group := mesh.group(axis)) is not None
        }
        if mesh.tied_embedding_group is not None:
            self.axes[mesh.tied_embedding_group.group_name] = "pp ends"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in COLLECTIVES:
            axis = self.axes[next(groups_among(args)).group_name]
            self.traffic.add(axis, COLLECTIVES[name], _largest(args))
        return func(*args, **(kwargs or {}))


def _largest(given: Any) -> int:
    """Bytes of the largest tensor (or list of tensors) given."""
    sizes = [0]
    for value in given:
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel() * value.itemsize)
        elif isinstance(value, list):
            sizes.append(sum(_largest([inner]) for inner in value))
    return max(sizes)


# -- a pipeline schedule laid out in time ---------------------------------------------------------
#
# The order of every rank is torch's own. A forward pass takes one slot, a backward pass two (its
# halves, where a schedule splits it, one each); an action starts when the rank is free and what it
# needs has arrived, and messages take no time.


SLOTS = {
    _ComputationType.FORWARD: 1,
    _ComputationType.FULL_BACKWARD: 2,
    _ComputationType.BACKWARD_INPUT: 1,
    _ComputationType.BACKWARD_WEIGHT: 1,
}
SHOWN_AT_THE_START, SHOWN_AT_THE_END = 14, 6

Orders = dict[int, list[_Action]]  # by pipeline rank
Key = tuple[int, bool, int]  # stage, whether forward, micro-batch


@dataclass(frozen=True)
class Timeline:
    """One rank's share of a step."""

    actions: list[_Action]
    idle: int  # slots in which this rank waits
    slots: int  # of the whole step

    @property
    def idle_share(self) -> float:
        return self.idle / self.slots

    def text(self) -> str:
        """`F0 F1 B0 F2 B1`; with several stages a rank `0F0 4F0`; the middle left out."""
        several = len({action.stage_index for action in self.actions}) > 1
        words = [
            f"{action.stage_index if several else ''}{action.computation_type.value}"
            f"{action.microbatch_index}"
            for action in self.actions
        ]
        if len(words) > SHOWN_AT_THE_START + SHOWN_AT_THE_END + 1:
            left_out = len(words) - SHOWN_AT_THE_START - SHOWN_AT_THE_END
            middle = f"... {left_out:,} more ..."
            words = [*words[:SHOWN_AT_THE_START], middle, *words[-SHOWN_AT_THE_END:]]
        return " ".join(words)


def timeline_of(schedule: _PipelineSchedule, pp_rank: int) -> Timeline:
    orders = orders_of(schedule)
    ends = _run(orders)
    busy = sum(SLOTS[action.computation_type] for action in orders[pp_rank])
    slots = max(ends)
    return Timeline(orders[pp_rank], slots - busy, slots)


def orders_of(schedule: _PipelineSchedule) -> Orders:
    """What every rank computes, in its order."""
    single = isinstance(schedule, PipelineScheduleSingle)
    actions = schedule._get_pipeline_order() if single else schedule.pipeline_order  # type: ignore[attr-defined]
    orders = {rank: list(_computing(own)) for rank, own in actions.items()}
    # Torch's table of 1F1B numbers the last stage's forward passes from 1; it runs them from 0.
    return {rank: _renumbered(order) for rank, order in orders.items()} if single else orders


def _computing(actions: list[_Action | None]) -> list[_Action]:
    """Without waits and reductions, and with passes that torch joins apart again."""
    found: list[_Action] = []
    for action in actions:
        if action is not None and action.sub_actions is not None:
            found += _computing([*action.sub_actions])
        elif action is not None and action.computation_type in SLOTS:
            found.append(action)
    return found


def _renumbered(order: list[_Action]) -> list[_Action]:
    forwards = 0
    renumbered = []
    for action in order:
        if action.computation_type == _ComputationType.FORWARD:
            action = action._replace(microbatch_index=forwards)
            forwards += 1
        renumbered.append(action)
    return renumbered


def _run(orders: Orders) -> list[int]:
    """The slot in which each rank ends."""
    last_stage = max(action.stage_index for order in orders.values() for action in order)
    done: dict[Key, int] = {}
    clocks = dict.fromkeys(orders, 0)
    places = dict.fromkeys(orders, 0)
    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while places[rank] < len(order):
                action = order[places[rank]]
                ready = _ready(action, last_stage, done)
                if ready is None:
                    break
                clocks[rank] = max(clocks[rank], ready) + SLOTS[action.computation_type]
                if action.computation_type != _ComputationType.BACKWARD_WEIGHT:
                    done[_key(action)] = clocks[rank]
                places[rank] += 1
                moved = True
    assert all(places[rank] == len(order) for rank, order in orders.items()), "a deadlock"
    return list(clocks.values())


def _key(action: _Action) -> Key:
    assert action.microbatch_index is not None
    forward = action.computation_type == _ComputationType.FORWARD
    return action.stage_index, forward, action.microbatch_index


def _ready(action: _Action, last_stage: int, done: dict[Key, int]) -> int | None:
    """When its input is there; None while that is not known."""
    stage, forward, micro_batch = _key(action)
    if action.computation_type == _ComputationType.BACKWARD_WEIGHT:
        return done.get((stage, False, micro_batch))
    if forward:
        return 0 if stage == 0 else done.get((stage - 1, True, micro_batch))
    if stage == last_stage:
        return done.get((stage, True, micro_batch))
    return done.get((stage + 1, False, micro_batch))
