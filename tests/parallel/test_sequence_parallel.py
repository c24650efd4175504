"""Sequence parallelism keeps a rank's own positions: the same numbers, and the bytes of the price.

`gathered_linear` stands in for a gather and a linear layer after it, which kept all positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.kept_bytes import kept_bytes
from helpers.ranks import on_ranks
from helpers.traces import Workshop
from torch import Tensor

from fourfold.config import Config
from fourfold.cost.memory import activation_bytes
from fourfold.cost.workload import spread_of, workload_of
from fourfold.mesh import Layout, connect
from fourfold.model.layers import Linear
from fourfold.parallel import layout_of, parallelize
from fourfold.parallel.tensor import copy_to_tp, gathered_linear

BATCH, OWN, WIDTH, OUT = 3, 4, 24, 40
CPU = torch.device("cpu")
Gradients = list[Tensor]


def kept_whole(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    return F.linear(copy_to_tp(x, group, True), weight, bias)


class Layer(NamedTuple):
    """As much of a linear layer as is asked for."""

    weight: Tensor
    bias: Tensor | None
    fused: bool = True


def kept_in_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
) -> Tensor:
    return gathered_linear([cast(Linear, Layer(weight, bias))], x, group)[0]


def on_two_ranks(work: Callable[[int, dist.ProcessGroup], None]) -> None:
    def on_rank(rank: int) -> None:
        mesh = connect(Layout(mp=2), CPU)
        group = mesh.group("mp")
        assert group is not None
        work(rank, group)
        mesh.close()

    on_ranks(2, on_rank)


def drawn(rank: int, biased: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH, OWN, WIDTH, generator=generator)
    weight = torch.randn(OUT, WIDTH, generator=generator)
    bias = torch.randn(OUT, generator=generator) if biased else None
    return [one if one is None else one.requires_grad_() for one in (x, weight, bias)]


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
def test_the_same_bits_as_a_gather_before_the_layer(low: torch.dtype | None, biased: bool) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        found: list[Gradients] = []
        for way in (kept_whole, kept_in_pieces):
            x, weight, bias = drawn(rank, biased)
            assert x is not None and weight is not None
            with torch.autocast("cpu", low) if low else nullcontext():
                y = way(x * 2, weight, bias, group)
            y.sin().sum().backward()
            leaves = [one for one in (x, weight, bias) if one is not None]
            found.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        assert [len(gradients) for gradients in found] == 2 * [4 if biased else 3]
        assert all(one.dtype == other.dtype for one, other in zip(*found, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    on_two_ranks(work)


def test_a_split_backward_pass_gathers_for_the_weights_only() -> None:
    """As zero-bubble schedules ask for it: the input's gradient first, the weights' later."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        x, weight, bias = drawn(rank, biased=True)
        assert x is not None and weight is not None and bias is not None
        inside = x * 2
        y = kept_in_pieces(inside, weight, bias, group)
        ones = torch.ones_like(y)
        with torch.profiler.profile() as profile:
            (first,) = torch.autograd.grad(y, [inside], ones, retain_graph=True)
        assert not [event for event in profile.events() if "allgather" in event.name.lower()]
        with torch.profiler.profile() as profile:
            later = torch.autograd.grad(y, [weight, bias], ones, retain_graph=True)
        assert not [event for event in profile.events() if "reduce_scatter" in event.name.lower()]
        at_once = torch.autograd.grad(y, [inside, weight, bias], ones)
        assert all(torch.equal(one, other) for one, other in zip((first, *later), at_once))

    on_two_ranks(work)


PRECISIONS = {
    "float32": ["Engine.mix_precision.dtype=float32"],
    "O1": ["Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O1"],
    "O2": ["Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2"],
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_keeps_what_its_price_says(precision: str, tmp_path: Path) -> None:
    """34/t bytes a number in half precision (and 4/t more, as norms keep fp32)."""
    workshop = Workshop(tmp_path)
    sizes = ["Model.hidden_size=64", "Model.ffn_hidden_size=256", "Data.dataset.max_seq_len=32"]
    sizes += ["Model.max_position_embeddings=32"]
    sizes += ["Data.batch_size.micro_batch_size=4", "Distributed.mp_degree=2"]

    def configured(layers: int) -> Config:
        asked = [*sizes, *PRECISIONS[precision], f"Model.num_layers={layers}"]
        return workshop.config(2, "kept", [*asked, "Model.sequence_parallel=True"])

    def work(rank: int) -> int:
        mesh = connect(layout_of(configured(2)), CPU)
        each = []
        for layers in (2, 3):
            runner = parallelize(configured(layers), mesh, CPU)
            tokens = torch.zeros(4, 32, dtype=torch.long)
            each.append(kept_bytes(runner.parts[0], tokens))
        mesh.close()
        return each[1] - each[0]

    config = configured(1)
    workload = workload_of(config, on_cpu=True)
    price = activation_bytes(workload.network, spread_of(config), workload.software)["none"]
    for kept in on_ranks(2, work):
        print(f"{precision}: {kept:,} bytes kept, {float(price):,.0f} priced")
        assert kept == pytest.approx(float(price), rel=0.02)
