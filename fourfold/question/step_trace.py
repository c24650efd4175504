"""A step written down: every logical tensor of it, in parts, as the ranks of a layout computed it.

A directory has two files for each rank: `rank_N.jsonl`, a line for each part, and `rank_N.bin`, the
bytes of all parts. A part is a rectangle of a logical tensor, which has a phase and a name:

    input     the batch: tokens, labels, loss mask, positions
    weight    parameters before the step
    forward   outputs of modules
    loss      of every token
    backward  gradients of those outputs
    gradient  of parameters, over the whole batch and all ranks
    norm      loss and gradient norm, as the step reports them
    rule      learning rate and weight decay that the update is made with
    update    parameters after the step

What belongs to samples has the rows of the global batch as its first dimension, so it is the same
tensor however the batch is cut. Parts are written as they are computed and read one at a time: of
a tensor no more is held than the part under way.
"""

from __future__ import annotations

import json
import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fourfold.config import Config
from fourfold.data import Batch
from fourfold.errors import UserError
from fourfold.shards import Box
from fourfold.trace import SeenTensor, TokenLosses, watch_modules

if TYPE_CHECKING:
    from fourfold.engine import Engine
    from fourfold.engine.resuming import OpenForeign
    from fourfold.engine.updates import StepResult

PHASES = (
    *("input", "weight", "forward", "loss", "backward", "gradient", "norm", "rule", "update"),
)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.bool),
    )
}
FACTS = "step.json"
Around = Callable[["Engine"], Any]  # a context in which the step is computed


@dataclass(frozen=True)
class TensorPart:
    """A rectangle of a logical tensor in a file."""

    phase: str
    name: str
    rank: int
    box: Box
    shape: tuple[int, ...]  # of the whole
    dtype: str
    at: int  # the first byte
    micro_batch: int = -1
    partial: bool = False  # whether the tensor is the sum of the ranks' parts with this rectangle

    @property
    def key(self) -> tuple[str, str]:
        return self.phase, self.name


