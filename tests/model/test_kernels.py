"""Our kernels for a CPU against torch's in float64, and what they promise beyond these."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.kept_bytes import kept_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold import native
from fourfold.model import GPT, ModelShape, attention_kernel, initialize, kernels
from fourfold.model.positions import rotate
from fourfold.parallel.recompute import remake_cheap_outputs

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
        starts = attention_kernel.document_starts(ids)
    out = attention_kernel.causal_attention(*attention_kernel.split_heads(ours), starts, 0.0)
    expected = F.scaled_dot_product_attention(*exact.transpose(1, 2).unbind(3), attn_mask=mask)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(upstream.to(dtype))
    expected.backward(upstream.to(dtype).double())
    assert exact.grad is not None and ours.grad is not None
    for got, wanted in ((out, expected), (ours.grad, exact.grad)):
        scale = max(1.0, float(wanted.detach().abs().max()))
        assert float((got.double() - wanted).detach().abs().max()) < TOLERANCE[dtype] * scale


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 120), st.integers(2, 80)),
    group=st.integers(1, 4),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    restarts=st.booleans(),
    window=st.sampled_from([None, 1, 7, 64]),
    scale=st.sampled_from([None, 0.05, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_shared_keys_rotary_positions_and_windows_are_torchs(
    sizes: tuple[int, int, int, int],
    group: int,
    share: float,
    restarts: bool,
    window: int | None,
    scale: float | None,
    dtype: torch.dtype,
) -> None:
    """With few heads of keys each thread takes single heads of queries, with many whole groups."""
    B, G, T, K = sizes
    generator = torch.Generator().manual_seed(T)
    shapes = [(B, T, heads, K) for heads in (G * group, G, G)]
    ours = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    exact = [one.detach().double().requires_grad_() for one in ours]
    turns = None
    if half := int(K * share) // 2:
        positions = torch.randint(0, 500, (B if restarts else 1, T, 1), generator=generator)
        angles = positions * torch.rand(half, generator=generator)
        turns = torch.stack((angles.cos(), angles.sin())) * 1.25
    starts, mask = None, torch.ones(T, T, dtype=torch.bool).tril()
    if window is not None:
        starts = attention_kernel.within_window(torch.zeros(B, T, dtype=torch.int32), window)
        mask = mask.triu(1 - window)
    q, k, v = (one.transpose(1, 2) for one in ours)
    out = attention_kernel.causal_attention(q, k, v, starts, 0.0, turns=turns, scale=scale)
    q, k, v = (one.transpose(1, 2) for one in exact)
    if turns is not None:
        q, k = (rotate(one, turns.double()) for one in (q, k))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    upstream = torch.randn(out.shape, generator=generator).to(dtype)
    made = torch.autograd.grad(out, ours, upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for one, other in zip((out, *made), (expected, *wanted), strict=True):
        size = max(1.0, float(other.detach().abs().max()))
        assert float((one.double() - other).detach().abs().max()) < TOLERANCE[dtype] * size


def test_rotated_numbers_are_those_of_rotate_to_the_bit() -> None:
    """One key to see, whose value is what the query's score would be: the rotation alone."""
    turns = torch.randn(2, 1, 40, 8)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(2, 4, 40, 16).to(dtype) for _ in range(3))
        fused = attention_kernel.causal_attention(q, k, v, None, 0.0, turns=turns)
        apart = attention_kernel.causal_attention(rotate(q, turns), rotate(k, turns), v, None, 0.0)
        assert torch.equal(fused, apart)


def test_rotary_positions_of_another_size_are_refused() -> None:
    q = torch.randn(2, 1, 5, 8)
    for turns in (torch.ones(2, 1, 4, 4), torch.ones(2, 3, 5, 4), torch.ones(2, 1, 5, 5)):
        with pytest.raises(ValueError, match="rotary positions"):
            attention_kernel.causal_attention(q, q, q, None, 0.0, turns=turns)


def test_shared_keys_do_not_depend_on_how_heads_are_dealt_out() -> None:
    """A batch of four has enough for both threads, a single sequence has not."""
    q, k, v = (torch.randn(4, heads, 70, 16) for heads in (6, 1, 1))
    upstream = torch.randn(4, 6, 70, 16)

    def gradients(rows: slice) -> tuple[Tensor, ...]:
        given = [one[rows].clone().requires_grad_() for one in (q, k, v)]
        out = attention_kernel.causal_attention(*given, None, 0.0)
        return torch.autograd.grad(out, given, upstream[rows])

    for whole, alone in zip(gradients(slice(4)), gradients(slice(1))):
        torch.testing.assert_close(whole[:1], alone)


