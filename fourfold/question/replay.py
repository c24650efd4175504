"""One step of a run again, from the checkpoint before it.

On the run's own layout, with the same torch on the same kind of processor, the step has the same
bits; elsewhere its loss and gradient norm agree to `TOLERANCE`. The steps from the checkpoint up to
the one asked for are computed too, since each begins with what the one before made of the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fourfold.data.provenance import DocumentText
from fourfold.errors import UserError
from fourfold.metrics.jsonl import RunFacts, processor_of
from fourfold.parallel import layout_of
from fourfold.question.history import RunHistory, Segment
from fourfold.tokenizer import Tokenizer
from fourfold.trace import (
    SeenTensor,
    StepReport,
    TokenLosses,
    gradient_norms,
    report_lines,
    watch_modules,
)
from fourfold.trace.step_report import by_layer

if TYPE_CHECKING:
    from fourfold.config import Config
    from fourfold.data import Batch
    from fourfold.engine import Engine
    from fourfold.engine.resuming import OpenForeign
    from fourfold.engine.updates import StepResult

# Relative, of losses and gradient norms on another layout or machine than the run's.
TOLERANCE = 1e-5
COMPARED = ("loss", "grad_norm")


class Replay:
    """What a replay of one step is asked to do; `run` is called on every rank."""

    def __init__(
        self,
        history: RunHistory,
        step: int,
        *,
        per_sample: bool = False,
        tokenizer: Path | None = None,
        open_foreign: OpenForeign | None = None,
    ) -> None:
        self.history = history
        self.step = step
        self.segment: Segment = history.segment(step)
        self.per_sample = per_sample
        self.tokenizer = tokenizer
        self.open_foreign = open_foreign

    def run(self, config: Config, world_size: int) -> dict[str, Any] | None:
        """The answer, on rank 0."""
        last = config.Engine.max_steps
        if self.step > last:
            raise UserError(f"--step {self.step}: this run has the steps 1 to {last}")
        engine = self.segment.build(config, world_size, self.open_foreign)
        begun = engine.step
        while engine.step < self.step - 1:
            engine.advance()
        result, report = self._watched(engine) if self.per_sample else (engine.advance(), None)
        rank = engine.mesh.rank
        engine.data.close()
        if engine.claim is not None:
            engine.claim.release()
        engine.mesh.close()
        return self._answer(config, result, report, begun) if rank == 0 else None

    def _watched(self, engine: Engine) -> tuple[StepResult, dict[str, Any] | None]:
        """The step, with its tokens' losses and what its layers hold."""
        runner, mesh = engine.runner, engine.mesh
        batch = engine.data.loaders["train"].batch(engine.step)
        losses, largest = TokenLosses(runner, logits=True), Largest()
        norms: dict[str, float] = {}

        def look(batch: Batch, scale: float) -> None:
            norms.update(gradient_norms(runner, scale))

        with ExitStack() as watching:
            watching.enter_context(losses.attached())
            watching.enter_context(
                watch_modules(
                    runner, self.step, len(batch.tokens), largest.take, is_layer, gradients=False
                )
            )
            losses.begin(self.step, batch)
            result = engine.advance(look)
        named = (
            engine.data.tokenizer() if self.tokenizer is None else Tokenizer.load(self.tokenizer)
        )
        report = StepReport.make(
            losses,
            batch,
            engine.data.samples["train"],
            DocumentText(named),
            step=self.step,
            loss=result.loss,
            grad_norm=result.norm,
            gradient_norms=by_layer(norms),
            **_extremes(losses, largest, self.step, mesh.gather),
        )
        return result, report.to_dict() if mesh.rank == 0 else None

    def _answer(
        self, config: Config, result: StepResult, report: dict[str, Any] | None, begun: int
    ) -> dict[str, Any]:
        same = str(layout_of(config)) == str(self.segment.layout)
        facts = self.history.facts(self.step)
        strangers = differences(facts)
        recorded = self.history.recorded(self.step)
        exact = same and not strangers
        answer: dict[str, Any] = {
            "run": str(self.history.directory),
            "step": self.step,
            "from_step": begun,
            "layout": str(layout_of(config)),
            "layout_of_run": str(self.segment.layout),
            "elsewhere": strangers,
            "tolerance": 0.0 if exact else TOLERANCE,
            "loss": result.loss,
            "grad_norm": result.norm,
            "applied": result.finite,
            "recorded": None if recorded is None else {key: recorded.get(key) for key in COMPARED},
            "equal": None,
            "report": report,
        }
        if recorded is not None:
            tolerance = answer["tolerance"]
            answer["equal"] = all(
                agree(answer[key], recorded.get(key), tolerance) for key in COMPARED
            )
        return answer


def is_layer(name: str) -> bool:
    words = name.split(".")
    return words == ["embeddings"] or (len(words) == 2 and words[0] == "layers")


class Largest:
    """The largest magnitude of what it is given, by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def take(self, seen: SeenTensor) -> None:
        if seen.tensor.numel():
            value = float(seen.tensor.abs().max())
            self.values[seen.name] = max(self.values.get(seen.name, 0.0), value)


def _extremes(losses: TokenLosses, largest: Largest, step: int, gather: Any) -> dict[str, Any]:
    """Of all ranks; a collective."""
    own = {"logits": losses.logit_range(step), "activations": largest.values}
    told = [json.loads(text) for text in gather(json.dumps(own))]
    ranges = [one["logits"] for one in told if one["logits"] is not None]
    activations: dict[str, float] = {}
    for one in told:
        for name, value in one["activations"].items():
            activations[name] = max(activations.get(name, 0.0), value)
    return {
        "logits": (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else None,
        "activations": activations,
    }


def agree(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two numbers are the same, or within a relative tolerance."""
    if one is None or other is None:
        return one is other
    a, b = float(one), float(other)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    return tolerance > 0 and abs(a - b) <= tolerance * max(abs(a), abs(b))


def differences(facts: RunFacts | None) -> list[str]:
    """Why this machine may round differently from the one that trained."""
    if facts is None or facts.torch is None:
        return []
    here = {"torch": torch.__version__, "processor": processor_of()}
    return [
        f"{name} {value} here, {was} then"
        for name, value in here.items()
        if (was := getattr(facts, name)) is not None and was != value
    ]


def replay_lines(answer: Mapping[str, Any], most: int) -> Iterator[str]:
    """For a terminal."""
    yield (
        f"{answer['run']}: step {answer['step']} again, from step {answer['from_step']}, on "
        f"{answer['layout']}"
    )
    if answer["layout"] != answer["layout_of_run"]:
        yield f"the run's layout was {answer['layout_of_run']}"
    yield from answer["elsewhere"]
    recorded, tolerance = answer["recorded"], answer["tolerance"]
    for key in COMPARED:
        was = "not recorded" if recorded is None else repr(recorded[key])
        yield f"  {key:<10} {answer[key]!r}  (the run: {was})"
    if answer["equal"] is None:
        yield "nothing to compare with: the run did not log this step"
    else:
        within = "to the bit" if tolerance == 0 else f"to {tolerance:g}"
        yield f"equal {within}" if answer["equal"] else f"DIFFERENT, compared {within}"
    if answer["report"] is not None:
        yield ""
        yield from report_lines(answer["report"], most)
