"""The number format of a model's weights for generation: float32, bfloat16, float16, int8 or int4.

A step of generation reads every weight once and does little with it, so what counts on a CPU is how
many bytes that is and how fast the kernel reads them:

| format   | bytes | on a CPU                                                                     |
|----------|-------|------------------------------------------------------------------------------|
| float32  | 4     | the same numbers as in training                                              |
| float16  | 2     | weights rounded to half, products with float32 activations                   |
| bfloat16 | 2     | weights rounded to bfloat16; activations too, where the processor has        |
|          |       | instructions for that                                                        |
| int8     | 1     | weights and activations rounded to 255 steps, one scale a row; exact sums    |
| int4     | 0.56  | weights rounded to 16 steps, one scale for 32 inputs of an output;           |
|          |       | activations as with bfloat16                                                 |

Matrices are packed for the compiled kernels (packed.py), where there are any; then the result of a
row does not depend on the other rows of the batch at all. Elsewhere torch's own kernels serve, the
numbers are the same up to the last bits of a sum, and int4 has no advantage in speed.

On a GPU the first three are the model cast to that type, and whole numbers are refused.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.generate.packed import LARGEST_HALF, HalfEmbedding, kernels, pack_model
from fourfold.model.gpt import GPT
from fourfold.model.layers import Linear

Format = Literal["float32", "bfloat16", "float16", "int8", "int4"]
FORMATS = get_args(Format)

INT8_STEPS = 127
INT4_GROUP = 32


def set_format(model: GPT, weights: Format) -> nn.Module:
    """Change the weights of `model` in place; returns its head, hidden states -> logits."""
    device = model.embeddings.word.weight.device
    if device.type != "cpu":
        return _cast(model, weights, device)
    if kernels() is not None:
        return pack_model(model, weights)
    if weights == "float32":
        for module in model.modules():
            if isinstance(module, Linear):
                module.weight.data = _by_columns(module.weight.data)
        model.head_weight.data = _by_columns(model.head_weight.data)
        return PlainHead(model)
    if weights == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    words, table = model.embeddings.word.weight.data, model.head_weight.data
    if weights == "int4":
        for module in model.modules():
            if isinstance(module, Linear):
                module.weight.data = _to_int4(module.weight.data)
    kind = Int8Linear if weights == "int8" else HalfLinear
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                bias = None if child.bias is None else child.bias.data
                setattr(parent, name, kind(child.weight.data, bias))
    model.embeddings.word = HalfEmbedding.of(words)
    if model.table.tied is None:
        model.head.weight.data = torch.empty(0)
    return kind(_to_int4(table) if weights == "int4" else table, None)


def _by_columns(weight: Tensor) -> Tensor:
    """The same matrix with its columns, not its rows, contiguous: faster for a few rows at once."""
    return weight.t().contiguous().t()


def _cast(model: GPT, weights: Format, device: torch.device) -> nn.Module:
    if weights in ("int8", "int4"):
        raise UserError(
            f"Inference.weights={weights} runs on a CPU only and the model is on {device}; choose "
            "bfloat16 or float16"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, weights))
    return PlainHead(model)


class PlainHead(nn.Module):
    """Logits by the head's weight as the model has it."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        weight = self.model.head_weight
        return F.linear(x.to(weight.dtype), weight)


class HalfLinear(nn.Module):
    """float16 weights, float32 activations and sums.

    FBGEMM widens the weights as it reads them, where the processor has no half-precision
    arithmetic of its own; elsewhere the product is torch's in float16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        largest = float(weight.abs().max())
        if not largest <= LARGEST_HALF:
            raise UserError(
                f"a weight of {largest:g} does not fit into float16, which ends at "
                f"{LARGEST_HALF:g}; use Inference.weights=float32"
            )
        self.packed = None
        if "fbgemm" in torch.backends.quantized.supported_engines:
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        else:
            self.weight, self.bias = weight.half(), None if bias is None else bias.half()

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return F.linear(x.half(), self.weight, self.bias).float()


class Int8Linear(nn.Module):
    """int8 weights with one scale an output, int8 activations with one scale a row.

    The sums are whole numbers, so they are the same however rows are batched.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, scales = _to_int8(weight)  # (out, in), (out, 1)
        self.scales = scales.squeeze(1)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        rows, row_scales = _to_int8(x.reshape(-1, x.shape[-1]))  # (N, in), (N, 1)
        sums = torch._int_mm(rows, self.weight.t())  # (N, out) int32
        y = sums * (row_scales * self.scales)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], -1)


def _to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in 255 steps from minus to plus its largest magnitude, and the size of a step."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    scales = largest.clamp_min_(torch.finfo(torch.float32).tiny).div_(INT8_STEPS)
    return (rows / scales).round_().to(torch.int8), scales


def _to_int4(weight: Tensor) -> Tensor:
    """Each group of inputs in 16 steps, as a float32 matrix again."""
    outputs, inputs = weight.shape
    groups = F.pad(weight, (0, -inputs % INT4_GROUP)).view(outputs, -1, INT4_GROUP)
    places = groups.abs().argmax(dim=-1, keepdim=True)
    # The largest magnitude becomes -8, of which there is one more than of positive steps.
    scales = (groups.gather(-1, places) / -8).half().float()
    steps = (groups / scales.where(scales != 0, 1.0)).round_().clamp_(-8, 7)
    return (steps * scales).view(outputs, -1)[:, :inputs].contiguous()
