"""A bisection at the price of little more than its two sides.

Two full runs in float64, the reference and its rounded twin (`fourfold.question.noise`), cost more
than the two steps that are compared. So the sides are first held against each other, under bounds
that one sample of the batch is enough for:

    forward, loss, backward   errors of one sample are like those of another
    gradient                  a sum over samples with independent errors: sqrt(rows) times as large
    norm                      from the two above
    update                    from the gradient's, by Adam's rule (`noise.flips`)

Where no element and no root of a mean square is apart by more than half of a bound, the sides are
equal: either is within its whole bound then, of whatever the other is. Where something is, the
reference decides. For the batch, weights, activations and their gradients it computes the sample in
which the first difference is; for gradients of parameters, the whole batch; for what follows from
gradients in which the sides agree, only that. A suspicion that the reference does not confirm ends
in the full comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fourfold.question.bisect import EXACT, FEWEST, Verdict, compare
from fourfold.question.noise import Measured, Noise, RoundedStep, flips, roundoff_of
from fourfold.question.step_trace import PHASES, StepTrace, TensorPart, is_seen, rms
from fourfold.shards import Box

# Of a bound. The difference of two sides that are right has a root of two times the noise of one,
# and a bound is four times the noise.
SUSPICIOUS = 0.5
# A sample decides on these; what comes after them is of the whole batch.
OF_SAMPLES = ("input", "weight", "forward", "loss", "backward")
# By phase: an error of more than this many of the sample's bounds is beyond the whole batch's too.
CLEAR = {"gradient": 16.0, "norm": 16.0, "update": 4.0}


Made = TypeVar("Made", StepTrace, RoundedStep)


class References(Protocol):
    """What is computed in float64, by one process."""

    def exact(self, row: int | None) -> StepTrace:
        """The reference of a row's sample; of the whole batch for None."""

    def rounded(self, exact: StepTrace, roundoff: float, row: int | None) -> RoundedStep:
        """The same under errors of the size of `roundoff`."""

    def update(self) -> StepTrace:
        """The reference of what follows from the gradients of A."""


@dataclass
class ApartTensor:
    """A logical tensor in which the sides are further apart than they should be."""

    phase: str
    name: str
    row: int = -1  # the first of the batch, where the tensor has rows of it
    excess: float = 0.0  # in bounds
    ranks: dict[str, set[int]] = field(default_factory=lambda: {"A": set(), "B": set()})
    micro_batches: dict[str, set[int]] = field(default_factory=lambda: {"A": set(), "B": set()})


def judge(sides: Mapping[str, StepTrace], references: References) -> Verdict:
    """The first tensor that differs between two sides, with as little computed as it takes."""
    # A side of another commit may not have measured it.
    cost = {side: float(trace.facts.get("seconds", 0.0)) for side, trace in sides.items()}
    counted, started = _Counted(references), time.monotonic()
    verdict = _Judgement(sides, counted).verdict()
    comparing = time.monotonic() - started - counted.spent
    verdict.cost = {**cost, "reference": counted.seconds, "comparison": comparing}
    return verdict


@dataclass
class _Counted:
    """References, and what they took."""

    references: References
    seconds: float = 0.0  # for their steps
    spent: float = 0.0  # with all around them: processes, data, weights

    def exact(self, row: int | None) -> StepTrace:
        return self._count(partial(self.references.exact, row))

    def rounded(self, exact: StepTrace, roundoff: float, row: int | None) -> RoundedStep:
        return self._count(partial(self.references.rounded, exact, roundoff, row))

    def update(self) -> StepTrace:
        return self._count(self.references.update)

    def _count(self, make: Callable[[], Made]) -> Made:
        started = time.monotonic()
        made = make()
        self.spent += time.monotonic() - started
        self.seconds += float(made.facts["seconds"])
        return made