class PartRecorder(ABC):
    """Takes the parts of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write(
        self,
        phase: str,
        name: str,
        tensor: Tensor,
        box: Box | None = None,
        shape: tuple[int, ...] | None = None,
        micro_batch: int = -1,
        *,
        partial: bool = False,
    ) -> None:
        """The next part: `box` is where it is in the whole, which has this `shape`."""
        values = tensor.detach().cpu().contiguous()
        if box is None:
            box = Box((0,) * values.dim(), tuple(values.shape))
        whole = tuple(values.shape) if shape is None else shape
        dtype = str(values.dtype).removeprefix("torch.")
        part = TensorPart(phase, name, self.rank, box, whole, dtype, 0, micro_batch, partial)
        self.take(part, values)

    @abstractmethod
    def take(self, part: TensorPart, values: Tensor) -> None:
        """The same, with where it is."""

    @abstractmethod
    def close(self) -> None:
        """There is no more."""


class StepRecorder(PartRecorder):
    """Writes them to files."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(rank)
        self._bytes = (directory / f"rank_{rank}.bin").open("wb")
        self._index = (directory / f"rank_{rank}.jsonl").open("w")
        self._end = 0

    def take(self, part: TensorPart, values: Tensor) -> None:
        self._index.write(json.dumps(asdict(replace(part, at=self._end))) + "\n")
        if values.numel():
            self._end += self._bytes.write(values.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._bytes.close()
        self._index.close()


class StepTrace:
    """A directory that `record_step` wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        file = directory / FACTS
        if not file.exists():
            raise UserError(
                f"{directory} is no trace of a step; `fourfold bisect --record` makes one"
            )
        self.facts: dict[str, Any] = json.loads(file.read_text())
        self.parts: dict[tuple[str, str], list[TensorPart]] = {}
        for rank in range(self.facts["world_size"]):
            for part in self._index(rank):
                self.parts.setdefault(part.key, []).append(part)

    def _index(self, rank: int) -> Iterator[TensorPart]:
        with (self.directory / f"rank_{rank}.jsonl").open() as lines:
            for line in lines:
                told = json.loads(line)
                told["box"] = Box(*map(tuple, told["box"]))
                told["shape"] = tuple(told["shape"])
                yield TensorPart(**told)

    def read(self, part: TensorPart, *, wide: bool = True) -> Tensor:
        """In float64, integers and truth values too, which it holds exactly up to 2^53; as it is
        if not `wide`."""
        dtype = DTYPES[part.dtype]
        if part.box.volume() == 0:
            return torch.empty(part.box.shape, dtype=torch.float64)
        values = torch.empty(part.box.shape, dtype=dtype)
        path = self.directory / f"rank_{part.rank}.bin"
        with path.open("rb") as file:  # buffered: a read of the system ends at 2 GB
            file.seek(part.at)
            if file.readinto(values.reshape(-1).view(torch.uint8).numpy().data) < values.nbytes:
                raise UserError(f"{path} ends before {part.phase} {part.name}; record it again")
        return values.double() if wide else values

    def whole(self, key: tuple[str, str]) -> Tensor | None:
        """A tensor that is small enough to be held, put together; None if nothing of it is here."""
        parts = self.parts.get(key)
        if not parts:
            return None
        shape = parts[0].shape
        values = torch.zeros(shape, dtype=torch.float64)
        everything = Box((0,) * len(shape), shape)
        for part in parts:
            values[part.box.within(everything)] = self.read(part, wide=False)
        return values


def record_step(
    config: Config,
    world_size: int,
    directory: Path,
    step: int | None = None,
    *,
    around: Around | None = None,
    prepare: Callable[[Engine], None] | None = None,
    open_foreign: OpenForeign | None = None,
    row: int | None = None,
    recorder: PartRecorder | None = None,
) -> dict[str, Any] | None:
    """Compute `step` (the next one by default) on this rank of `world_size`, and write it down.

    It is computed from where `config` says the run begins. `around` is a context for each step,
    `prepare` is called before the first. With `row`, in one process, the step is computed for the
    micro-batch of that row of the batch alone, and there is no update. A `recorder` may do
    something else with the parts than to write them. Returns the facts of the trace on rank 0.
    """
    from fourfold.engine import build_engine

    engine = build_engine(config, world_size, open_foreign=open_foreign)
    engine.resume()
    if prepare is not None:
        prepare(engine)
    begun = engine.step
    wanted = begun + 1 if step is None else step
    if not engine.step < wanted <= config.Engine.max_steps:
        raise UserError(
            f"--step {wanted}: from here this run has the steps {engine.step + 1} to "
            f"{config.Engine.max_steps}"
        )
    while engine.step < wanted - 1:
        with ExitStack() as stack:
            if around is not None:
                stack.enter_context(around(engine))
            engine.advance()
    directory.mkdir(parents=True, exist_ok=True)
    recorder = recorder or StepRecorder(directory, engine.mesh.rank)
    with ExitStack() as stack:
        if around is not None:
            stack.enter_context(around(engine))
        started = time.monotonic()
        result = _watched(engine, recorder, row)
        seconds = time.monotonic() - started
    recorder.close()
    # All have written then.
    peaks = engine.mesh.gather(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    facts = {
        **_facts(engine, result),
        "begun": begun,
        "seconds": seconds,
        "peak_bytes": sum(map(int, peaks)),
        **_rows_facts(engine, row),
    }
    if engine.mesh.rank == 0:
        (directory / FACTS).write_text(json.dumps(facts))
    engine.mesh.gather("")
    engine.data.close()
    if engine.claim is not None:
        engine.claim.release()
    engine.mesh.close()
    return facts if recorder.rank == 0 else None


def _facts(engine: Engine, result: StepResult) -> dict[str, Any]:
    mesh, runner = engine.mesh, engine.runner
    return {
        "step": result.step,
        "world_size": mesh.layout.world_size,
        "layout": str(mesh.layout),
        "dtype": str(runner.precision.dtype).removeprefix("torch."),
        "level": runner.precision.level,
        "compiled": engine.config.Engine.graph_mode == "static",
        "micro_batch_size": runner.micro_batch_size,
        "loss_scale": result.loss_scale,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "loss": repr(result.loss),
        "grad_norm": repr(result.norm),
        "applied": result.applied,
    }


def _rows_facts(engine: Engine, row: int | None) -> dict[str, Any]:
    """The first row and the number of rows that were computed, and the batch's."""
    total, size = engine.config.Data.batch_size.global_batch_size, engine.runner.micro_batch_size
    rows = [0, total] if row is None else [row // size * size, size]
    return {"rows": rows, "batch": total}


@dataclass(frozen=True)
class Rows:
    """Where this rank's rows are in the global batch."""

    first: int
    count: int
    size: int  # of a micro-batch
    first_micro_batch: int
    total: int

    @classmethod
    def of(cls, engine: Engine, batch: Batch) -> Rows:
        rows, size = len(batch.tokens), engine.runner.micro_batch_size
        rank, degree = engine.mesh.data_rank, engine.layout.data_degree
        return cls(rank * rows, rows, size, rank * -(-rows // size), rows * degree)

    def place(
        self, box: Box, shape: tuple[int, ...], micro_batch: int
    ) -> tuple[Box, tuple[int, ...]]:
        """Of a rectangle of one micro-batch in the tensor of the whole batch."""
        row = self.first + (micro_batch - self.first_micro_batch) * self.size
        return Box((row, *box.offsets[1:]), box.shape), (self.total, *shape[1:])


def is_seen(name: str, *, compiled: bool) -> bool:
    """Whether a module has an output of its own: inside of a layer that is compiled none has."""
    return not (compiled and name.startswith("layers.") and name.count(".") > 1)


def _watched(engine: Engine, recorder: PartRecorder, row: int | None) -> StepResult:
    runner, step = engine.runner, engine.step + 1
    batch = engine.data.loaders["train"].batch(engine.step)
    rows = Rows.of(engine, batch)
    scale = float(engine.updates.scale_of(engine.loss_scale))

    def take(seen: SeenTensor) -> None:
        if seen.recomputed or seen.micro_batch < 0:
            return
        box, shape = rows.place(seen.box, seen.shape, seen.micro_batch)
        values = seen.tensor / scale if seen.backward and scale != 1.0 else seen.tensor
        phase = "backward" if seen.backward else "forward"
        partial = seen.backward and _is_shared(engine, seen.name)
        recorder.write(phase, seen.name, values, box, shape, seen.micro_batch, partial=partial)

    def look(batch: Batch, scale: float) -> None:
        for shard in runner.shards.values():
            if shard.gradient is not None:
                values = shard.gradient / scale
                recorder.write("gradient", shard.name, values, shard.box, shard.shape)

    _write_inputs(recorder, rows, batch)
    # A step begins with float32 numbers, also one that goes on in float64.
    _write_weights(engine, recorder, "weight", as_float32=row is not None)
    losses = TokenLosses(runner)
    rates: list[float] = []
    _spy(engine, rates)
    compiled = engine.config.Engine.graph_mode == "static"
    wanted = partial(is_seen, compiled=compiled)
    with losses.attached(), watch_modules(runner, step, len(batch.tokens), take, wanted):
        losses.begin(step, batch)
        if row is None:
            result = engine.advance(look)
        else:
            result = _part_of_step(engine, batch, row, look)
            rows = replace(rows, first=row // rows.size * rows.size)
    table = losses.table(step, batch.tokens.shape[1])
    if table is not None:
        recorder.write("loss", "token losses", table, *_batch_place(rows, table))
    if row is not None:
        _write_rules(engine, recorder, engine.schedule.lr_at(step))
        return result
    for name, value in (("loss", result.loss), ("gradient norm", result.norm)):
        recorder.write("norm", name, torch.tensor([value], dtype=torch.float64))
    if rates:
        _write_rules(engine, recorder, rates[0])
    _write_weights(engine, recorder, "update")
    return result


def _part_of_step(
    engine: Engine, batch: Batch, row: int, look: Callable[[Batch, float], None]
) -> StepResult:
    """Forward and backward of one micro-batch in one process, as it is in the whole batch."""
    from fourfold.engine.updates import StepResult

    runner, step = engine.runner, engine.step + 1
    for part in runner.parts:
        part.train()
    number = row // runner.micro_batch_size
    seeds = runner.dropout_seeds(step, -(-len(batch.tokens) // runner.micro_batch_size))
    micro_batches = runner._micro_batches(batch, runner.micro_batch_size)
    tokens, arguments = next(islice(micro_batches, number, None))
    scale = 1 / batch.global_valid_tokens
    loss = runner.parts[0](tokens, **arguments, loss_scale=scale, dropout_seed=seeds[number])
    loss.backward()
    runner.reduce_gradients()
    look(batch, 1.0)
    return StepResult(step, float(loss.detach()), math.nan, 1.0, False)


def _is_shared(engine: Engine, name: str) -> bool:
    """Whether several model-parallel ranks have the same keys or values, each for its own queries:
    the gradient is then the sum of theirs."""
    holder, _, last = name.rpartition(".")
    weight = f"{holder}.in_proj.k.weight" if last == "k_norm" else f"{name}.weight"
    if ".in_proj." not in weight or weight not in engine.runner.table:
        return False
    degree = engine.layout.mp
    return engine.runner.table[weight].pieces(degree) < degree


def _batch_place(rows: Rows, tensor: Tensor) -> tuple[Box, tuple[int, ...]]:
    rest = tuple(tensor.shape[1:])
    return Box((rows.first, *(0 for _ in rest)), tuple(tensor.shape)), (rows.total, *rest)


def _write_inputs(recorder: PartRecorder, rows: Rows, batch: Batch) -> None:
    given: Mapping[str, Tensor | None] = {
        "tokens": batch.tokens,
        "labels": batch.labels,
        "loss mask": batch.loss_mask,
        "position ids": batch.position_ids,
        "document ids": batch.document_ids,
    }
    for name, tensor in given.items():
        if tensor is not None:
            recorder.write("input", name, tensor, *_batch_place(rows, tensor))
    valid = torch.tensor([batch.global_valid_tokens], dtype=torch.float64)
    recorder.write("input", "valid tokens", valid)


def _write_weights(
    engine: Engine, recorder: PartRecorder, phase: str, *, as_float32: bool = False
) -> None:
    for shard in engine.runner.shards.values():
        values = shard.local.float() if as_float32 else shard.local
        recorder.write(phase, shard.name, values, shard.box, shard.shape)


def _spy(engine: Engine, rates: list[float]) -> None:
    """Note the learning rate that the optimizer is given."""
    update = engine.optimizer.update

    def noted(learning_rate: float, *given: Any, **named: Any) -> None:
        rates.append(learning_rate)
        engine.optimizer.update = update  # type: ignore[method-assign]
        update(learning_rate, *given, **named)

    engine.optimizer.update = noted  # type: ignore[method-assign]


def _write_rules(engine: Engine, recorder: PartRecorder, learning_rate: float) -> None:
    """Learning rate and weight decay of each parameter that AdamW updates."""
    found = {}
    for key, parameter in engine.optimizer.parameters.items():
        for group in engine.optimizer.groups:
            if any(parameter is one or _within(parameter, one) for one in group.parameters):
                rate = learning_rate * group.lr_scale
                found[engine.runner.shards[key].name] = [rate, rate * group.weight_decay]
    for name, rule in found.items():
        recorder.write("rule", name, torch.tensor(rule, dtype=torch.float64))


def _within(parameter: Tensor, flat: Tensor) -> bool:
    """Whether it is a view of a flat tensor, as `Fused.tensor_fusion` makes them."""
    if hasattr(parameter, "_local_tensor") or not parameter.numel():
        return False
    return parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().mean())) if tensor.numel() else 0.0
