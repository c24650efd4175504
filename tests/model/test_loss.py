"""The chunked head: equal to plain cross-entropy, however tokens are masked and cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.model import GPT
from fourfold.model.loss import head_cross_entropy

V, D, N = 37, 16, 29


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float32)
    head = torch.randn(V, D, generator=generator)
    labels = torch.randint(0, V, (N,), generator=generator)
    mask = (torch.rand(N, generator=generator) < 0.7).float()
    return hidden, head, labels, mask


def plain(hidden: Tensor, head: Tensor, labels: Tensor, mask: Tensor, scale: float) -> Tensor:
    losses = F.cross_entropy(hidden @ head.t(), labels, reduction="none")
    return (losses * mask).sum() * scale


@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
def test_equals_plain_cross_entropy(chunk: int, inputs: tuple[Tensor, ...]) -> None:
    hidden, head, labels, mask = inputs
    results = []
    for loss in (lambda h, w: head_cross_entropy(h, w, labels, mask, 0.3, chunk),
                 lambda h, w: plain(h, w, labels, mask, 0.3)):  # fmt: skip
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        value = loss(h, w)
        (value * 2.0).backward()  # an upstream gradient other than one
        results.append((value.detach(), h.grad, w.grad))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        self.products += function.overloadpacket.__name__ in ("matmul", "mm", "addmm_")
        return function(*given, **(named or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_gradient_work_without_gradients(
    mode: Callable[[], Any], inputs: tuple[Tensor, ...]
) -> None:
    """One product of the hidden states with the head; two more where both want a gradient."""
    hidden, head, labels, mask = inputs
    hidden.requires_grad_(), head.requires_grad_()
    with mode(), Products() as counted:
        value = head_cross_entropy(hidden, head, labels, mask, 1.0, N)
    torch.testing.assert_close(value, plain(hidden, head, labels, mask, 1.0))
    assert value.requires_grad == (mode is torch.enable_grad)
    assert counted.products == (3 if value.requires_grad else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_one_chunk_however_many_there_are(dtype: torch.dtype) -> None:
    def peak(chunks: int) -> int:
        tokens, words, width = 64 * chunks, 4096, 4
        hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
        head = torch.randn(words, width, dtype=dtype, requires_grad=True)
        labels, mask = torch.zeros(tokens, dtype=torch.long), torch.ones(tokens)
        tracker = MemTracker()
        with tracker:
            head_cross_entropy(hidden, head, labels, mask, 1.0, 64).backward()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    each_logit = 4 if dtype == torch.float32 else 6
    assert peak(1) < 1.2 * each_logit * 64 * 4096
    assert peak(8) < 1.02 * peak(1)


def test_autocast_computes_the_head_in_bf16(inputs: tuple[Tensor, ...]) -> None:
    hidden, head, labels, mask = inputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = head_cross_entropy(hidden, head, labels, mask, 1 / N, 8)
    full = head_cross_entropy(hidden, head, labels, mask, 1 / N, 8)
    assert low.dtype == torch.float32
    assert 0 < abs(low - full) < 0.05


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_micro_batches_of_ragged_masks_add_up(micro: int, tiny_model: GPT) -> None:
    """Any cut of one global batch gives the same loss and gradients."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 96, (8, 17), generator=generator)
    mask = torch.zeros(8, 16)
    for row, length in enumerate([16, 1, 9, 3, 16, 5, 12, 2]):
        mask[row, :length] = 1.0
    scale = 1 / float(mask.sum())

    def gradients(size: int) -> tuple[float, dict[str, Tensor]]:
        tiny_model.zero_grad()
        total = 0.0
        for start in range(0, 8, size):
            piece = slice(start, start + size)
            loss = tiny_model(tokens[piece, :-1], tokens[piece, 1:], mask[piece], loss_scale=scale)
            loss.backward()
            total += loss.item()
        return total, {name: p.grad.clone() for name, p in tiny_model.named_parameters()}

    whole_loss, whole = gradients(8)
    loss, cut = gradients(micro)
    assert abs(loss - whole_loss) < 1e-6
    for name, expected in whole.items():
        torch.testing.assert_close(cut[name], expected, rtol=1e-5, atol=1e-6, msg=name)