@dataclass(frozen=True)
class _Judgement:
    sides: Mapping[str, StepTrace]
    references: References

    def verdict(self) -> Verdict:
        facts = self.sides["A"].facts
        if facts["step"] > facts["begun"] + 1:
            # Errors of the steps before are in the weights, and only whole steps show them.
            return self._of_whole_steps(self.references.exact(None))
        sample = self.references.exact(0)
        of_sample = self._noise(sample, 0)
        noise = {size: sampled_noise(sample, one) for size, one in of_sample.items()}
        screening = Screening(self.sides, noise)
        discrepancies = screening.run()
        if not discrepancies:
            told = {side: trace.facts for side, trace in self.sides.items()}
            tensors = sum(len(parts) for parts in self.sides["A"].parts.values())
            return Verdict({**told, "reference": sample.facts}, [], tensors, screening.margin, {})
        first = min(PHASES.index(one.phase) for one in discrepancies.values())
        if PHASES[first] == "rule":
            verdict = compare(self.sides, sample, of_sample, ("rule",))
            if verdict.findings:
                return verdict
        if PHASES[first] in OF_SAMPLES:
            of_phase = [one for one in discrepancies.values() if one.phase == PHASES[first]]
            row = max(0, min(one.row for one in of_phase))
            if row >= sum(sample.facts["rows"]):
                sample = self.references.exact(row)
                of_sample = self._noise(sample, row)
            verdict = compare(self.sides, sample, of_sample, OF_SAMPLES[first:])
            if verdict.findings:
                return _with_all_ranks(verdict, discrepancies)
        if self._follows_from_gradients(discrepancies):
            update = self.references.update()
            verdict = self._by_sampled_noise(update, noise, PHASES[first:])
            if _is_clear(verdict):
                return verdict
        exact = self.references.exact(None)
        if PHASES[first] in ("gradient", "norm"):
            verdict = self._by_sampled_noise(exact, noise, PHASES[first:])
            if _is_clear(verdict):
                return verdict
        return self._of_whole_steps(exact)

    def _noise(self, exact: StepTrace, row: int | None) -> dict[float, Measured]:
        """By the unit roundoff of each side's precision."""
        sizes = {roundoff_of(trace.facts) for trace in self.sides.values()}
        return {size: self.references.rounded(exact, size, row).noise for size in sizes}

    def _of_whole_steps(self, exact: StepTrace) -> Verdict:
        return compare(self.sides, exact, self._noise(exact, None))

    def _by_sampled_noise(
        self, exact: StepTrace, noise: Mapping[float, Measured], phases: Sequence[str]
    ) -> Verdict:
        scaled = {size: _of_whole(one, exact) for size, one in noise.items()}
        return compare(self.sides, exact, scaled, phases)

    def _follows_from_gradients(self, discrepancies: Mapping[tuple[str, str], ApartTensor]) -> bool:
        """Whether the first difference is in what a step makes of its gradients, by a rule whose
        errors are known: that of AdamW."""
        ruled = {name for phase, name in self.sides["A"].parts if phase == "rule"}
        updated = {name for phase, name in self.sides["A"].parts if phase == "update"}
        if ruled != updated:
            return False
        return all(
            phase == "update" or (phase, name) == ("norm", "gradient norm")
            for phase, name in discrepancies
        )


def _is_clear(verdict: Verdict) -> bool:
    first = verdict.first
    return first is not None and any(
        found.missing or found.excess > CLEAR.get(first.phase, math.inf)
        for found in first.sides.values()
    )


def _with_all_ranks(
    verdict: Verdict, discrepancies: Mapping[tuple[str, str], ApartTensor]
) -> Verdict:
    """Other samples are on other ranks: where the sides differ there too, those are wrong too."""
    assert verdict.first is not None
    discrepancy = discrepancies.get((verdict.first.phase, verdict.first.name))
    if discrepancy is None or len(verdict.first.wrong) != 1:
        return verdict
    (side,) = verdict.first.wrong
    found = verdict.first.sides[side]
    ranks = {*found.ranks, *discrepancy.ranks[side]}
    if not found.missing:
        found.right_ranks = sorted({*found.right_ranks} - ranks)
        found.ranks = sorted(ranks)
    found.micro_batches = sorted({*found.micro_batches, *discrepancy.micro_batches[side]})
    return verdict


