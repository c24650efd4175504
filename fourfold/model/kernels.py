"""Kernels for training on a CPU, as operations torch knows: attention, norms, gates, the loss.

They stand in for torch's own where these are slow on a processor. Attention skips the masked half,
rotates queries and keys as it loads them and keeps no table for dropout; the others read and write
memory once. The numbers are those of torch's kernels, to the rounding of a sum.

| operation          | instead of                                                              |
|--------------------|-------------------------------------------------------------------------|
| `causal_attention` | `rotate`, scaled_dot_product_attention, with dropout and documents      |
| `rms_norm`         | F.rms_norm, and the cast of what it gives                               |
| `gelu`             | F.gelu(approximate="tanh")                                              |
| `gate`             | F.silu(gate) * up, or with GELU                                         |
| `cross_entropy_`   | softmax, the loss and the gradient of the logits, in place              |

`usable` says whether they can be used: on a CPU, in float32 or bfloat16, where the C compiled
(fourfold/native). Everything else takes torch's way, which is the same mathematics. Tensors without
memory (meta, fake) follow the shapes, so a dry run sees what a run allocates.

Letters: B batch, T positions, H heads, G heads of keys and values, K head size, N tokens,
V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold import native

DTYPES = (torch.float32, torch.bfloat16)


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in DTYPES and _compiled()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled() -> bool:
    return _libraries() is not None


@cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    attention, rows = native.library("attention"), native.library("rows")
    return None if attention is None or rows is None else (attention, rows)


def _attention_library() -> ctypes.CDLL:
    libraries = _libraries()
    assert libraries is not None, "callers ask `usable` first"
    return libraries[0]


def _rows_library() -> ctypes.CDLL:
    libraries = _libraries()
    assert libraries is not None, "callers ask `usable` first"
    return libraries[1]


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("a kernel found no memory for its rows")


# Defined as operations so that fake tensors, the compiler and the profiler know them.
_operations = torch.library.Library("fourfold", "DEF")
_operations.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? turns, float scale, "
    "float dropout, int seed, int first_head) -> (Tensor, Tensor)"
)
_operations.define(
    "attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? starts, "
    "Tensor? turns, Tensor out, Tensor sums, float scale, float dropout, int seed, "
    "int first_head) -> Tensor[]"
)
_operations.define(
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)"
)
_operations.define(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor inverse) "
    "-> (Tensor, Tensor)"
)
_operations.define("gelu(Tensor x) -> Tensor")
_operations.define("gelu_out(Tensor x, Tensor(a!) y) -> ()")
_operations.define("gelu_backward(Tensor gradient, Tensor x) -> Tensor")
_operations.define("gate(Tensor gate, Tensor up, bool silu) -> Tensor")
_operations.define("gate_out(Tensor gate, Tensor up, bool silu, Tensor(a!) y) -> ()")
_operations.define(
    "gate_backward(Tensor gradient, Tensor gate, Tensor up, bool silu) -> (Tensor, Tensor)"
)
_operations.define(
    "cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor weights, bool gradient) -> Tensor"
)


# -- attention ------------------------------------------------------------------------------------


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
    given = map(_address, (q, k, v, starts, turns, out, sums))
    _check(_attention_library().attention_forward(ctypes.byref(shape), *given))
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
    given = map(_address, (q, k, v, starts, turns, out, sums, gradient, *parts))
    _check(_attention_library().attention_backward(ctypes.byref(shape), *given))
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


# -- RMSNorm --------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """F.rms_norm over the last dimension, in fp32 inside, as `dtype`."""
    return _RMSNorm.apply(x, weight, eps, dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, inverse = torch.ops.fourfold.rms_norm(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = torch.ops.fourfold.rms_norm_backward(gradient, *ctx.saved_tensors)
        return *given, None, None


def _rows(x: Tensor) -> Tensor:
    """(..., K) as (N, K): a view where the rows are evenly spaced, as heads in a product are."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y, inverse = _rms_norm_shapes(x, weight, eps, dtype)
    rows, weight = _rows(x), weight.float()
    low, low_out = x.dtype == torch.bfloat16, dtype == torch.bfloat16
    _rows_library().rms_norm_forward(
        *map(ctypes.c_int64, rows.shape),
        _address(rows),
        ctypes.c_int64(rows.stride(0)),
        *map(_address, (weight, y, inverse)),
        ctypes.c_float(eps),
        low,
        low_out,
    )
    return y, inverse


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight = x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)
    upstream, rows, wide = _rows(gradient), _rows(x), weight.float()
    low, low_out = x.dtype == torch.bfloat16, gradient.dtype == torch.bfloat16
    _check(
        _rows_library().rms_norm_backward(
            *map(ctypes.c_int64, rows.shape),
            _address(upstream),
            ctypes.c_int64(upstream.stride(0)),
            _address(rows),
            ctypes.c_int64(rows.stride(0)),
            *map(_address, (wide, inverse, dx, dweight)),
            low,
            low_out,
        )
    )
    return dx, dweight.to(weight.dtype)


