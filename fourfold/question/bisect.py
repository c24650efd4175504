"""The first tensor in which two layouts of one step differ by more than rounding.

Both sides and a float64 reference (`fourfold.question.noise`) are written down by logical tensor
(`fourfold.question.step_trace`); here they are read in the order of computation, one part at a
time. A side is wrong where an element, or the root of the mean square of a part, is further from
the reference than rounding explains; where parts of the tensor are missing; or where one side's
number is not finite and the reference's is. What the batch and the update rule are must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fourfold.question.noise import FLIP, Measured, flips, roundoff_of
from fourfold.question.step_trace import PHASES, StepTrace, TensorPart, is_seen, rms
from fourfold.shards import Box
from fourfold.terminal import table_lines

SIDES = ("A", "B")
SHOWN = 12
# Phases in which nothing is computed that could be rounded.
EXACT = ("input",)
# Parts smaller than this have no mean square to speak of.
FEWEST = 64
RATIO_SPREAD = 0.02


@dataclass
class SideFinding:
    """What one side has of a tensor that it should not have."""

    error: float = 0.0  # the largest, of an element
    bound: float = 0.0
    excess: float = 0.0  # of the bounds, the larger one; above 1 is wrong
    ranks: list[int] = field(default_factory=list)  # those whose part is wrong
    right_ranks: list[int] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    element: list[int] | None = None  # of the worst one, in the whole tensor
    value: float | None = None  # there
    expected: float | None = None  # the reference's
    missing: bool = False  # whether there is a part that no rank has
    pattern: str = ""  # what the difference looks like

    @property
    def wrong(self) -> bool:
        return self.missing or self.excess > 1


@dataclass
class TensorFinding:
    """A logical tensor that one side or both have wrong."""

    phase: str
    name: str
    micro_batch: int  # of the reference; -1 for what is of the whole batch
    sides: dict[str, SideFinding]

    @property
    def wrong(self) -> list[str]:
        return [side for side, found in self.sides.items() if found.wrong]


@dataclass
class Verdict:
    """What a bisection found."""

    facts: dict[str, dict[str, Any]]
    findings: list[TensorFinding]
    tensors: int
    margin: float  # the largest excess among what is right
    extra: dict[str, list[str]]  # tensors that the reference does not have, by side
    cost: dict[str, float] = field(default_factory=dict)  # seconds of what was computed

    @property
    def first(self) -> TensorFinding | None:
        return self.findings[0] if self.findings else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "equal": not self.findings and not any(self.extra.values()),
            "first": None if self.first is None else _told(self.first),
            "different": [_told(one) for one in self.findings],
            "extra": self.extra,
            "tensors": self.tensors,
            "margin": self.margin,
            "cost": self.cost,
            **self.facts,
        }


def _told(finding: TensorFinding) -> dict[str, Any]:
    return {**asdict(finding), "wrong": finding.wrong}


def compare(
    sides: Mapping[str, StepTrace],
    reference: StepTrace,
    noise: Mapping[float, Measured],
    phases: Sequence[str] = PHASES,
) -> Verdict:
    """Read all tensors of these `phases` in the order of computation. `noise` is that of the
    reference by unit roundoff, for each precision of the sides."""
    looks = {
        side: _Look(trace, reference, noise[roundoff_of(trace.facts)])
        for side, trace in sides.items()
    }
    order = [part for parts in reference.parts.values() for part in parts if part.phase in phases]
    order.sort(key=lambda part: (PHASES.index(part.phase), max(part.micro_batch, 0), part.at))
    findings, margin = [], 0.0
    for part in order:
        expected = reference.read(part)
        seen = {side: look(part, expected) for side, look in looks.items()}
        finding = TensorFinding(part.phase, part.name, part.micro_batch, seen)
        if finding.wrong:
            findings.append(finding)
        else:
            margin = max(margin, *(one.excess for one in seen.values()))
    facts = {side: trace.facts for side, trace in sides.items()}
    extra = {
        side: [
            " ".join(key) for key in trace.parts if key[0] in phases and key not in reference.parts
        ]
        for side, trace in sides.items()
    }
    return Verdict({**facts, "reference": reference.facts}, findings, len(order), margin, extra)


@dataclass(frozen=True)
class _Look:
    """A side against the reference."""

    trace: StepTrace
    reference: StepTrace
    noise: Measured

    def __call__(self, part: TensorPart, expected: Tensor) -> SideFinding:
        """This side's parts of a part of the reference."""
        found = SideFinding()
        of_module = part.phase in ("forward", "backward")
        if of_module and not is_seen(part.name, compiled=self.trace.facts["compiled"]):
            return found
        covered: set[Box] = set()
        element, typical = self._bounds(part)
        for own in self.trace.parts.get(part.key, []):
            common = own.box.overlap(part.box) if own.shape == part.shape else None
            if common is None or (own.partial and common in covered):
                continue
            covered.add(common)
            values = self._values(own)[common.within(own.box)]
            here = common.within(part.box)
            right, bound = expected[here], element if element.dim() == 0 else element[here]
            excess, worst = _distance(values, right, bound, typical)
            (found.ranks if excess > 1 else found.right_ranks).append(own.rank)
            if excess > 1 and own.micro_batch >= 0:
                found.micro_batches.append(own.micro_batch)
            if excess > found.excess or found.element is None:
                found.excess = excess
                found.element = [a + b for a, b in zip(common.offsets, worst)]
                found.value, found.expected = float(values[worst]), float(right[worst])
                found.error = abs(found.value - found.expected)
                found.bound = float(bound if bound.dim() == 0 else bound[worst])
                found.pattern = _pattern(values, right, bound) if excess > 1 else ""
        found.missing = sum(box.volume() for box in covered) < part.box.volume()
        found.ranks = sorted(set(found.ranks))
        found.right_ranks = sorted(set(found.right_ranks) - set(found.ranks))
        found.micro_batches = sorted(set(found.micro_batches))
        return found

    def _values(self, own: TensorPart) -> Tensor:
        """Of a part, or of the sum that it is a term of."""
        if not own.partial:
            return self.trace.read(own)
        terms = [one for one in self.trace.parts[own.key] if one.box == own.box]
        return torch.stack([self.trace.read(one) for one in terms]).sum(0)

    def _bounds(self, part: TensorPart) -> tuple[Tensor, float]:
        """For every element, or one for all, and for the root of the mean square."""
        if part.phase in EXACT:
            return torch.tensor(0.0, dtype=torch.float64), 0.0
        largest, typical = self.noise[part.key].bounds(self.trace.facts, part.phase)
        element = torch.tensor(largest, dtype=torch.float64)
        rules = self.reference.parts.get(("rule", part.name))
        if rules is None or part.phase not in ("weight", "update"):
            return element, typical
        rate = float(self.reference.read(rules[0])[0])
        if part.phase == "weight":
            # Elements may have gone either way in the steps before.
            since = self.reference.facts["step"] - self.reference.facts["begun"] - 1
            return element + FLIP * rate * since * (self.noise[part.key].largest > 0), typical
        (gradients,) = self.reference.parts["gradient", part.name]
        gradient = self.reference.read(gradients)
        allowed = flips(gradient, self.noise[gradients.key], rate)
        return element + allowed, typical + rms(allowed)


