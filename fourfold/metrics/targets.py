"""Whether a run met a target, by what its log says.

A loss or a perplexity is met below its target, a speed at or above it. What the log does not tell
is neither met nor missed.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from fourfold.metrics.logs import Logged
from fourfold.metrics.perplexity import perplexity


@dataclass(frozen=True)
class Target:
    step: int | None = None  # None: the last one logged
    loss: float | None = None
    ppl: float | None = None
    tgs: float | None = None  # tokens per device per second


@dataclass(frozen=True)
class Finding:
    met: bool | None  # None: cannot be told
    text: str


PRESETS = {"gpt3-175b": Target(step=2400, loss=9.01, ppl=8181.0)}
NOTES = {
    "gpt3-175b": (
        "a floor: in the run these figures come from, the loss was not scaled while its fp16 "
        "gradients were unscaled (grad norm 0.000 on every line), so it learned next to nothing in "
        "3.8 billion tokens; a sound run is far below"
    )
}


@dataclass
class Reading:
    """What a log says about a target, gathered line by line; later lines replace earlier ones."""

    target: Target
    last: int | None = None  # step of the last line
    at: Logged | None = None  # the last training line up to the step asked for
    evaluated: Logged | None = None  # the last evaluation up to there
    speeds: array[float] = field(default_factory=lambda: array("d"))

    def take(self, line: Logged) -> None:
        self.last = line.step
        if self.target.step is not None and line.step > self.target.step:
            return
        if line.kind == "train":
            self.at = line
            if line.tokens_per_device is not None:
                self.speeds.append(line.tokens_per_device)
        elif line.perplexity is not None:
            self.evaluated = line

    def loss(self, wanted: float) -> Finding:
        if why := self._no_loss():
            return Finding(None, why)
        step, loss = self._training_loss()
        return Finding(loss < wanted, f"loss {loss:.6f} at step {step}, wanted below {wanted:g}")

    def ppl(self, wanted: float) -> Finding:
        if self.evaluated is not None and self._reached():
            value, where = self.evaluated.perplexity, f"evaluated at step {self.evaluated.step}"
            assert value is not None
        elif why := self._no_loss():
            return Finding(None, why)
        else:
            step, loss = self._training_loss()
            value = perplexity(loss)
            where = f"from the training loss at step {step}, no evaluation being logged"
        return Finding(value < wanted, f"ppl {value:.3f} {where}, wanted below {wanted:g}")

    def tgs(self, wanted: float) -> Finding:
        if not self.speeds:
            return Finding(None, "the log does not tell tokens per device per second")
        value = statistics.median(self.speeds)
        text = (
            f"tgs {value:.3f}, the median of {len(self.speeds)} lines, wanted at least {wanted:g}"
        )
        return Finding(value >= wanted, text)

    def _reached(self) -> bool:
        return self.last is not None and self.last >= (self.target.step or 0)

    def _training_loss(self) -> tuple[int, float]:
        assert self.at is not None and self.at.loss is not None
        return self.at.step, self.at.loss

    def _no_loss(self) -> str | None:
        """Why the training loss cannot be told, if it cannot."""
        if not self._reached():
            return f"step {self.target.step} is not reached: the log ends at step {self.last}"
        if self.at is None:
            until = "" if self.target.step is None else f" up to step {self.target.step}"
            return f"the log has no training line{until}"
        if self.at.loss is None:
            return (
                f"the line of step {self.at.step} has no loss; Megatron leaves out one that is "
                "not a number"
            )
        return None


def judge(lines: Iterable[Logged], target: Target) -> list[Finding]:
    """A finding for each thing wanted; none when the log tells of no step at all."""
    reading = Reading(target)
    for line in lines:
        reading.take(line)
    if reading.last is None:
        return []
    findings = []
    if target.loss is not None:
        findings.append(reading.loss(target.loss))
    if target.ppl is not None:
        findings.append(reading.ppl(target.ppl))
    if target.tgs is not None:
        findings.append(reading.tgs(target.tgs))
    return findings
