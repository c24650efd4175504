"""The static graph: each layer compiled as a graph of its own, so that layers share one."""

from __future__ import annotations

import warnings

import torch

from fourfold.model.gpt import GPT, CoreAttention


def compile_layers(model: GPT) -> None:
    """Before recomputation is applied, which would hide a whole layer from the compiler."""
    for module in model.modules():
        # Model parallelism sets the generator aside for its heads, which no graph can hold.
        if isinstance(module, CoreAttention) and "forward" in vars(module):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    # Messages between ranks are timed, so a graph ends before each and another begins after it.
    warnings.filterwarnings("ignore", message="Dynamo does not know how to trace the builtin")
    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward)