def test_q_k_and_v_may_lie_anywhere() -> None:
    q, k, v = (torch.randn(2, 20, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    out = attention_kernel.causal_attention(q, k, v, None, 0.0)
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
    return attention_kernel.causal_attention(equal, equal, names, None, dropout, first_head)


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
    out = attention_kernel.causal_attention(*attention_kernel.split_heads(qkv), None, 0.4)
    factor = kept((1, 2, 24, 24), 0.4) * torch.arange(1.0, 25.0).unsqueeze(1)  # 0, or 1 / 0.6
    q, k, v = qkv.transpose(1, 2).unbind(3)
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~torch.ones(24, 24).tril().bool(), -1e30)
    expected = (scores.softmax(dim=3) * factor) @ v
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    ours, torchs = (torch.autograd.grad(one, qkv, upstream)[0] for one in (out, expected))
    torch.testing.assert_close(ours, torchs)


def test_shared_keys_drop_by_the_heads_of_queries() -> None:
    torch.default_generator.manual_seed(3)
    q, k, v = (torch.randn(1, heads, 24, 8, requires_grad=True) for heads in (4, 2, 2))
    out = attention_kernel.causal_attention(q, k, v, None, 0.4)
    many = [one.repeat_interleave(2, dim=1) for one in (k, v)]
    expected = attention_kernel.causal_attention(q, *many, None, 0.4)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
    ):
        torch.testing.assert_close(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    width=st.integers(1, 300),
    apart=st.sampled_from([0, 3]),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ]
    ),
)
def test_rms_norm_is_torchs(
    rows: int, width: int, apart: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    whole = torch.randn(rows, width + apart, generator=generator).to(dtypes[0])
    x, weight = whole[:, :width].requires_grad_(), torch.randn(width, generator=generator)
    weight.requires_grad_()
    y = kernels.rms_norm(x, weight, 1e-5, dtypes[1])
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = F.rms_norm(exact[0], (width,), exact[1], 1e-5)
    upstream = torch.randn(rows, width + apart, generator=generator).to(dtypes[1])[:, :width]
    made = torch.autograd.grad(y, (x, weight), upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    assert y.dtype == dtypes[1] and made[0].dtype == dtypes[0] and made[1].dtype == torch.float32
    # Sums and their gradients are float32 whatever comes in and goes out. A row near zero is made
    # larger, and so is what is wrong in the last place of terms that cancel.
    stretch = float((exact[0].detach().square().mean(-1) + 1e-5).rsqrt().max())
    for one, other in zip((y, *made), (expected, *wanted), strict=True):
        limit = 1e-6 if one.dtype == torch.float32 else 4e-3
        size = max(1.0, float(other.detach().abs().max()), stretch)
        assert float((one.double() - other).detach().abs().max()) < 4 * limit * size


def test_the_gradient_of_a_norms_weight_is_the_same_with_any_number_of_threads() -> None:
    x, weight = torch.randn(5000, 48), torch.randn(48, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = kernels.rms_norm(x, weight, 1e-5, torch.float32)
            found += torch.autograd.grad(y, weight, x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 9000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([0.1, 1.0, 30.0, 300.0]),
    silu=st.booleans(),
    into=st.booleans(),
)
def test_gates_are_torchs(
    count: int, dtype: torch.dtype, size: float, silu: bool, into: bool
) -> None:
    generator = torch.Generator().manual_seed(count)
    gate, up, upstream = (torch.randn(count, generator=generator) for _ in range(3))
    ours = [one.to(dtype).requires_grad_() for one in (gate * size, up)]
    exact = [one.detach().double().requires_grad_() for one in ours]
    y = kernels.gate(*ours, silu, kernels.Scratch() if into else None)
    opened = F.silu(exact[0]) if silu else F.gelu(exact[0], approximate="tanh")
    expected = opened * exact[1]
    made = torch.autograd.grad(y, ours, upstream.to(dtype))
    wanted = torch.autograd.grad(expected, exact, upstream.to(dtype).double())
    limit = 1e-2 if dtype == torch.bfloat16 else 3e-6
    for one, other in zip((y, *made), (expected, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=limit, atol=limit)


def test_tensors_without_memory_have_the_shapes_of_those_with() -> None:
    """And the compiler is told of everything an operation changes."""
    operations, checks = torch.ops.fourfold, ("test_schema", "test_faketensor")
    x, gate = torch.randn(6, 5, 40), torch.randn(30)
    q, kv = torch.randn(2, 20, 6, 8).transpose(1, 2), torch.randn(2, 20, 2, 8).transpose(1, 2)
    starts, turns = torch.zeros(2, 20, dtype=torch.int32), torch.randn(2, 1, 20, 4)
    drawn = (0.3, 0.1, 7, 0)
    for keys in (q.clone(), kv):
        given = (q, keys, keys.clone(), starts, turns)
        torch.library.opcheck(operations.attention, (*given, *drawn), test_utils=checks)
        made = operations.attention(*given, *drawn)
        torch.library.opcheck(
            operations.attention_backward,
            (made[0].clone(), *given, *made, *drawn),
            test_utils=checks,
        )
    norm = (torch.randn(40, dtype=torch.bfloat16), 1e-5, torch.bfloat16)
    torch.library.opcheck(operations.rms_norm, (x, *norm), test_utils=checks)
    y, inverse = operations.rms_norm(x, *norm)
    torch.library.opcheck(operations.rms_norm_backward, (y, x, norm[0], inverse), test_utils=checks)
    for name, gradient in ((operations.gate, ()), (operations.gate_backward, (gate,))):
        torch.library.opcheck(name, (*gradient, gate, gate + 1, True), test_utils=checks)
    torch.library.opcheck(
        operations.gate_out, (gate, gate + 1, False, torch.empty(30)), test_utils=checks
    )


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


GPT2 = ModelShape(97, 48, 2, 4, 192, 40, 0.0, 0.0)
LLAMA = replace(
    GPT2,
    num_key_value_heads=2,
    ffn_hidden_size=136,
    normalization="RMSNorm",
    activation="swiglu",
    bias="none",
    position_embedding="rotary",
    tie_word_embeddings=False,
)
NETWORKS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "windows": replace(LLAMA, sliding_window=9, sliding_window_layers=(1,), attention_scale=0.2),
    "head norms": replace(LLAMA, qk_norm="per_head", head_dim=20, num_key_value_heads=1),
    "partly rotary": replace(
        LLAMA, partial_rotary_factor=0.5, num_key_value_heads=4, activation="geglu"
    ),
}


def loss_and_gradients(
    shape: ModelShape, dtype: torch.dtype, remakes: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    model = GPT(shape)
    initialize(model, seed=0)
    if remakes:
        remake_cheap_outputs(model, norms=True)
    tokens = torch.arange(80).view(2, 40) % 97
    documents = document_ids(2, 40, seed=1)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(tokens, tokens.roll(1, 1), document_ids=documents, loss_scale=1 / 80)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_network_is_the_same_without_them(
    network: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients = loss_and_gradients(NETWORKS[network], dtype)
    remade, again = loss_and_gradients(NETWORKS[network], dtype, remakes=True)
    assert torch.equal(loss, remade)
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    monkeypatch.setattr(kernels, "usable", lambda device, dtype: False)
    expected, torchs = loss_and_gradients(NETWORKS[network], dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 3e-3
    assert float(loss) == pytest.approx(float(expected), rel=tolerance)
    for name, gradient in gradients.items():
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        size = float(torchs[name].norm()) + 1e-6
        assert float((gradient - torchs[name]).norm()) < limit * size, name


def test_what_three_products_read_is_made_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, norm = [], kernels.rms_norm

    def counted(*given: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return norm(*given)

    monkeypatch.setattr(kernels, "rms_norm", counted)
    loss_and_gradients(LLAMA, torch.float32, remakes=True)
    # Two of each layer and the last one, then two of each layer again.
    assert calls == [True] * 5 + [False] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_keeps(dtype: torch.dtype) -> None:
    """No more than its products and norms read, but for a number a head and one a norm."""
    shape = replace(LLAMA, qk_norm="per_head")

    def kept(layers: int, remakes: bool) -> int:
        model = GPT(replace(shape, num_layers=layers))
        initialize(model, seed=0)
        if remakes:
            remake_cheap_outputs(model, norms=True)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return kept_bytes(model, torch.zeros(2, 40, dtype=torch.long))

    each, width, wide, heads, keys = dtype.itemsize, 48, 136, 48, 24
    norms = 2 * (4 * width + 4) + each * (heads + keys) + 4 * (4 + 2)
    products = each * (heads + 2 * keys + heads + 2 * wide) + 4 * 4  # and sums of attention
    outputs = each * (2 * width + wide)
    assert kept(3, remakes=True) - kept(2, remakes=True) == 80 * (norms + products)
    assert kept(3, False) - kept(2, False) == 80 * (norms + products + outputs)


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
