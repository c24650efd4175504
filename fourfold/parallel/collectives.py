"""Where a layer's work is cut over the model-parallel ranks: what goes in, what comes out.

Between the blocks each rank has either all of the activations or, with sequence parallelism, its
share of the positions. A block computes on all positions with a slice of the weights, and what
comes out of it is a partial sum.

| crossing | forward                     | backward       |
|----------|-----------------------------|----------------|
| enter    | nothing / gather positions  | sum / scatter  |
| leave    | sum / scatter               | nothing / gather |

left of the slash without, right of it with sequence parallelism; scatter means sum, then keep
the own positions. Letters: B batch, T positions of one rank, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fourfold.waiting import communicating


def enter(x: Tensor, group: ProcessGroup, by_sequence: bool) -> Tensor:
    """Into a block whose weights are cut."""
    return _Gather.apply(x, group) if by_sequence else _SumGradient.apply(x, group)


def leave(x: Tensor, group: ProcessGroup, by_sequence: bool) -> Tensor:
    """Out of such a block, with its partial sums added up."""
    return _Scatter.apply(x, group) if by_sequence else _Sum.apply(x, group)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    # A copy, and contiguous: gloo mixes up the elements of tensors that are not.
    summed = x.clone(memory_format=torch.contiguous_format)
    with communicating():
        dist.all_reduce(summed, group=group)
    return summed


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, T, D) of every rank -> (B, T * ranks, D)."""
    first = x.transpose(0, 1).contiguous()  # (T, B, D): positions outermost, as they are gathered
    whole = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
    with communicating():
        dist.all_gather_single(whole, first, group=group)
    return whole.transpose(0, 1).contiguous()


def _scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, T * ranks, D) -> the sum over the ranks, of the own positions (B, T, D)."""
    whole = x.transpose(0, 1).contiguous()
    own = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    with communicating():
        dist.reduce_scatter_single(own, whole, group=group)
    return own.transpose(0, 1).contiguous()
