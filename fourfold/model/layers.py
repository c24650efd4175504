"""Layers the network is made of: linear layers, norms, activations.

They are torch's own but for three things: no layer draws its weights (init.py does), norms choose a
precision that is exact enough, and on a CPU norms and activations are kernels of ours (kernels.py).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model import kernels
from fourfold.model.loss import compute_dtype
from fourfold.model.params import ModelShape


class Linear(nn.Linear):
    """A linear layer whose bias joins the matrix product (`fused`) or is added after it."""

    def __init__(self, in_features: int, out_features: int, fused: bool, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.fused = fused

    def reset_parameters(self) -> None:
        """Nothing: weights come from init.py or a checkpoint, never from torch's defaults."""

    def forward(self, x: Tensor) -> Tensor:
        if self.fused or self.bias is None:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        return y + self.bias.to(y.dtype)  # autocast's type, as the fused product gives


class Linears(nn.ModuleDict):
    """Several linear layers of one input, which model parallelism then brings to them once."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.values()]


class LayerNorm(nn.LayerNorm):
    """In low precision a GPU's kernels take means and sums in fp32 inside, and x as it is.

    A CPU's add up the gradients of the weights in the type of x, and lose several percent of them
    over a few thousand tokens; so there the whole norm is computed in fp32.
    """

    def reset_parameters(self) -> None:
        """Nothing, as for `Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu or x.dtype.itemsize >= 4:
            # In autocast's type straight away: only products read it, which would cast it.
            return super().forward(x).to(compute_dtype(x.device, x.dtype))
        bias = None if self.bias is None else self.bias.float()
        wide = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps)
        return wide.to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """In fp32 on a CPU, for the reason `LayerNorm` gives."""

    def reset_parameters(self) -> None:
        """Nothing, as for `Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        if kernels.usable(x.device, x.dtype):
            assert self.eps is not None, "`norm_of` gives one"
            dtype = compute_dtype(x.device, x.dtype)
            return kernels.rms_norm(x, self.weight, self.eps, dtype)
        if not x.is_cpu or x.dtype.itemsize >= 4:
            return super().forward(x).to(compute_dtype(x.device, x.dtype))
        wide = F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        return wide.to(x.dtype)


def norm_of(shape: ModelShape, width: int) -> LayerNorm | RMSNorm:
    """A norm of the kind this network has, over `width` numbers."""
    if shape.normalization == "RMSNorm":
        return RMSNorm(width, eps=shape.norm_epsilon)
    return LayerNorm(width, eps=shape.norm_epsilon, bias=shape.bias == "all")


class GELU(nn.Module):
    """The tanh form."""

    scratch: kernels.Scratch | None = None  # for its result, where nothing keeps that

    def forward(self, x: Tensor) -> Tensor:
        return kernels.gelu(x, self.scratch)


class Activation(nn.Module):
    """The others of one input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square() if self.name == "relu_squared" else F.gelu(x)


class Gate(nn.Module):
    """Those of two: silu(gate) * up, or with GELU in its tanh form."""

    scratch: kernels.Scratch | None = None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.is_silu = name == "swiglu"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return kernels.gate(gate, up, self.is_silu, self.scratch)


def activation_of(shape: ModelShape) -> nn.Module:
    if shape.is_gated:
        return Gate(shape.activation)
    return GELU() if shape.activation == "gelu_tanh" else Activation(shape.activation)
