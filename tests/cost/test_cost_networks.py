"""What layers of the other families keep for their backward pass, against the price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.kept_bytes import kept_bytes
from helpers.planned_networks import FAMILIES
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from fourfold.cost.memory import activation_bytes, memory_of
from fourfold.cost.workload import Network, Software, Spread, options_of
from fourfold.model import GPT, ModelShape, gpt, initialize
from fourfold.model.kernels import usable
from fourfold.parallel.recompute import Recompute, apply_recompute, remake_cheap_outputs

BATCH, LENGTH = 3, 64  # tokens of another number than any width
COMPILED = usable(torch.device("cpu"), torch.float32)


def shape_of(family: str, layers: int, **sizes: Any) -> ModelShape:
    given = {"hidden_size": 128, "ffn_hidden_size": 224, **FAMILIES[family], **sizes}
    return ModelShape(
        vocab_size=64,
        num_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
        **given,
    )


# -- on a CPU -------------------------------------------------------------------------------------


def measured(family: str, layers: int, recompute: Recompute | None, remakes: bool) -> int:
    """Bytes beside weights after a forward pass in fp32."""
    model = GPT(shape_of(family, layers))
    initialize(model, seed=0)
    if recompute:
        apply_recompute(model, recompute)
    if remakes:
        remake_cheap_outputs(model, norms=True)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = model(tokens, tokens)
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    assert loss.requires_grad
    return int(held["Total"] - held["Parameter"])


def priced(family: str, layers: int, recompute: Recompute | None, remakes: bool) -> float:
    software = Software(
        compute_bytes=4,
        residual_bytes=4,
        norm_bytes=4,
        mask_bytes=4,
        remakes_norms=remakes,
        remakes_activation=remakes,
        whole_rms=COMPILED,
        whole_gates=COMPILED,
        own_kernels=COMPILED,
    )
    spread = Spread(micro_batch=BATCH, recompute=recompute.granularity if recompute else "none")
    network = Network.of(shape_of(family, layers), LENGTH)
    return float(memory_of(network, spread, software)["activations"])


MODES = [None, *map(Recompute, ("core_attn", "full_attn", "ops", "full"))]
QUICK = {("Llama 3", None, False), ("OLMo 2", None, True), ("Qwen3", "core_attn", False),
         ("Llama 2", "ops", False), ("nanoGPT speedrun", None, True)}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "recompute", "remakes"),
    [
        pytest.param(
            family, mode, remakes, id=f"{family}, {mode}{', remade' * remakes}",
            marks=() if (family, mode and mode.granularity, remakes) in QUICK
            else pytest.mark.slow,
        )
        for family in FAMILIES
        for mode in MODES
        for remakes in ((False, True) if mode is None else (False,))
    ],
)  # fmt: skip
def test_layers_keep_what_their_price_says(
    family: str, recompute: Recompute | None, remakes: bool
) -> None:
    """Of four layers over two: what is not a layer's is in both."""
    kept, price = (
        count(family, 4, recompute, remakes) - count(family, 2, recompute, remakes)
        for count in (measured, priced)
    )
    print(f"{kept:,} bytes kept, {price:,.0f} priced")
    assert kept == pytest.approx(price, rel=0.01)


# -- on a device without memory, which stands for a GPU -------------------------------------------


class Flash(torch.autograd.Function):
    """Attention as a GPU has it in low precision; what it gives is laid out token by token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out.transpose(1, 2)


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return Flash.apply(q, k, v)


class OneKernel(torch.autograd.Function):
    """RMSNorm as a GPU has it; without memory torch takes it apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    return OneKernel.apply(x, weight)


def rotation(shape: ModelShape, positions: Tensor) -> Tensor:
    """Torch knows of no autocast on the device without memory."""
    return torch.empty(2, 1, positions.shape[-1], shape.rotary_size // 2, device="meta")


class Layers(nn.Module):
    def __init__(self, family: str, layers: int) -> None:
        super().__init__()
        self.model = GPT(shape_of(family, layers)).to("meta", torch.bfloat16)

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        return self.model.hidden(tokens, None, None, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_on_a_gpu_keeps_what_its_price_says(family: str) -> None:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    with (
        patch.object(F, "scaled_dot_product_attention", flash),
        patch.object(F, "rms_norm", rms_norm),
        patch.object(gpt, "rotation", rotation),
    ):
        kept = [kept_bytes(Layers(family, layers), tokens) for layers in (2, 3)]
    software = Software(whole_gates=False)
    network = Network.of(shape_of(family, 1), LENGTH)
    price = activation_bytes(network, Spread(micro_batch=BATCH), software)["none"]
    print(f"{kept[1] - kept[0]:,} bytes kept, {float(price):,.0f} priced")
    assert kept[1] - kept[0] == pytest.approx(float(price), rel=0.01)


def test_options_are_named_where_they_differ_from_gpt_2() -> None:
    shape = ModelShape(96, 32, 2, 4, 64, 24)
    assert options_of(shape) == ""
    llama = replace(
        shape,
        position_embedding="rotary",
        normalization="RMSNorm",
        activation="swiglu",
        bias="none",
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    assert options_of(llama) == (
        "rotary positions of theta 10000, RMSNorm, swiglu, 2 key-value heads, no biases, own head"
    )
