"""A pipeline schedule laid out in time: what a rank does in which order, and when it waits.

The order of every rank is torch's own. A forward pass takes one slot, a backward pass two (its
halves, where a schedule splits it, one each); an action starts when the rank is free and what it
needs has arrived, and messages take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineSchedule,
)

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
    told = schedule._get_pipeline_order() if single else schedule.pipeline_order  # type: ignore[attr-defined]
    orders = {rank: list(_computing(actions)) for rank, actions in told.items()}
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
