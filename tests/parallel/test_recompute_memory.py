"""What recomputation leaves in memory, and that it is what the price says.

Bytes are exact sums over live tensors, as torch's own tracker sees them; resident memory would add
the allocator's habits to every figure.
"""

from __future__ import annotations

import pytest
import torch
from helpers.kept_bytes import LENGTH, shape_of
from torch.distributed._tools.mem_tracker import MemTracker

from fourfold.cost.memory import memory_of
from fourfold.cost.workload import Network, Software, Spread
from fourfold.model import GPT, initialize
from fourfold.model.kernels import usable
from fourfold.parallel.recompute import (
    HostCopies,
    HostCopy,
    Recompute,
    apply_offload,
    apply_recompute,
    remake_cheap_outputs,
)

BATCH = 4
COMPILED = usable(torch.device("cpu"), torch.float32)


def measured(
    recompute: Recompute | None, layers: int, dropout: float, norms: bool | None = None
) -> tuple[int, int]:
    """Bytes beside weights and gradients after a forward pass, and the most of the step."""
    model = GPT(shape_of(layers, dropout))
    initialize(model, seed=0)
    if recompute:
        apply_recompute(model, recompute)
    if norms is not None:
        remake_cheap_outputs(model, norms=norms)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = model(tokens, tokens)
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return held["Total"] - held["Parameter"], peak["Total"]


def priced(
    recompute: Recompute | None,
    layers: int,
    dropout: float,
    remakes: tuple[bool, bool] = (False, False),
) -> float:
    """Bytes of the activations of that many layers, with what is at work."""
    network = Network.of(shape_of(layers, dropout), LENGTH)
    software = Software(
        compute_bytes=4,
        residual_bytes=4,
        norm_bytes=4,
        mask_bytes=4,
        flash=dropout == 0 or COMPILED,
        remakes_norms=remakes[0],
        remakes_activation=remakes[1],
    )
    spread = Spread(micro_batch=BATCH)
    if recompute:
        spread = Spread(
            micro_batch=BATCH,
            recompute=recompute.granularity,
            recompute_method=recompute.method,
            recompute_layers=recompute.layers,
            keeps_products="products" in recompute.keep,
            keeps_attention="attention" in recompute.keep,
        )
    return float(memory_of(network, spread, software)["activations"])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "recompute",
    [
        None,
        Recompute("core_attn"),
        Recompute("full_attn"),
        Recompute("ops"),
        Recompute("ops", keep=["products"]),
        Recompute("ops", keep=["attention"]),
        Recompute("full"),
        Recompute("full", layers=2),
        Recompute("full", "block", 3),
        Recompute("full_attn", "block", 1),
    ],
    ids=str,
)
def test_layers_keep_what_their_price_says(recompute: Recompute | None, dropout: float) -> None:
    """Of six layers over two: what is not a layer's, and one piece at work, is in both."""
    kept = measured(recompute, 6, dropout)[0] - measured(recompute, 2, dropout)[0]
    price = priced(recompute, 6, dropout) - priced(recompute, 2, dropout)
    print(f"{recompute}: {kept:,} bytes kept, {price:,.0f} priced")
    assert kept == pytest.approx(price, rel=0.01)


@pytest.mark.parametrize("norms", [False, True])
def test_what_is_made_again_is_not_kept_and_changes_nothing(norms: bool) -> None:
    kept = measured(None, 6, 0.1, norms)[0] - measured(None, 2, 0.1, norms)[0]
    price = [priced(None, layers, 0.1, (norms, True)) for layers in (2, 6)]
    assert kept == pytest.approx(price[1] - price[0], rel=0.01)
    gradients = []
    for remade in (None, norms):
        model = GPT(shape_of(3, 0.1))
        initialize(model, seed=0)
        if remade is not None:
            remake_cheap_outputs(model, norms=remade)
        tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 64
        with torch.autocast("cpu", torch.bfloat16, enabled=norms):
            model(tokens, tokens, dropout_seed=3).backward()
        gradients.append({name: one.grad for name, one in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_a_chunk_is_made_whole_again_at_once() -> None:
    """Fewer inputs are kept of longer chunks, and more is at work at the peak."""
    chunks = [Recompute("full", layers=layers) for layers in (1, 2, 4)]
    peaks = [measured(chunk, 8, 0.0)[1] for chunk in chunks]
    prices = [priced(chunk, 8, 0.0) for chunk in chunks]
    more = [peak - peaks[0] for peak in peaks[1:]]
    # On top, gradients come while a longer chunk is still there.
    assert more == pytest.approx([price - prices[0] for price in prices[1:]], rel=0.25)


def test_peak_memory_follows_the_granularity() -> None:
    modes = [Recompute(name) for name in ("full", "ops", "full_attn", "core_attn")]
    peaks = [measured(mode, 8, dropout=0.1)[1] for mode in (*modes, None)]
    print(", ".join(f"{peak:,}" for peak in peaks))
    assert peaks == sorted(peaks) and len(set(peaks)) == 5


# -- host memory ----------------------------------------------------------------------------------


class Counted(HostCopies):
    """Copies of everything but weights, even of what is on a CPU already."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), smallest=0)
        self.bytes_ = 0

    def take(self, tensor: torch.Tensor) -> HostCopy:
        self.bytes_ += tensor.numel() * tensor.itemsize
        return super().take(tensor)


def gradients_of(model: GPT) -> list[torch.Tensor]:
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 64
    documents = torch.arange(LENGTH).repeat(BATCH, 1) // 50
    model(tokens, tokens, document_ids=documents, dropout_seed=3).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recompute", [None, Recompute("core_attn"), Recompute("full", "block", 1)])
def test_offloading_changes_no_bit(recompute: Recompute | None) -> None:
    found = []
    for offloads in (False, True):
        model, copies = GPT(shape_of(3, 0.1)), Counted()
        initialize(model, seed=0)
        if recompute:
            apply_recompute(model, recompute)
        if offloads:
            apply_offload(model, copies)
        found.append(gradients_of(model))
        assert bool(copies.bytes_) is offloads
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_copied_is_what_the_layers_would_keep() -> None:
    """Attention's result is copied twice, for its own backward pass and for the product's."""
    model, copies = GPT(shape_of(4, 0.0)), Counted()
    initialize(model, seed=0)
    apply_offload(model, copies)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    model(tokens, tokens)
    priced_bytes = priced(None, 5, 0.0) - priced(None, 1, 0.0)
    again = 4 * 4 * BATCH * LENGTH * 64
    assert copies.bytes_ == pytest.approx(priced_bytes + again, rel=0.01)


def test_the_price_of_offloading_is_that_of_two_layers() -> None:
    network = Network.of(shape_of(12, 0.0), LENGTH)
    kept, gone = (
        float(
            memory_of(network, Spread(micro_batch=BATCH), Software(offloads=offloads))[
                "activations"
            ]
        )
        for offloads in (False, True)
    )
    assert gone == pytest.approx(kept * 2 / 12, rel=0.1)
