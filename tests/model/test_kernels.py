"""Our kernels for a CPU against torch's in float64, and what they promise beyond these."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold import native
from fourfold.model import GPT, ModelShape, initialize, kernels

pytestmark = pytest.mark.skipif(
    native.why_not("attention") is not None, reason=str(native.why_not("attention"))
)

# In bfloat16 results and gradients are rounded to 8 bits, and so are probabilities in between.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def random_qkv(sizes: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    B, H, T, K = sizes
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, H, 3, K, generator=generator).to(dtype)


def document_ids(B: int, T: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (B, T), generator=generator, dtype=torch.int32).sort(dim=1).values


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 150), st.integers(1, 100)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    in_documents=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_and_its_gradients_are_torchs(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, in_documents: bool, seed: int
) -> None:
    B, _, T, _ = sizes
    ours = random_qkv(sizes, dtype, seed).requires_grad_()
    exact = ours.detach().double().requires_grad_()
    mask, starts = torch.ones(T, T, dtype=torch.bool).tril(), None
    if in_documents:
        ids = document_ids(B, T, seed)
        mask = ((ids.unsqueeze(2) == ids.unsqueeze(1)) & mask).unsqueeze(1)
        starts = kernels.document_starts(ids)
    out = kernels.causal_attention(*kernels.split_heads(ours), starts, 0.0)
    expected = F.scaled_dot_product_attention(*exact.transpose(1, 2).unbind(3), attn_mask=mask)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(upstream.to(dtype))
    expected.backward(upstream.to(dtype).double())
    assert exact.grad is not None and ours.grad is not None
    for got, wanted in ((out, expected), (ours.grad, exact.grad)):
        scale = max(1.0, float(wanted.detach().abs().max()))
        assert float((got.double() - wanted).detach().abs().max()) < TOLERANCE[dtype] * scale


def test_q_k_and_v_may_lie_anywhere() -> None:
    q, k, v = (torch.randn(2, 20, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    out = kernels.causal_attention(q, k, v, None, 0.0)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)
    for ours, torchs in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v))
    ):
        torch.testing.assert_close(ours, torchs)


def kept(sizes: tuple[int, int, int, int], dropout: float, first_head: int = 0) -> Tensor:
    """Which probabilities are not dropped: queries see all keys alike, values name the keys."""
    B, H, T, _ = sizes
    equal = torch.zeros(B, H, T, T)
    names = torch.eye(T).expand(B, H, T, T)
    return kernels.causal_attention(equal, equal, names, None, dropout, first_head)


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    torch.default_generator.manual_seed(1)
    sizes = (2, 4, 128, 128)
    share = torch.ones(128, 128).tril() / torch.arange(1, 129).unsqueeze(1)
    table = kept(sizes, 0.25)
    below = table[:, :, torch.ones(128, 128, dtype=torch.bool).tril()]
    assert float((below == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    rest = table != 0
    torch.testing.assert_close(table[rest], (share / 0.75).expand_as(table)[rest])
    # No two heads, sequences or rows drop alike.
    rows = (table[..., 100:, :64] != 0).reshape(-1, 64).int().tolist()
    assert len({tuple(row) for row in rows}) == len(rows)


def test_dropout_follows_the_seed_and_the_heads_number() -> None:
    sizes = (2, 4, 64, 64)
    torch.default_generator.manual_seed(7)
    whole = kept(sizes, 0.5)
    assert torch.equal(kept(sizes, 0.5), whole), "nothing is drawn from the generator"
    assert torch.equal(kept((2, 2, 64, 64), 0.5, first_head=2), whole[:, 2:])
    torch.default_generator.manual_seed(8)
    assert not torch.equal(kept(sizes, 0.5), whole)


def test_the_gradient_of_dropout_is_that_of_what_was_kept() -> None:
    torch.default_generator.manual_seed(3)
    qkv = random_qkv((1, 2, 24, 8), torch.float32).requires_grad_()
    out = kernels.causal_attention(*kernels.split_heads(qkv), None, 0.4)
    factor = kept((1, 2, 24, 24), 0.4) * torch.arange(1.0, 25.0).unsqueeze(1)  # 0, or 1 / 0.6
    q, k, v = qkv.transpose(1, 2).unbind(3)
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~torch.ones(24, 24).tril().bool(), -1e30)
    expected = (scores.softmax(dim=3) * factor) @ v
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    ours, torchs = (torch.autograd.grad(one, qkv, upstream)[0] for one in (out, expected))
    torch.testing.assert_close(ours, torchs)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 9000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_gelu_is_torchs(count: int, dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * size).to(dtype)
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = kernels.gelu(ours), F.gelu(exact, approximate="tanh")
    y.backward(torch.ones_like(y))
    expected.sum().backward()
    assert ours.grad is not None and exact.grad is not None
    tolerance = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(y.double(), expected.detach(), **tolerance)
    torch.testing.assert_close(ours.grad.double(), exact.grad, **tolerance)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(2, 1500)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([0.1, 5.0, 200.0]),
)
def test_cross_entropy_is_torchs(sizes: tuple[int, int], dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(sizes[1])
    logits = (torch.randn(sizes, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, sizes[1], (sizes[0],), generator=generator)
    weights = torch.rand(sizes[0], generator=generator)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (expected * weights).sum().backward()
    for gradient in (False, True):
        own = logits.clone()
        losses = kernels.cross_entropy_(own, labels, weights, gradient)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert gradient or torch.equal(own, logits), "logits stay where no gradient is asked for"
    assert exact.grad is not None
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(own.double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_a_label_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(IndexError, match="outside of the 5 words"):
        kernels.cross_entropy_(torch.zeros(2, 5), torch.tensor([1, 5]), torch.ones(2), True)


def test_a_logit_that_is_not_finite_is_seen_in_the_loss() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = torch.nan
    losses = kernels.cross_entropy_(logits, torch.tensor([1, 2]), torch.ones(2), False)
    assert losses[0].isfinite() and losses[1].isnan()


def loss_and_gradients(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    model = GPT(ModelShape(97, 48, 2, 4, 192, 40, 0.0, 0.0))
    initialize(model, seed=0)
    tokens = torch.arange(80).view(2, 40) % 97
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(tokens, tokens.roll(1, 1), loss_scale=1 / 80)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_network_is_the_same_without_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients = loss_and_gradients(dtype)
    monkeypatch.setattr(kernels, "usable", lambda device, dtype: False)
    expected, torchs = loss_and_gradients(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 3e-3
    assert float(loss) == pytest.approx(float(expected), rel=tolerance)
    for name, gradient in gradients.items():
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        size = float(torchs[name].norm()) + 1e-6
        assert float((gradient - torchs[name]).norm()) < limit * size, name


def test_they_can_be_switched_off() -> None:
    code = (
        "import torch; from fourfold.model import kernels; from fourfold import native; "
        "print(kernels.usable(torch.device('cpu'), torch.float32), native.why_not('rows'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"FOURFOLD_NATIVE": "0", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False FOURFOLD_NATIVE is set to 0"
