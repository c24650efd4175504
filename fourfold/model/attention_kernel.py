"""Causal attention on a CPU, as an operation torch knows: rotary positions, shared keys and values,
documents, windows and dropout inside of it.

It skips the masked half, rotates queries and keys as it loads them and keeps no table for dropout.
The numbers are those of `rotate` and scaled_dot_product_attention, to the rounding of a sum.

Letters: B batch, T positions, H heads, G heads of keys and values, K head size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.model.kernels import address, attention_library, check, operations

operations.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? turns, float scale, "
    "float dropout, int seed, int first_head) -> (Tensor, Tensor)"
)
operations.define(
    "attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? starts, "
    "Tensor? turns, Tensor out, Tensor sums, float scale, float dropout, int seed, "
    "int first_head) -> Tensor[]"
)


class _Shape(ctypes.Structure):
    """`Shape` of attention.c."""

    _fields_ = [
        ("sizes", ctypes.c_int64 * 5),
        ("strides", (ctypes.c_int64 * 3) * 3),
        ("gradient_strides", (ctypes.c_int64 * 3) * 3),
        ("rotated", ctypes.c_int64),
        ("turn_stride", ctypes.c_int64),
        ("first_head", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("scale", ctypes.c_float),
        ("dropout", ctypes.c_float),
        ("low", ctypes.c_int32),
    ]

    @classmethod
    def of(
        cls,
        given: Sequence[Tensor],
        turns: Tensor | None,
        drawn: tuple[float, float, int, int],
        gradients: Sequence[Tensor] = (),
    ) -> _Shape:
        """Of q, k and v (B, H or G, T, K), and their gradients."""
        (B, H, T, K), G = given[0].shape, given[1].shape[1]
        if T == 0 or H % G != 0:
            raise ValueError(f"attention over {T} tokens, of {H} heads to {G} of keys and values")
        (scale, dropout, seed, first_head), rotated, stride = drawn, 0, 0
        if turns is not None:
            assert turns.is_contiguous() and turns.dtype == torch.float32
            rotated = turns.shape[-1]
            stride = T * rotated if turns.shape[1] > 1 else 0
            if turns.shape != (2, B if stride else 1, T, rotated) or 2 * rotated > K:
                raise ValueError(f"rotary positions {tuple(turns.shape)} for {(B, H, T, K)}")
        low = given[0].dtype == torch.bfloat16
        return cls(
            (B, H, G, T, K),
            _strides(given),
            _strides(gradients),
            rotated,
            stride,
            first_head,
            seed,
            scale,
            dropout,
            low,
        )


def _strides(heads: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """From sequence to sequence, position to position and head to head."""
    return tuple((one.stride(0), one.stride(2), one.stride(1)) for one in heads)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    dropout: float,
    first_head: int = 0,
    turns: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v of q (B, H, T, K), k and v (B, G, T, K): a view of (B, T, H, K).

    Each token attends to itself and those before it, from `starts` (B, T) on where given. With
    `turns`, as `rotation` gives them, q and k are rotated first. `scale` is 1 / sqrt(K) if not
    given. Which probabilities are dropped follows from the seed of the default generator, the place
    in the batch, the head's number in the model and the two positions, and from nothing else.
    """
    seed = torch.default_generator.initial_seed() if dropout > 0 else 0
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    drawn = scale, dropout, seed & (2**63 - 1), first_head
    return _Attention.apply(q, k, v, starts, turns, *drawn)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None,
        turns: Tensor | None,
        scale: float,
        dropout: float,
        seed: int,
        first_head: int,
    ) -> Tensor:
        ctx.drawn = scale, dropout, seed, first_head
        out, sums = torch.ops.fourfold.attention(q, k, v, starts, turns, *ctx.drawn)
        ctx.save_for_backward(q, k, v, starts, turns, out, sums)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.transpose(1, 2).contiguous()  # (B, T, H, K)
        grads = torch.ops.fourfold.attention_backward(gradient, *ctx.saved_tensors, *ctx.drawn)
        return *_heads(grads), *[None] * 6


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    turns: Tensor | None,
    *drawn: Any,
) -> tuple[Tensor, Tensor]:
    out, sums = _attention_shapes(q)
    q, k, v = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k, v))
    shape = _Shape.of((q, k, v), turns, drawn)
    given = map(address, (q, k, v, starts, turns, out, sums))
    check(attention_library().attention_forward(ctypes.byref(shape), *given))
    return out, sums


def _attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    turns: Tensor | None,
    out: Tensor,
    sums: Tensor,
    *drawn: Any,
) -> list[Tensor]:
    grads = _attention_backward_shapes(gradient, q, k)
    q, k, v = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k, v))
    parts = _heads(grads)
    shape = _Shape.of((q, k, v), turns, drawn, parts)
    given = map(address, (q, k, v, starts, turns, out, sums, gradient, *parts))
    check(attention_library().attention_backward(ctypes.byref(shape), *given))
    return grads


def _attention_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H, T, K = q.shape
    return q.new_empty(B, T, H, K), q.new_empty(B, H, T, dtype=torch.float32)


def _attention_backward_shapes(gradient: Tensor, q: Tensor, k: Tensor, *_: Any) -> list[Tensor]:
    """In the layout of the products that made q, k and v: with as many heads each, all three as one
    (B, T, H, 3, K); else three, (B, T, H or G, K) each."""
    (B, H, T, K), G = q.shape, k.shape[1]
    if H == G:
        return [q.new_empty(B, T, H, 3, K)]
    return [q.new_empty(B, T, heads, K) for heads in (H, G, G)]


def _heads(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those gradients as (B, H or G, T, K) each."""
    return [one.transpose(1, 2) for one in (grads[0].unbind(3) if len(grads) == 1 else grads)]


def split_heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, H, 3, K) -> q, k and v (B, H, T, K) each, as views.

    Where their gradients are views of one such tensor, it is taken as it is, without a copy.
    """
    return _SplitHeads.apply(qkv)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.transpose(1, 2).unbind(3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        whole = grads[0]._base
        if whole is not None and whole.dim() == 5 and all(g._base is whole for g in grads):
            views = whole.transpose(1, 2).unbind(3)
            if all(_same_memory(one, other) for one, other in zip(views, grads, strict=True)):
                return whole
        return torch.stack(grads, dim=3).transpose(1, 2)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.storage_offset()) == (
        other.shape,
        other.stride(),
        other.storage_offset(),
    )


def document_starts(document_ids: Tensor) -> Tensor:
    """The position at which each token's document begins, (B, T) int32.

    A document is a run of equal ids: what follows another document has another id.
    """
    T = document_ids.shape[1]
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    positions = torch.arange(T, device=document_ids.device, dtype=torch.int32)
    return torch.where(begins, positions, 0).cummax(dim=1).values.to(torch.int32)


def within_window(starts: Tensor, window: int) -> Tensor:
    """The same where a token sees `window` tokens at most, itself included."""
    positions = torch.arange(starts.shape[1], device=starts.device, dtype=torch.int32)
    return torch.maximum(starts, positions - (window - 1))


operations.impl("attention", _attention, "CPU")
operations.impl("attention_backward", _attention_backward, "CPU")
operations.impl("attention", _attention_shapes, "Meta")
operations.impl("attention_backward", _attention_backward_shapes, "Meta")
