"""Which layouts can run: the arithmetic behind the checks, shared with the planner's search."""

from __future__ import annotations

TWO_STAGE_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
ONE_STAGE_SCHEDULES = ("1F1B", "GPipe")
ROUND_SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble")
SPLIT_SCHEDULES = ("InterleavedZeroBubble", *TWO_STAGE_SCHEDULES)


def divides_model(mp: int, heads: int, ffn: int) -> bool:
    """Whether every model-parallel rank gets whole heads and an equal share of the ffn width.

    The vocabulary need not divide: some ranks then hold one row more.
    """
    return heads % mp == 0 and ffn % mp == 0


def stages_fit(layers: int, pp: int, per_rank: int) -> bool:
    """Uneven stages are allowed, empty ones are not."""
    return pp * per_rank <= layers


def keeps_its_shards(schedule: str, sharding_stage: int) -> bool:
    """Schedules that split the backward pass need whole weights and gradients in between."""
    return sharding_stage == 1 or schedule not in SPLIT_SCHEDULES


def stages_per_rank(schedule: str) -> int | None:
    """How many stages a rank holds under `schedule`; None where the user chooses."""
    if schedule in TWO_STAGE_SCHEDULES:
        return 2
    return 1 if schedule in ONE_STAGE_SCHEDULES else None


def fewest_micro_batches(schedule: str, pp: int) -> int:
    return {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)


def falls_into_rounds(schedule: str, pp: int, micro_batches: int) -> bool:
    """Interleaved schedules run the micro-batches in equal rounds over the stages."""
    return schedule not in ROUND_SCHEDULES or micro_batches % max(1, micro_batches // pp) == 0


def schedule_fits(schedule: str, pp: int, per_rank: int, micro_batches: int) -> bool:
    wanted = stages_per_rank(schedule)
    return (
        (wanted is None or per_rank == wanted)
        and micro_batches >= fewest_micro_batches(schedule, pp)
        and falls_into_rounds(schedule, pp, micro_batches)
    )
