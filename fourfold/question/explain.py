"""Why two runs part: delta debugging by short exact replays.

The first run is computed again from a checkpoint before the runs part, with some of what differs
taken over from the second. What makes its numbers those of the second, and nothing of which can be
left out, is the reason (Zeller and Hildebrandt's ddmin). Keys that only make sense together, such
as the sizes of a batch, are taken over together; what cannot be built or started counts as not
being the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fourfold.config import Config
from fourfold.errors import RunError, UserError
from fourfold.parallel import layout_of
from fourfold.question.history import RunHistory, Segment, on_ranks, scratch_directory
from fourfold.question.replay import COMPARED, agree
from fourfold.question.run_diff import RunDiff, steps_of

# A replay that is this much nearer to one run than the runs are apart has that run's number.
NEAR = 0.01
# Of a number itself: what printing and another order of sums may change.
ROUNDING = 1e-7
TOGETHER = {
    "Data.batch_size.": "the batch",
    "Engine.accumulate_steps": "the batch",
    "Distributed.": "the layout",
    "Model.sequence_parallel": "the layout",
}
THREADS = "threads of a process"

Numbers = dict[str, float | None]


@dataclass(frozen=True)
class Takeover:
    """Something of the second run that the first can take over by itself."""

    name: str
    values: Mapping[str, Any]  # keys of the configuration
    threads: int | None = None

    def told(self, found: RunDiff) -> list[str]:
        if self.threads is not None:
            return [f"{THREADS}: {found.machine['threads'][0]} and {self.threads}"]
        lines = [
            f"{key}: {json.dumps(found.settings[key][0])} and {json.dumps(value)}"
            for key, value in self.values.items()
        ]
        if any(key.startswith("Data.dataset.input_dir") for key in self.values):
            lines += [
                f"{one.file}, from byte {one.first}, {one.bytes} bytes" for one in found.files
            ]
        return lines


@dataclass
class Explanation:
    """The replays of a pair of runs."""

    one: RunHistory
    other: RunHistory
    found: RunDiff
    open_foreign: Callable[[Config], Any] | None = None
    replays: int = 0
    start: int | None = None
    exact: bool = False  # whether the first run computed again has its own bits
    known: dict[frozenset[str], bool] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """The reason, or why there is none to be found."""
        assert self.found.parts_at is not None
        changes = list(changes_of(self.found))
        why_not = self._begin(changes)
        reason = [] if why_not else minimal(changes, self._gives_the_other)
        return {
            "reason": [line for change in reason for line in change.told(self.found)],
            "keys": [key for change in reason for key in (change.values or [change.name])],
            "why_not": why_not,
            "replays": self.replays,
            "from_step": self.start or 0,
            "to_step": self.found.parts_at,
        }

    def _begin(self, changes: Sequence[Takeover]) -> str:
        """Find a checkpoint from which both runs can be had; why there is none."""
        if not changes:
            return self._not_replayable() or "nothing that could be replayed differs"
        missing = ""
        for start in self._starts():
            self.start, self.known = start, {}
            if not self._gives([], self.one):
                missing = "the first run computed again is not what it recorded"
            elif self._gives_the_other(changes):
                return ""
            else:
                missing = "the first run with all settings of the second is not the second"
        return f"{missing}. {self._not_replayable()}".strip()

    def _not_replayable(self) -> str:
        left = [key for key in self.found.machine if key != "threads"]
        if "data_fingerprint" in self.found.data and not self.found.files:
            left.append("the data, which is not there in both versions")
        return f"What cannot be replayed here: {', '.join(left)}" if left else ""

    def _starts(self) -> Iterator[int | None]:
        """Checkpoints before anything differed, the latest first; then the beginning.

        An update that differs is seen in the numbers of the step after it.
        """
        last = (self.found.parts_at or 0) - 2
        saved = [step for step in self.one.checkpoints if 0 < step <= last]
        yield from sorted(set(saved) & self.other.checkpoints.keys(), reverse=True)[:1]
        yield None

    # -- replays ------------------------------------------------------------------------------

    def _gives_the_other(self, changes: Sequence[Takeover]) -> bool:
        key = frozenset(change.name for change in changes)
        if key not in self.known:
            self.known[key] = self._gives(changes, self.other)
        return self.known[key]

    def _gives(self, changes: Sequence[Takeover], wanted: RunHistory) -> bool:
        """Whether the first run with these changes has the numbers of a run where they part."""
        assert self.found.parts_at is not None
        self.replays += 1
        try:
            made = self._replay(changes, self.found.parts_at)
        except (UserError, RunError, ArithmeticError, RuntimeError, AssertionError):
            return False
        if made is None:
            return False
        target = steps_of(wanted)[self.found.parts_at]
        if wanted is self.one:
            self.exact = self.found.tolerance == 0 and all(
                agree(made[key], target.get(key), 0.0) for key in COMPARED
            )
        return all(
            agree(made[key], target.get(key), 0.0)
            or (not self.exact and _near(made[key], target.get(key), *self.found.numbers[key]))
            for key in COMPARED
        )

    def _replay(self, changes: Sequence[Takeover], step: int) -> Numbers | None:
        values = self.one.segment(step).values
        segment = Segment(self.one, self.start, None, values)
        overrides = [
            f"{key}={json.dumps(value)}"
            for change in changes
            for key, value in change.values.items()
        ]
        facts = self.one.facts(step)
        threads = None if facts is None else facts.threads
        threads = next((one.threads for one in changes if one.threads is not None), threads)
        with scratch_directory() as scratch:
            world = _world(changes, self.found, segment)
            config = segment.config(scratch, overrides, world)
            opened = None if self.open_foreign is None else self.open_foreign(config)
            work = partial(_numbers, segment, config, step, opened)
            world = layout_of(config).world_size
            code, made = on_ranks(world, scratch, work, config, threads)
        return None if code else made


def _numbers(segment: Segment, config: Config, step: int, open_foreign: Any) -> Numbers | None:
    """Loss and gradient norm of a step, on rank 0."""
    engine = segment.build(config, None, open_foreign)
    result = None
    while engine.step < step:
        result = engine.advance()
    rank = engine.mesh.rank
    engine.data.close()
    if engine.claim is not None:
        engine.claim.release()
    engine.mesh.close()
    if rank > 0 or result is None:
        return None
    return {"loss": result.loss, "grad_norm": result.norm}


def _world(changes: Sequence[Takeover], found: RunDiff, segment: Segment) -> int:
    sizes = found.machine.get("world_size")
    if sizes is not None and any(change.name == "the layout" for change in changes):
        return int(sizes[1])
    return segment.layout.world_size


def _near(made: float | None, target: Any, one: Any, other: Any) -> bool:
    """Whether a number is much nearer to the target than the two runs are to each other."""
    if made is None or None in (target, one, other):
        return False
    apart = abs(float(one) - float(other))
    return abs(made - float(target)) <= max(NEAR * apart, ROUNDING * abs(float(target)))


# -- what can be taken over -----------------------------------------------------------------------


def changes_of(found: RunDiff) -> Iterator[Takeover]:
    """What differs and can be replayed, by itself or with what belongs to it."""
    groups: dict[str, dict[str, Any]] = {}
    for key, (_, value) in found.settings.items():
        name = next((name for start, name in TOGETHER.items() if key.startswith(start)), key)
        groups.setdefault(name, {})[key] = value
    for name, values in groups.items():
        yield Takeover(name, values)
    threads = found.machine.get("threads")
    if threads is not None and threads[1] is not None and "world_size" not in found.machine:
        yield Takeover(THREADS, {}, int(threads[1]))


def minimal(
    changes: Sequence[Takeover], gives: Callable[[Sequence[Takeover]], bool]
) -> list[Takeover]:
    """A smallest part of the changes that does what all of them do: none can be left out."""
    left, parts = list(changes), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[at : at + size] for at in range(0, len(left), size)]
        smaller = _first(pieces, gives)
        if smaller is not None:
            left, parts = smaller, 2
            continue
        rests = [[one for one in left if one not in piece] for piece in pieces]
        smaller = _first(rests, gives) if len(pieces) > 2 else None
        if smaller is not None:
            left, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(left))
    return left


def _first(
    parts: Iterable[list[Takeover]], gives: Callable[[Sequence[Takeover]], bool]
) -> list[Takeover] | None:
    return next((part for part in parts if gives(part)), None)
