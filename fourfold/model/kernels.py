"""Kernels for training on a CPU, as operations torch knows: attention, GELU, the loss.

They stand in for torch's own where these are slow on a processor. Attention skips the masked half
and keeps no table for dropout; GELU and the loss read and write memory once. The numbers are those
of torch's kernels, to the rounding of a sum.

| operation                   | instead of                                                    |
|-----------------------------|---------------------------------------------------------------|
| `causal_attention`          | scaled_dot_product_attention, with dropout and documents      |
| `gelu`                      | F.gelu(approximate="tanh")                                    |
| `cross_entropy_`            | softmax, the loss and the gradient of the logits, in place    |

`usable` says whether they can be used: on a CPU, in float32 or bfloat16, where the C compiled
(fourfold/native). Everything else takes torch's way, which is the same mathematics. Tensors without
memory (meta, fake) follow the shapes, so a dry run sees what a run allocates.

Letters: B batch, T positions, H heads, K head size, N tokens, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
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
    "attention(Tensor q, Tensor k, Tensor v, Tensor? starts, float dropout, int seed, "
    "int first_head) -> (Tensor, Tensor)"
)
_operations.define(
    "attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor out, "
    "Tensor sums, float dropout, int seed, int first_head) -> Tensor"
)
_operations.define("gelu(Tensor x) -> Tensor")
_operations.define("gelu_out(Tensor x, Tensor(a!) y) -> ()")
_operations.define("gelu_backward(Tensor gradient, Tensor x) -> Tensor")
_operations.define(
    "cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor weights, bool gradient) -> Tensor"
)


# -- attention ------------------------------------------------------------------------------------


class _Shape(ctypes.Structure):
    """`Shape` of attention.c."""

    _fields_ = [
        ("sizes", ctypes.c_int64 * 4),
        ("strides", (ctypes.c_int64 * 3) * 3),
        ("gradient_strides", ctypes.c_int64 * 3),
        ("first_head", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("scale", ctypes.c_float),
        ("dropout", ctypes.c_float),
        ("low", ctypes.c_int32),
    ]

    @classmethod
    def of(
        cls, given: tuple[Tensor, Tensor, Tensor], dropout: float, seed: int, first_head: int
    ) -> _Shape:
        B, H, T, K = given[0].shape
        strides = [(one.stride(0), one.stride(2), one.stride(1)) for one in given]
        return cls(
            (B, H, T, K),
            tuple(strides),
            (T * H * 3 * K, H * 3 * K, 3 * K),
            first_head,
            seed,
            1.0 / math.sqrt(K),
            dropout,
            given[0].dtype == torch.bfloat16,
        )


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, dropout: float, first_head: int = 0
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v of (B, H, T, K) each; the result is a view of (B, T, H, K).

    Each token attends to itself and those before it, from `starts` (B, T) on where given. Which
    probabilities are dropped follows from the seed of the default generator, the place in the
    batch, the head's number in the model and the two positions, and from nothing else.
    """
    if k.shape[1] != q.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
    seed = torch.default_generator.initial_seed() if dropout > 0 else 0
    return _Attention.apply(q, k, v, starts, dropout, seed & (2**63 - 1), first_head)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None,
        dropout: float,
        seed: int,
        first_head: int,
    ) -> Tensor:
        out, sums = torch.ops.fourfold.attention(q, k, v, starts, dropout, seed, first_head)
        ctx.save_for_backward(q, k, v, starts, out, sums)
        ctx.drawn = dropout, seed, first_head
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.transpose(1, 2).contiguous()  # (B, T, H, K)
        grads = torch.ops.fourfold.attention_backward(gradient, *ctx.saved_tensors, *ctx.drawn)
        return *grads.transpose(1, 2).unbind(3), None, None, None, None


def _attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, dropout: float, seed: int, head: int
) -> tuple[Tensor, Tensor]:
    B, H, T, K = q.shape
    q, k, v = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k, v))
    out, sums = q.new_empty(B, T, H, K), q.new_empty(B, H, T, dtype=torch.float32)
    shape = _Shape.of((q, k, v), dropout, seed, head)
    given = (*map(_address, (q, k, v, starts)), _address(out), _address(sums))
    _check(_attention_library().attention_forward(ctypes.byref(shape), *given))
    return out, sums


def _attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    out: Tensor,
    sums: Tensor,
    dropout: float,
    seed: int,
    head: int,
) -> Tensor:
    """All three gradients as one (B, T, H, 3, K), the layout of a product that made q, k and v."""
    B, H, T, K = q.shape
    q, k, v = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k, v))
    grads = q.new_empty(B, T, H, 3, K)
    shape = _Shape.of((q, k, v), dropout, seed, head)
    given = map(_address, (q, k, v, starts, out, sums, gradient, *grads.unbind(3)))
    _check(_attention_library().attention_backward(ctypes.byref(shape), *given))
    return grads


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
    "gelu": _gelu,
    "gelu_out": _gelu_out,
    "gelu_backward": _gelu_backward,
    "cross_entropy_": _cross_entropy,
}.items():
    _operations.impl(_name, _kernel, "CPU")


# -- shapes alone, of tensors without memory ------------------------------------------------------


def _attention_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H, T, K = q.shape
    return q.new_empty(B, T, H, K), q.new_empty(B, H, T, dtype=torch.float32)


def _attention_backward_shape(gradient: Tensor, q: Tensor, *_: Any) -> Tensor:
    B, H, T, K = q.shape
    return q.new_empty(B, T, H, 3, K)


_operations.impl("attention", _attention_shapes, "Meta")
_operations.impl("attention_backward", _attention_backward_shape, "Meta")
_operations.impl("gelu", lambda x: x.new_empty(x.shape), "Meta")
_operations.impl("gelu_out", lambda x, y: None, "Meta")
_operations.impl("gelu_backward", lambda gradient, x: x.new_empty(x.shape), "Meta")
_operations.impl(
    "cross_entropy_",
    lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.float32),
    "Meta",
)
