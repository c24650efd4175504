"""Positions: rotary ones (RoPE), and which positions a token sees.

Queries and keys are rotated by angles that grow with the position.

A head's first `rotary_size` numbers are pairs, number i with number i + rotary_size / 2; pair i of
a token at position p is turned by the angle p * frequency[i]. A product of a query and a key then
depends on how far apart they are, and on nothing else of where they are.

`frequencies` has the rules by which models are stretched beyond the length they were trained for,
as `transformers` computes them: linear, llama3, yarn. `attention_mask` keeps tokens within their
document and their window.

Letters: B batch, T positions, H heads, K head size, R rotated numbers of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fourfold.model import kernels
from fourfold.model.attention_kernel import document_starts, within_window
from fourfold.model.loss import compute_dtype
from fourfold.model.params import ModelShape


def frequencies(shape: ModelShape, device: torch.device | None = None) -> Tensor:
    """Radians a position, of each pair: (R / 2,) in float32, computed where they are needed."""
    size = shape.rotary_size
    even = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    plain = 1.0 / shape.rope_theta ** (even / size)
    scaling = shape.rope_scaling
    if scaling.type == "linear":
        return plain / scaling.factor
    if scaling.type == "llama3":
        return _llama3(plain, shape)
    if scaling.type == "yarn":
        return _yarn(plain, shape)
    return plain


def _original_length(shape: ModelShape) -> int:
    scaling = shape.rope_scaling
    return scaling.original_max_position_embeddings or int(
        shape.max_position_embeddings / scaling.factor
    )


def _llama3(plain: Tensor, shape: ModelShape) -> Tensor:
    """Waves that fit well into the original length stay, long ones are stretched, those in between
    are stretched in part."""
    scaling, length = shape.rope_scaling, _original_length(shape)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wave = 2 * math.pi / plain
    kept = ((length / wave - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, shape: ModelShape) -> Tensor:
    """By how often a pair turns within the original length: `beta_fast` times or more, and it
    stays; `beta_slow` or less, and it is stretched."""
    scaling, size = shape.rope_scaling, shape.rotary_size

    def pair_that_turns(times: float) -> float:
        length = _original_length(shape) / (times * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(shape.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = max(last - first, 0.001)
    pair = torch.arange(size // 2, dtype=torch.float32, device=plain.device)
    stretched = ((pair - first) / width).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def amplitude(shape: ModelShape) -> float:
    """What rotated numbers are multiplied by: yarn makes scores larger over longer texts."""
    scaling = shape.rope_scaling
    if scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rotation(shape: ModelShape, positions: Tensor) -> Tensor:
    """Cosines and sines of the angles at positions (T,) or (B, T): (2, B or 1, T, R / 2)."""
    positions = positions.reshape(-1, positions.shape[-1])
    # Angles of late positions need all of float32, whatever autocast is on.
    with torch.autocast(positions.device.type, enabled=False):
        angles = positions.unsqueeze(-1).float() * frequencies(shape, positions.device)
        return torch.stack((angles.cos(), angles.sin())) * amplitude(shape)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """The heads (B, H, T, K) of tokens at the positions of `rotation`, in the type of x."""
    cosines, sines = rotation.unsqueeze(2)  # (B, 1, T, R / 2) each
    half = cosines.shape[-1]
    one, other = x[..., :half], x[..., half : 2 * half]
    turned = (one * cosines - other * sines, other * cosines + one * sines)
    return torch.cat((*(part.to(x.dtype) for part in turned), x[..., 2 * half :]), dim=-1)


# -- what a token sees ----------------------------------------------------------------------------


def attention_mask(
    document_ids: Tensor | None, window: int | None, size: tuple[int, int], like: Tensor
) -> Tensor | None:
    """What keeps tokens, `size` = (B, T) of them, within their documents and their window: for our
    kernel the first position each one sees, for torch's a table of the type of `like`.

    None where there is nothing to keep them from but the future.
    """
    if window is not None and window >= size[1]:
        window = None
    if document_ids is None:
        if window is None:
            return None
        document_ids = torch.zeros(size, dtype=torch.int64, device=like.device)
    dtype = compute_dtype(like.device, like.dtype)
    if kernels.usable(like.device, dtype):
        starts = document_starts(document_ids)
        return starts if window is None else within_window(starts, window)
    return document_mask(document_ids, dtype, window)


def is_starts(mask: Tensor | None) -> bool:
    return mask is not None and not mask.is_floating_point()


def document_mask(document_ids: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """The mask (B, 1, T, T): 0 where a token may attend, which is to itself and to earlier tokens
    of its own document and window, and minus infinity elsewhere.

    It is added to the scores and not a table of booleans, because attention would turn those
    into numbers in every layer, and each layer would keep its own until the backward pass.
    """
    allowed = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)  # (B, T, T)
    mask = torch.full(allowed.shape, -torch.inf, dtype=dtype, device=document_ids.device)
    if window is not None:
        allowed.triu_(1 - window)
    return mask.masked_fill_(allowed.tril_(), 0.0).unsqueeze(1)