# -- noise by a sample ------------------------------------------------------------------------


def sampled_noise(sample: StepTrace, of_sample: Measured) -> Measured:
    """What a whole batch's noise is, by one sample's."""
    found = dict(of_sample)
    _, rows = sample.facts["rows"]
    wider = math.sqrt(sample.facts["batch"] / rows)
    squares = 0.0
    for key, noise in list(found.items()):
        if key[0] == "gradient":
            found[key] = Noise(
                noise.largest * wider, noise.typical * wider, noise.magnitude, noise.size
            )
            count = sum(part.box.volume() for part in sample.parts[key])
            squares += found[key].typical ** 2 * count
            found["update", key[1]] = Noise(0.0, 0.0, 0.0, 0.0)
            found["rule", key[1]] = Noise(0.0, 0.0, 0.0, 0.0)
    losses = found["loss", "token losses"].largest
    found["norm", "loss"] = Noise(losses, losses, 0.0, 0.0)
    norm = math.sqrt(squares)
    found["norm", "gradient norm"] = Noise(norm, norm, 0.0, 0.0)
    return found


def _of_whole(noise: Measured, exact: StepTrace) -> Measured:
    """The same with the magnitudes of a whole step."""
    found: Measured = {}
    for key, parts in exact.parts.items():
        if key[0] in OF_SAMPLES:
            continue
        magnitude = squares = 0.0
        count = 0
        for part in parts:
            values = exact.read(part)
            if values.numel():
                magnitude = max(magnitude, float(values.abs().max()))
                squares += rms(values) ** 2 * values.numel()
                count += values.numel()
        known = noise.get(key, Noise(0.0, 0.0, 0.0, 0.0))
        size = math.sqrt(squares / max(count, 1))
        found[key] = Noise(known.largest, known.typical, magnitude, size)
    return found


# -- the sides against each other -------------------------------------------------------------