def _rms_norm_shapes(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


# -- GELU -----------------------------------------------------------------------------------------


def gelu(x: Tensor, into: Scratch | None = None) -> Tensor:
    """GELU in its tanh form; the result may be `into` memory that is used again and again."""
    if usable(x.device, x.dtype):
        return _Gelu.apply(x, into)
    return F.gelu(x, approximate="tanh")


class Scratch:
    """Memory for results that are read at once and then done with.

    Results that come and go between others that stay leave gaps of their size behind, which smaller
    ones take: with these out of the way a step of GPT-2 124M takes a tenth less memory.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def like(self, x: Tensor) -> Tensor:
        held = self.buffer
        if held is None or held.numel() < x.numel() or held.dtype != x.dtype:
            held = self.buffer = x.new_empty(x.numel())
        return held[: x.numel()].view(x.shape)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, into: Scratch | None) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        if into is None:
            return torch.ops.fourfold.gelu(x)
        y = into.like(x.detach())
        torch.ops.fourfold.gelu_out(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.fourfold.gelu_backward(gradient, *ctx.saved_tensors), None


def _gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _gelu_out(x, y)
    return y


def _gelu_out(x: Tensor, y: Tensor) -> None:
    assert x.is_contiguous() and y.is_contiguous()
    low = x.dtype == torch.bfloat16
    _rows_library().gelu_forward(ctypes.c_int64(x.numel()), _address(x), _address(y), low)


def _gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    gradient, x = gradient.contiguous(), x.contiguous()
    made = torch.empty_like(x)
    given = map(_address, (x, gradient, made))
    low = x.dtype == torch.bfloat16
    _rows_library().gelu_backward(ctypes.c_int64(x.numel()), *given, low)
    return made


# -- gates ----------------------------------------------------------------------------------------


def gate(gate: Tensor, up: Tensor, silu: bool, into: Scratch | None = None) -> Tensor:
    """silu(gate) * up, or with GELU in its tanh form; `into` as for `gelu`."""
    if usable(gate.device, gate.dtype) and gate.dtype == up.dtype:
        return _Gate.apply(gate, up, silu, into)
    return (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")) * up


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, silu: bool, into: Scratch | None) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.silu = silu
        if into is None:
            return torch.ops.fourfold.gate(gate, up, silu)
        y = into.like(gate.detach())
        torch.ops.fourfold.gate_out(gate, up, silu, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = torch.ops.fourfold.gate_backward(gradient, *ctx.saved_tensors, ctx.silu)
        return *given, None, None


def _gate(gate: Tensor, up: Tensor, silu: bool) -> Tensor:
    y = torch.empty_like(gate)
    _gate_out(gate, up, silu, y)
    return y


def _gate_out(gate: Tensor, up: Tensor, silu: bool, y: Tensor) -> None:
    assert gate.shape == up.shape and all(one.is_contiguous() for one in (gate, up, y))
    low = gate.dtype == torch.bfloat16
    size = ctypes.c_int64(gate.numel())
    _rows_library().gate_forward(size, *map(_address, (gate, up, y)), silu, low)


def _gate_backward(gradient: Tensor, gate: Tensor, up: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    gradient, gate, up = (one.contiguous() for one in (gradient, gate, up))
    made = torch.empty_like(gate), torch.empty_like(up)
    low = gate.dtype == torch.bfloat16
    given = map(_address, (gate, up, gradient, *made))
    _rows_library().gate_backward(ctypes.c_int64(gate.numel()), *given, silu, low)
    return made


# -- the loss -------------------------------------------------------------------------------------


def cross_entropy_(logits: Tensor, labels: Tensor, weights: Tensor, gradient: bool) -> Tensor:
    """Token losses (N,) in float32 of logits (N, V) for labels (N,) within the vocabulary.

    With `gradient` the logits become that of the losses' sum by `weights` (N,), in place.
    """
    return torch.ops.fourfold.cross_entropy_(logits, labels, weights, gradient)


def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor, gradient: bool) -> Tensor:
    N, V = logits.shape
    assert logits.is_contiguous() and weights.dtype == torch.float32
    losses = torch.empty(N, dtype=torch.float32)
    if N and not (int(labels.min()) >= 0 and int(labels.max()) < V):
        raise IndexError(f"a label is outside of the {V} words of the vocabulary")
    given = map(_address, (logits, labels.contiguous(), weights.contiguous(), losses))
    low = logits.dtype == torch.bfloat16
    sizes = ctypes.c_int64(N), ctypes.c_int64(V)
    _check(_rows_library().cross_entropy(*sizes, *given, gradient, low))
    return losses


for _name, _kernel in {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "gelu": _gelu,
    "gelu_out": _gelu_out,
    "gelu_backward": _gelu_backward,
    "gate": _gate,
    "gate_out": _gate_out,
    "gate_backward": _gate_backward,
    "cross_entropy_": _cross_entropy,
}.items():
    _operations.impl(_name, _kernel, "CPU")


# -- shapes alone, of tensors without memory ------------------------------------------------------


_operations.impl("attention", _attention_shapes, "Meta")
_operations.impl("attention_backward", _attention_backward_shapes, "Meta")
_operations.impl("rms_norm", _rms_norm_shapes, "Meta")
_operations.impl(
    "rms_norm_backward",
    lambda gradient, x, weight, _: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    "Meta",
)
_operations.impl("gelu", lambda x: x.new_empty(x.shape), "Meta")
_operations.impl("gelu_out", lambda x, y: None, "Meta")
_operations.impl("gelu_backward", lambda gradient, x: x.new_empty(x.shape), "Meta")
_operations.impl("gate", lambda gate, up, silu: gate.new_empty(gate.shape), "Meta")
_operations.impl("gate_out", lambda gate, up, silu, y: None, "Meta")
_operations.impl(
    "gate_backward",
    lambda gradient, gate, up, silu: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    "Meta",
)
_operations.impl(
    "cross_entropy_",
    lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.float32),
    "Meta",
)
