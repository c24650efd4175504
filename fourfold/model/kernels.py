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


def attention_library() -> ctypes.CDLL:
    libraries = _libraries()
    assert libraries is not None, "callers ask `usable` first"
    return libraries[0]


def _rows_library() -> ctypes.CDLL:
    libraries = _libraries()
    assert libraries is not None, "callers ask `usable` first"
    return libraries[1]


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def check(failed: int) -> None:
    if failed:
        raise MemoryError("a kernel found no memory for its rows")


# Defined as operations so that fake tensors, the compiler and the profiler know them.
operations = torch.library.Library("fourfold", "DEF")
operations.define(
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)"
)
operations.define(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor inverse) "
    "-> (Tensor, Tensor)"
)
operations.define("gelu(Tensor x) -> Tensor")
operations.define("gelu_out(Tensor x, Tensor(a!) y) -> ()")
operations.define("gelu_backward(Tensor gradient, Tensor x) -> Tensor")
operations.define("gate(Tensor gate, Tensor up, bool silu) -> Tensor")
operations.define("gate_out(Tensor gate, Tensor up, bool silu, Tensor(a!) y) -> ()")
operations.define(
    "gate_backward(Tensor gradient, Tensor gate, Tensor up, bool silu) -> (Tensor, Tensor)"
)
operations.define(
    "cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor weights, bool gradient) -> Tensor"
)


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
        address(rows),
        ctypes.c_int64(rows.stride(0)),
        *map(address, (weight, y, inverse)),
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
    check(
        _rows_library().rms_norm_backward(
            *map(ctypes.c_int64, rows.shape),
            address(upstream),
            ctypes.c_int64(upstream.stride(0)),
            address(rows),
            ctypes.c_int64(rows.stride(0)),
            *map(address, (wide, inverse, dx, dweight)),
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
    _rows_library().gelu_forward(ctypes.c_int64(x.numel()), address(x), address(y), low)


def _gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    gradient, x = gradient.contiguous(), x.contiguous()
    made = torch.empty_like(x)
    given = map(address, (x, gradient, made))
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
    _rows_library().gate_forward(size, *map(address, (gate, up, y)), silu, low)


def _gate_backward(gradient: Tensor, gate: Tensor, up: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    gradient, gate, up = (one.contiguous() for one in (gradient, gate, up))
    made = torch.empty_like(gate), torch.empty_like(up)
    low = gate.dtype == torch.bfloat16
    given = map(address, (gate, up, gradient, *made))
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
    given = map(address, (logits, labels.contiguous(), weights.contiguous(), losses))
    low = logits.dtype == torch.bfloat16
    sizes = ctypes.c_int64(N), ctypes.c_int64(V)
    check(_rows_library().cross_entropy(*sizes, *given, gradient, low))
    return losses


for _name, _kernel in {
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
    operations.impl(_name, _kernel, "CPU")


# -- shapes alone, of tensors without memory ------------------------------------------------------


operations.impl("rms_norm", _rms_norm_shapes, "Meta")
operations.impl(
    "rms_norm_backward",
    lambda gradient, x, weight, _: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    "Meta",
)
operations.impl("gelu", lambda x: x.new_empty(x.shape), "Meta")
operations.impl("gelu_out", lambda x, y: None, "Meta")
operations.impl("gelu_backward", lambda gradient, x: x.new_empty(x.shape), "Meta")
operations.impl("gate", lambda gate, up, silu: gate.new_empty(gate.shape), "Meta")
operations.impl("gate_out", lambda gate, up, silu, y: None, "Meta")
operations.impl(
    "gate_backward",
    lambda gradient, gate, up, silu: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    "Meta",
)
operations.impl(
    "cross_entropy_",
    lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.float32),
    "Meta",
)