class Screening:
    """Every part of either side against the other side."""

    def __init__(self, sides: Mapping[str, StepTrace], noise: Mapping[float, Measured]) -> None:
        self.sides = sides
        self.noise = {side: noise[roundoff_of(trace.facts)] for side, trace in sides.items()}
        self.discrepancies: dict[tuple[str, str], ApartTensor] = {}
        self.margin = 0.0  # the largest excess of what is not suspicious, in bounds

    def run(self) -> dict[tuple[str, str], ApartTensor]:
        a, b = self.sides["A"], self.sides["B"]
        found_in = ""
        for key in sorted({**a.parts, **b.parts}, key=lambda key: PHASES.index(key[0])):
            phase, name = key
            if self.discrepancies and phase != found_in:
                break  # what comes later follows from this
            found_in = phase
            if phase in ("forward", "backward") and not all(
                is_seen(name, compiled=trace.facts["compiled"]) for trace in (a, b)
            ):
                continue
            self._compare(key)
        return self.discrepancies

    def _compare(self, key: tuple[str, str]) -> None:
        # A replica that is off shows against the first of the other side's, so each part of one
        # side is held against one holder of each rectangle of the other.
        holders = {side: [*_holders(trace, key)] for side, trace in self.sides.items()}
        pairs = {
            (own.rank, own.box, other.rank, other.box): (own, other)
            for mine, theirs in (("A", "B"), ("B", "A"))
            for one in self.sides[mine].parts.get(key, [])
            for two in holders[theirs]
            for own, other in ([(one, two)] if mine == "A" else [(two, one)])
        }
        covered = 0
        for own, other in pairs.values():
            common = own.box.overlap(other.box) if own.shape == other.shape else None
            if common is None:
                continue
            if own in holders["A"] and other in holders["B"]:
                covered += common.volume()
            excess = self._excess(own, other, common)
            if excess > SUSPICIOUS:
                self._suspect(key, excess, common, own, other)
            else:
                self.margin = max(self.margin, excess)
        for side, parts in holders.items():
            if covered < sum(part.box.volume() for part in parts) or not parts:
                here = parts or holders["B" if side == "A" else "A"]
                self._suspect(key, math.inf, here[0].box, None, None)

    def _suspect(
        self,
        key: tuple[str, str],
        excess: float,
        common: Box,
        own: TensorPart | None,
        other: TensorPart | None,
    ) -> None:
        found = self.discrepancies.setdefault(key, ApartTensor(*key))
        found.excess = max(found.excess, excess)
        if key[0] in ("input", "forward", "loss", "backward") and common.offsets:
            row = common.offsets[0]
            found.row = row if found.row < 0 else min(found.row, row)
        for side, part in (("A", own), ("B", other)):
            if part is not None:
                found.ranks[side].add(part.rank)
                if part.micro_batch >= 0:
                    found.micro_batches[side].add(part.micro_batch)

    def _excess(self, own: TensorPart, other: TensorPart, common: Box) -> float:
        """By how many bounds they are apart."""
        a = _values(self.sides["A"], own)[common.within(own.box)]
        b = _values(self.sides["B"], other)[common.within(other.box)]
        if a.dtype != b.dtype or a.dtype != torch.float32:
            a, b = a.double(), b.double()
        if a.numel() == 0 or torch.equal(a, b):
            return 0.0
        apart = (a - b).abs_()  # of floats that are close, without a rounding
        largest = float(apart.max())
        if not math.isfinite(largest):
            same = (a == b) | (a.isnan() & b.isnan())
            return 0.0 if bool(same.all()) else math.inf
        if own.phase in EXACT:
            return math.inf
        element, typical = self._bounds(own, a)
        excess = largest / element if element else math.inf
        if a.numel() >= FEWEST and typical:
            excess = max(excess, _rms(apart, largest) / typical)
        if excess > SUSPICIOUS and own.phase == "update":
            excess = self._update_excess(own, common, apart, element, typical)
        return excess

    def _bounds(self, part: TensorPart, values: Tensor) -> tuple[float, float]:
        """The wider of the two sides', for an element and for the root of the mean square."""
        magnitude = float(values.abs().max())
        size = _rms(values, magnitude)
        element = typical = 0.0
        for side, trace in self.sides.items():
            known = self.noise[side].get(part.key, Noise(0.0, 0.0, 0.0, 0.0))
            here = Noise(known.largest, known.typical, magnitude, size)
            bounds = here.bounds(trace.facts, part.phase)
            element, typical = max(element, bounds[0]), max(typical, bounds[1])
        return element, typical

    def _update_excess(
        self, part: TensorPart, common: Box, apart: Tensor, element: float, typical: float
    ) -> float:
        """Elements whose gradient is hardly more than rounding may go either way."""
        trace = self.sides["A"]
        rules = trace.parts.get(("rule", part.name))
        gradients = [
            one
            for one in trace.parts.get(("gradient", part.name), [])
            if one.rank == part.rank and one.box == part.box
        ]
        if rules is None or not gradients:
            return math.inf
        gradient = trace.read(gradients[0])[common.within(part.box)]
        rate = float(trace.read(rules[0])[0])
        noise = max(
            (measured["gradient", part.name] for measured in self.noise.values()),
            key=lambda one: one.largest,
        )
        allowed = flips(gradient, noise, rate)
        excess = float((apart / (element + allowed)).max())
        return max(excess, rms(apart) / (typical + rms(allowed)))


def _rms(values: Tensor, largest: float) -> float:
    """Of numbers whose squares may be too small for their dtype."""
    return largest * rms(values / largest) if largest else 0.0


def _holders(trace: StepTrace, key: tuple[str, str]) -> Iterator[TensorPart]:
    """One part for each rectangle."""
    seen: set[Box] = set()
    for part in trace.parts.get(key, []):
        if part.box not in seen:
            seen.add(part.box)
            yield part


def _values(trace: StepTrace, part: TensorPart) -> Tensor:
    """Of a part, or of the sum that it is a term of."""
    if not part.partial:
        return trace.read(part, wide=False)
    terms = [one for one in trace.parts[part.key] if one.box == part.box]
    return torch.stack([trace.read(one) for one in terms]).sum(0)