def _distance(
    values: Tensor, right: Tensor, bound: Tensor, typical: float
) -> tuple[float, tuple[int, ...]]:
    """By how many bounds they are apart, and where most."""
    apart = (values - right).abs()
    odd = ~values.isfinite() & right.isfinite()
    apart = torch.where(odd, math.inf, torch.where(right.isfinite(), apart, 0.0))
    shares = torch.where(apart == 0, 0.0, apart / bound)
    place = torch.tensor(int(shares.argmax()))
    worst = tuple(int(one) for one in torch.unravel_index(place, apart.shape))
    excess = float(shares[worst])
    if apart.numel() >= FEWEST and math.isfinite(excess) and excess > 0:
        excess = max(excess, rms(apart) / typical)
    return excess, worst


def _pattern(values: Tensor, right: Tensor, bound: Tensor) -> str:
    """What is plain to see of a difference."""
    if not values.isfinite().all():
        return "not finite"
    if not values.any():
        return "all zero"
    telling = right.abs() > (10 * bound).clamp_min(1e-3 * float(right.abs().max()))
    if int(telling.sum()) >= 2:
        ratios = values[telling] / right[telling]
        middle = float(ratios.median())
        if middle and float((ratios / middle - 1).abs().max()) < RATIO_SPREAD:
            return f"{middle:.4g} times the reference"
    off = (values - right).abs() > bound
    if 0 < int(off.sum()) < off.numel():
        for dimension in range(off.dim()):
            others = [one for one in range(off.dim()) if one != dimension]
            lines = off.any(dim=others) if others else off
            wrong = lines.nonzero().flatten().tolist()
            if len(wrong) * 4 <= len(lines):
                listed = ", ".join(map(str, wrong[:8]))
                return f"only {listed} of {len(lines)} along dimension {dimension} of this part"
        return f"{int(off.sum())} of {off.numel()} elements"
    return ""


