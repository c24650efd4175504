"""The float64 reference of a step, and how far rounding alone may take a layout from it.

The reference is one process that computes in float64 with torch's own operations. What another
layout differs by, if nothing is wrong, is rounding: each operation's result is off by a small
random amount, and everything after it carries that on. Both are taken from the step itself. A
second float64 run gets after every operation an error of the size that the precision in question
makes there (Monte Carlo arithmetic):

    y + e * rms(y) * z,    e = u + sqrt(n) * u_sum,    z standard normal

where u is the unit roundoff of the dtype that results are kept in, u_sum that of the one that sums
are made in (float32, or the dtype itself if it is wider), n the number of terms of the sum, and rms
is over the last dimension of y: errors of n roundings add up like a random walk (Higham and Mary,
2019), in terms as large as a row's elements and not as one element that came out small. How far
that run is from the reference, tensor by tensor, is the noise: weights, depth, softmax, norms and
the division in Adam's update act on the errors as they do in this very step.

`SAFETY` times the largest deviation, and the same for the root of the mean square, is the bound.
For normal errors another draw of 16 numbers or more is beyond 4 times the largest of the first
with a probability below 1e-9; kernels that add in blocks err less than a random walk of n steps.
Adam's update is not normal where a gradient is next to zero: see `flips`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from fourfold.config import Config
from fourfold.data import Batch
from fourfold.model.gpt import CoreAttention, Embedding, Head, HeadNorm
from fourfold.question.step_trace import (
    FACTS,
    PartRecorder,
    StepTrace,
    TensorPart,
    record_step,
)

if TYPE_CHECKING:
    from fourfold.engine import Engine
    from fourfold.engine.resuming import OpenForeign

SAFETY = 4.0
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
# Half of the smallest difference of two float16 numbers: gradients below it vanish.
LEAST_FLOAT16 = 2.0**-25
# Phases whose numbers are kept in float32 or better.
IN_FLOAT32 = ("input", "weight", "loss", "norm", "rule", "update")
# What a rounded gradient may move Adam's update by, in learning rates.
FLIP = 4.0
SEED = 17
# One process in float64, whatever the layout of the two that are compared.
OF_REFERENCE = (
    "Data.batch_size.local_batch_size=null",
    "Engine.accumulate_steps=null",
    "Distributed.dp_degree=1",
    "Distributed.mp_degree=1",
    "Distributed.pp_degree=1",
    "Distributed.pp_schedule=1F1B",
    "Distributed.virtual_pp_degree=1",
    "Distributed.pp_layers=null",
    "Distributed.sharding.sharding_degree=1",
    "Distributed.sharding.sharding_stage=1",
    "Distributed.sharding.sharding_offload=False",
    "Model.sequence_parallel=False",
    "Model.use_recompute=False",
    "Engine.graph_mode=dynamic",
    "Engine.mix_precision.dtype=float32",
    "Engine.mix_precision.level=null",
    "Fused.tensor_fusion=False",
)


def record_reference(
    config: Config,
    directory: Path,
    step: int | None,
    open_foreign: OpenForeign | None = None,
    row: int | None = None,
) -> dict[str, Any] | None:
    """Compute and write down the step in float64; with `row` only up to the gradients of the
    micro-batch in which that row is."""
    with _default_dtype_kept():
        return record_step(
            *(config, 1, directory, step),
            prepare=widen if row is None else widen_without_optimizer,
            open_foreign=open_foreign,
            row=row,
        )


def record_rounded(
    config: Config,
    directory: Path,
    exact: StepTrace,
    roundoff: float,
    open_foreign: OpenForeign | None = None,
    row: int | None = None,
) -> dict[str, Any] | None:
    """Compute the same under errors of the size of `roundoff`, and write down how far each tensor
    of it is from the `exact` one."""
    with _default_dtype_kept():
        return record_step(
            *(config, 1, directory, exact.facts["step"]),
            around=partial(rounding, roundoff=roundoff),
            prepare=widen if row is None else widen_without_optimizer,
            open_foreign=open_foreign,
            row=row,
            recorder=NoiseRecorder(exact, directory),
        )


def record_update(
    config: Config, directory: Path, side: StepTrace, open_foreign: OpenForeign | None = None
) -> dict[str, Any] | None:
    """What follows in float64 from the gradients of a side: their norm, and the update."""
    with _default_dtype_kept():
        return record_step(
            *(config, 1, directory, side.facts["step"]),
            around=partial(gradients_given, side=side),
            prepare=widen,
            open_foreign=open_foreign,
        )


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def gradients_given(engine: Engine, side: StepTrace) -> Iterator[None]:
    """While this lasts, a one-process engine has the loss and the gradients of `side`, and computes
    none."""
    runner = engine.runner
    run = runner.run

    def given(batch: Batch, step: int, loss_scale: float | Tensor = 1.0) -> Tensor:
        for shard in runner.shards.values():
            shard.tensor.grad = side.whole(("gradient", shard.name))
        return torch.tensor(float(side.facts["loss"]))

    runner.run = given  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.run = run  # type: ignore[method-assign]


def widen_without_optimizer(engine: Engine) -> None:
    """Compute gradients in float64 and no update: weights and gradients of 8 bytes each take what
    a step in float32 takes with its moments."""
    torch.set_default_dtype(torch.float64)
    for group in engine.optimizer.groups:
        group.exp_avg, group.exp_avg_sq = [], []
    if engine.optimizer.muon is not None:
        engine.optimizer.muon.momentum.clear()
    engine.optimizer.ema = None
    for parameter in engine.runner.parameters.values():
        parameter.data = parameter.data.double()


def widen(engine: Engine) -> None:
    """Go on in float64, from the float32 numbers that weights and moments begin with."""
    torch.set_default_dtype(torch.float64)
    for parameter in engine.runner.parameters.values():
        parameter.data = parameter.data.double()
    optimizer = engine.optimizer
    for group in optimizer.groups:
        group.exp_avg = [moment.double() for moment in group.exp_avg]
        group.exp_avg_sq = [moment.double() for moment in group.exp_avg_sq]
    if optimizer.muon is not None:
        momentum = optimizer.muon.momentum
        momentum.update({key: one.double() for key, one in momentum.items()})
    optimizer.ema = None  # of the weights, which do not depend on it


@contextmanager
def rounding(engine: Engine, roundoff: float) -> Iterator[None]:
    """While this lasts, every operation of a one-process engine has a rounding error."""
    (part,) = engine.runner.parts
    shape = part.shape
    # A generator of its own: dropout must drop the same.
    draw = torch.Generator().manual_seed(SEED + engine.step)
    widest = max(shape.ffn_hidden_size, 3 * shape.hidden_size)

    def error_of(terms: int) -> float:
        return roundoff + math.sqrt(terms) * min(roundoff, UNIT_ROUNDOFF["float32"])

    def rounded(tensor: Tensor, size: float) -> Tensor:
        rows = tensor.detach()
        scale = rows.square().mean(-1, keepdim=True).sqrt() if rows.dim() else rows.abs()
        # Drawn in float32, which is faster: the size of an error matters, not its last digits.
        noise = torch.randn(rows.shape, generator=draw, dtype=torch.float32).to(rows)
        return tensor + noise.mul_(size * scale)

    def after(
        module: nn.Module, args: Any, output: Any, *, ahead: float, back: float
    ) -> Tensor | list[Tensor] | None:
        if isinstance(output, Tensor):
            return one(output, ahead, back)
        return [one(made, ahead, back) for made in output]

    def one(output: Tensor, ahead: float, back: float) -> Tensor:
        made = rounded(output, ahead)
        if made.requires_grad:
            made.register_hook(lambda gradient: rounded(gradient, back))
        return made

    handles = []
    for path, module in part.named_modules():
        if not path or isinstance(module, Head | nn.ModuleDict):
            continue
        ahead = error_of(_terms(module, shape.hidden_size, engine.config))
        back = error_of(shape.vocab_size if path == "norm" else widest)
        hook = partial(after, ahead=ahead, back=back)
        handles.append(module.register_forward_hook(hook))
    tokens = engine.runner.micro_batch_size * engine.config.Data.dataset.max_seq_len
    for parameter in part.parameters():
        handles.append(parameter.register_hook(partial(rounded, size=error_of(tokens))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _terms(module: nn.Module, width: int, config: Config) -> int:
    """How many terms the sums of a module have."""
    if isinstance(module, CoreAttention):
        return config.Data.dataset.max_seq_len
    if isinstance(module, Embedding):
        return 1
    if isinstance(module, HeadNorm) or (children := list(module.children())) == []:
        weight = getattr(module, "weight", None)
        return weight.shape[-1] if isinstance(weight, Tensor) else 4
    return width if len(children) > 2 else 4


@dataclass(frozen=True)
class Noise:
    """How far rounding takes a logical tensor from the reference."""

    largest: float  # deviation of an element
    typical: float  # the root of the mean square of them
    magnitude: float  # the largest element of the reference
    size: float  # the root of the mean square of its elements

    def bounds(self, side: Mapping[str, Any], phase: str) -> tuple[float, float]:
        """For an element and for the root of the mean square, on a side of this precision.

        Weights and the optimizer are float32 whatever the activations are.
        """
        kept = UNIT_ROUNDOFF["float32"]
        stored = kept if phase in IN_FLOAT32 else max(roundoff_of(side), kept)
        floor = 0.0
        if side["dtype"] == "float16" and phase in ("backward", "gradient"):
            floor = SAFETY * LEAST_FLOAT16 / side["loss_scale"]
        # Numbers are at best rounded once where they are kept, also those nothing was added to.
        element = SAFETY * self.largest + 2 * stored * self.magnitude + floor
        return element, SAFETY * self.typical + 2 * stored * self.size + floor


def roundoff_of(side: Mapping[str, Any]) -> float:
    return UNIT_ROUNDOFF[side["dtype"]]


Measured = dict[tuple[str, str], Noise]
NOISE = "noise.json"


@dataclass
class _Sums:
    """Of the parts of a logical tensor that were seen so far."""

    largest: float = 0.0
    magnitude: float = 0.0
    squares: float = 0.0
    whole: float = 0.0
    count: int = 0

    def add(self, exact: Tensor, rounded: Tensor) -> None:
        self.magnitude = max(self.magnitude, float(vector_norm(exact, math.inf)))
        self.whole += float(vector_norm(exact)) ** 2
        self.count += exact.numel()
        apart = exact.sub_(rounded)
        largest = float(vector_norm(apart, math.inf))
        if largest:
            self.largest = max(self.largest, largest)
            self.squares += float(vector_norm(apart)) ** 2

    def noise(self) -> Noise:
        typical, size = (math.sqrt(one / max(self.count, 1)) for one in (self.squares, self.whole))
        return Noise(self.largest, typical, self.magnitude, size)


class NoiseRecorder(PartRecorder):
    """Takes the parts of a run under rounding errors in the order of the exact run's, and keeps of
    every logical tensor how far it is from that."""

    def __init__(self, exact: StepTrace, directory: Path) -> None:
        super().__init__(rank=0)
        self._exact, self._file = exact, directory / NOISE
        self._parts = {key: iter(parts) for key, parts in exact.parts.items()}
        self._sums = {key: _Sums() for key in exact.parts}

    def take(self, part: TensorPart, values: Tensor) -> None:
        same = next(self._parts[part.key], None)
        assert same is not None and part.box == same.box, f"{part.name}: not as in the exact run"
        if values.numel():
            self._sums[part.key].add(self._exact.read(same), values.double())

    def close(self) -> None:
        left = [key for key, parts in self._parts.items() if next(parts, None) is not None]
        assert not left, f"{left[0]}: not all of it, as in the exact run"
        found = {key: sums.noise() for key, sums in self._sums.items()}
        # One number deviates by chance hardly at all. A mean deviates by no more than the terms do,
        # a norm by no more than the norm of the deviation.
        gradient = sum(sums.squares for key, sums in self._sums.items() if key[0] == "gradient")
        for key, most in (
            (("norm", "loss"), found["loss", "token losses"].largest),
            (("norm", "gradient norm"), math.sqrt(gradient)),
        ):
            if key in found:  # a sample of the batch has none
                found[key] = Noise(most, most, found[key].magnitude, found[key].size)
        lines = [[*key, *astuple(noise)] for key, noise in found.items()]
        self._file.write_text(json.dumps(lines))


@dataclass(frozen=True)
class RoundedStep:
    """A directory that `record_rounded` wrote."""

    facts: dict[str, Any]
    noise: Measured

    @classmethod
    def read(cls, directory: Path) -> RoundedStep:
        lines = json.loads((directory / NOISE).read_text())
        noise = {(phase, name): Noise(*numbers) for phase, name, *numbers in lines}
        return cls(json.loads((directory / FACTS).read_text()), noise)


def flips(gradient: Tensor, noise: Noise, rate: float) -> Tensor:
    """How far rounding may take each element that AdamW updates, beyond what was measured.

    Adam divides a gradient by its own size, so an element whose gradient is hardly more than
    rounding may go either way, and which ones do is chance. Its update is at most
    c = (1 - beta1) / sqrt(1 - beta2) learning rates, 3.2 with the usual betas, and an error d of a
    gradient g moves it by at most c d / |g| of them.
    """
    off = SAFETY * noise.largest
    return rate * FLIP * (off / gradient.abs().clamp_min(1e-300)).clamp_max(1.0)
