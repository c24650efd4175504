"""Watching modules: every output and its gradient, as parts of logical tensors.

A logical tensor is what one process would have: the output of `layers.3.attn.qkv` for one
micro-batch of the global batch, whole. A rank has a rectangle of it (`SeenTensor.box`), cut as the
table of parameters says: features of a column-parallel layer, heads of attention, positions under
sequence parallelism, or all of it. Rectangles of two layouts with the same name and micro-batch are
parts of the same tensor, so they can be compared element by element, one tensor at a time.

    with watch_modules(runner, step, take, wanted=lambda name: name.endswith(".attn")):
        runner.run(batch, step)

`take` is called in the order of computation, with a tensor that must be read at once: a copy is the
caller's to make. Where a layer is recomputed in the backward pass its outputs are seen again, with
`recomputed` set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.model.gpt import GPT, MLP, CoreAttention, Head, HeadNorm
from fourfold.model.layers import Linears
from fourfold.parallel import Runner
from fourfold.shards import Box

Wanted = Callable[[str], bool]


@dataclass(frozen=True)
class SeenTensor:
    """This rank's part of a logical tensor, while it is being computed."""

    name: str  # of the module
    backward: bool  # whether it is the gradient of the module's output
    micro_batch: int  # numbered over the global batch
    tensor: Tensor
    box: Box  # of the whole tensor
    shape: tuple[int, ...]  # of the whole tensor
    replica: int  # which of the model-parallel ranks with this very rectangle
    recomputed: bool = False


Take = Callable[[SeenTensor], None]


class MicroBatches:
    """Which micro-batch of the global batch a part of the network is computing.

    The dropout seed that a part is called with is a function of step and micro-batch, and in a
    pipeline the only thing that tells one micro-batch from another.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.current = -1
        self.first = 0
        self._numbers: dict[int, int] = {}

    def begin(self, step: int, rows: int) -> None:
        """Before `Runner.run` of that step; `rows` are those of this rank."""
        count = -(-rows // self.runner.micro_batch_size)
        self.first = self.runner.mesh.data_rank * count
        seeds = self.runner.dropout_seeds(step, count)
        self._numbers = {seed: self.first + number for number, seed in enumerate(seeds)}

    def see(self, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of each part."""
        seed = kwargs.get("dropout_seed")
        self.current = self._numbers.get(int(seed), -1) if seed is not None else -1


@contextmanager
def watch_modules(
    runner: Runner,
    step: int,
    rows: int,
    take: Take,
    wanted: Wanted = lambda name: True,
    *,
    gradients: bool = True,
) -> Iterator[None]:
    """Hand every output of the modules that are `wanted`, and with `gradients` its gradient, to
    `take`, while this lasts; `rows` are those of this rank's batch."""
    micro_batches = MicroBatches(runner)
    micro_batches.begin(step, rows)
    handles: list[Any] = []
    for part in runner.parts:
        handles.append(part.register_forward_pre_hook(micro_batches.see, with_kwargs=True))
        for path, module in part.named_modules():
            if path and _is_watched(part, path, module) and wanted(path):
                watch = _Watch(runner, part, path, module, take, micro_batches, gradients)
                handles.append(module.register_forward_hook(watch))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_watched(part: GPT, path: str, module: nn.Module) -> bool:
    """Linear layers of one input are seen together: under sequence parallelism none is called."""
    if isinstance(part.get_submodule(path.rpartition(".")[0]), Linears):
        return False
    return isinstance(module, Linears) or not isinstance(module, Head | nn.ModuleDict)


@dataclass
class _Watch:
    """The forward hook of one module."""

    runner: Runner
    part: GPT
    path: str
    module: nn.Module
    take: Take
    micro_batches: MicroBatches
    gradients: bool

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(self.module, Linears):
            for name, one in zip(self.module, output):
                self._see(f"{self.path}.{name}", one)
        elif isinstance(output, Tensor):
            self._see(self.path, output)

    def _see(self, name: str, output: Tensor) -> None:
        box, shape, replica = place_of(self.runner, self.part, name, self.module, output)
        number = self.micro_batches.current
        known = partial(SeenTensor, name, micro_batch=number, box=box, shape=shape, replica=replica)
        # In the backward pass a layer is computed again, and no part is called.
        again = torch._C._current_graph_task_id() != -1
        self.take(known(backward=False, tensor=output.detach(), recomputed=again))
        if self.gradients and output.requires_grad and not again:
            output.register_hook(
                lambda gradient: self.take(known(backward=True, tensor=gradient.detach()))
            )


def place_of(
    runner: Runner, part: GPT, name: str, module: nn.Module, output: Tensor
) -> tuple[Box, tuple[int, ...], int]:
    """The rectangle that an output of this rank is, the shape of the whole, and which of the
    model-parallel ranks that have just it this one is."""
    degree, rank = runner.mesh.layout.mp, runner.mesh.coordinates["mp"]
    local = tuple(output.shape)
    whole = Box((0,) * len(local), local)
    if degree == 1:
        return whole, local, 0
    dim, pieces = _cut(runner, part, name, module, output)
    if dim is None:
        return whole, local, rank
    alike = degree // pieces
    offsets, shape = list(whole.offsets), list(local)
    if (row := _row(part, name)) is not None and dim == output.dim() - 1:
        offsets[dim], shape[dim] = row.cut(rank, degree)[0], row.shape[0]
    else:
        offsets[dim], shape[dim] = rank // alike * local[dim], pieces * local[dim]
    return Box(tuple(offsets), local), tuple(shape), rank % alike


def _cut(
    runner: Runner, part: GPT, name: str, module: nn.Module, output: Tensor
) -> tuple[int | None, int]:
    """The dimension along which model parallelism cuts an output, and into how many pieces."""
    degree = runner.mesh.layout.mp
    if isinstance(module, CoreAttention):
        return 1, degree
    if isinstance(module, HeadNorm):
        heads = "k" if name.endswith("k_norm") else "q"
        row = _row(part, f"{name.rpartition('.')[0]}.in_proj.{heads}")
        return 1, degree if row is None else row.pieces(degree)
    row = _row(part, name)
    if row is not None and row.split_dim == 0 and "embeddings" not in name:
        return output.dim() - 1, row.pieces(degree)
    holder = name.rpartition(".")[0]
    if name.endswith(".act") and isinstance(part.get_submodule(holder), MLP):
        return output.dim() - 1, degree
    # What is left is between the blocks: all of it, or this rank's positions.
    return (1, degree) if runner.sequence_parallel and output.dim() > 2 else (None, 1)


def _row(part: GPT, name: str) -> Any:
    """The row of the table for the weight of a linear layer or an embedding."""
    weight = f"{name}.weight"
    return part.table[weight] if weight in part.table else None  # noqa: SIM401  it has no get