# -- for a terminal -------------------------------------------------------------------------------

PASSES = {
    "input": "the batch",
    "weight": "parameters before the step",
    "forward": "forward pass",
    "loss": "losses",
    "backward": "backward pass",
    "gradient": "gradients of parameters",
    "norm": "loss and gradient norm of the step",
    "rule": "learning rate and weight decay",
    "update": "update",
}


def verdict_lines(told: Mapping[str, Any]) -> Iterator[str]:
    for side in SIDES:
        facts = told[side]
        level = f" {facts['level']}" if facts["level"] else ""
        yield (
            f"{side}: step {facts['step']} on {facts['layout']}, {facts['dtype']}{level}, "
            f"torch {facts['torch']}; loss {facts['loss']}, gradient norm {facts['grad_norm']}"
        )
    yield _reference_line(told["reference"])
    if told["cost"]:
        yield _cost_line(told["cost"])
    if told["equal"]:
        yield (
            f"equal: {told['tensors']:,} tensors, none further apart than {told['margin']:.2g} of "
            "what rounding explains"
        )
        return
    for side, names in told["extra"].items():
        if names:
            yield f"{side} has {len(names)} tensors that A's network does not have: {names[0]}, ..."
    first = told["first"]
    if first is None:
        return
    yield ""
    yield f"the first tensor that differs: {PASSES[first['phase']]}, {first['name']}"
    yield from _side_lines(first)
    yield ""
    yield f"{len(told['different']):,} of {told['tensors']:,} tensors differ:"
    rows = [("pass", "tensor", "micro-batch", "wrong", "times the bound")]
    for one in told["different"][:SHOWN]:
        number = "" if one["micro_batch"] < 0 else str(one["micro_batch"])
        excess = max(one["sides"][side]["excess"] for side in one["wrong"])
        rows.append((one["phase"], one["name"], number, ", ".join(one["wrong"]), f"{excess:.3g}"))
    yield from (f"  {line}" for line in table_lines(rows))
    if len(told["different"]) > SHOWN:
        yield f"  and {len(told['different']) - SHOWN} more"


def _reference_line(facts: Mapping[str, Any]) -> str:
    first, rows = facts["rows"]
    if rows == facts["batch"]:
        return f"reference: one process in float64; loss {facts['loss']}"
    which = f"sample {first}" if rows == 1 else f"samples {first} to {first + rows - 1}"
    return f"reference: one process in float64, {which} of {facts['batch']}"


def _cost_line(cost: Mapping[str, float]) -> str:
    """In steps of A: what the step took there with every tensor written down."""
    whole = sum(cost.values())
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cost.items())
    steps = f", {whole / cost['A']:.1f} times A's step" if cost["A"] else ""
    return f"time: {whole:.2f} s{steps} ({parts})"


def _side_lines(first: Mapping[str, Any]) -> Iterator[str]:
    for side in SIDES:
        found = first["sides"][side]
        if side not in first["wrong"]:
            yield f"  {side} is right (error {found['error']:.3g}, bound {found['bound']:.3g})"
            continue
        on = f"rank {_listed(found['ranks'])}" if found["ranks"] else "no rank"
        right = f", right on rank {_listed(found['right_ranks'])}" if found["right_ranks"] else ""
        of = f", micro-batch {_listed(found['micro_batches'])}" if found["micro_batches"] else ""
        yield f"  {side} is wrong on {on}{right}{of}"
        if found["missing"]:
            yield f"    {side} did not compute all of it"
        if found["ranks"]:
            yield (
                f"    element {found['element']}: {found['value']!r}, the reference has "
                f"{found['expected']!r}; off by {found['error']:.3g}, rounding explains "
                f"{found['bound']:.3g}"
            )
        if found["pattern"]:
            yield f"    {found['pattern']}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
