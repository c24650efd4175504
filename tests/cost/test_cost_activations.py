"""The activation estimate against what torch really keeps."""

from __future__ import annotations

import pytest
import torch
from helpers.kept_bytes import LENGTH, kept_bytes, shape_of

from fourfold.cost.memory import activation_bytes
from fourfold.cost.workload import Network, Software, Spread
from fourfold.model import GPT, initialize
from fourfold.model.kernels import usable
from fourfold.model.layers import LayerNorm
from fourfold.parallel.recompute import Recompute, apply_recompute

TOKENS = 4 * LENGTH


def kept_by_a_layer(dropout: float, granularity: str | None) -> int:
    """Bytes autograd keeps for one more layer."""

    def kept(layers: int) -> int:
        model = GPT(shape_of(layers, dropout))
        initialize(model, seed=0)
        if granularity:
            apply_recompute(model, Recompute(granularity))
        return kept_bytes(model, torch.zeros(TOKENS // LENGTH, LENGTH, dtype=torch.long))

    return kept(3) - kept(2)


def layer_bytes(dropout: float, mode: str = "none", **layout: object) -> float:
    """What the price says one layer keeps, in fp32 on a CPU."""
    network = Network.of(shape_of(1, dropout), LENGTH)
    software = Software(
        compute_bytes=4,
        residual_bytes=4,
        norm_bytes=4,
        flash=dropout == 0 or usable(torch.device("cpu"), torch.float32),
        mask_bytes=4,
    )
    spread = Spread(micro_batch=TOKENS // LENGTH, **layout)
    return float(activation_bytes(network, spread, software)[mode])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_estimate_of_a_layer(dropout: float) -> None:
    assert kept_by_a_layer(dropout, None) == pytest.approx(layer_bytes(dropout), rel=0.01)


@pytest.mark.parametrize(("device", "each"), [("cpu", 4), ("meta", 2)])
def test_in_low_precision_a_norm_keeps_its_input_as_it_is_but_on_a_cpu(
    device: str, each: int
) -> None:
    """The other device stands for a GPU."""
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one)
        return one

    norm = LayerNorm(64).to(device, torch.bfloat16)
    x = torch.empty(TOKENS, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        assert norm(x).dtype == torch.bfloat16
    (input_bytes,) = {one.numel() * one.itemsize for one in kept if one.shape == x.shape}
    assert input_bytes == each * x.numel()


def test_recomputation_keeps_less_in_the_order_of_the_estimate() -> None:
    estimates = [layer_bytes(0.1, mode) for mode in ("full", "full_attn", "core_attn", "none")]
    assert estimates == sorted(estimates) and len(set(estimates)) == 4


def test_ranks_that_share_a_layer_keep_less() -> None:
    alone, shared = layer_bytes(0.0), layer_bytes(0.0, mp=4)
    assert alone > shared > layer_bytes(0.0, mp=4, sequence_parallel=True)
