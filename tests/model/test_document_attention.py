"""Documents packed into one sample give what each gives alone, however the model is run."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.one_process import runner_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold.data import Batch
from fourfold.model import GPT, ModelShape, initialize, kernels
from fourfold.model.positions import document_mask
from fourfold.parallel import Precision
from fourfold.parallel.recompute import Recompute, apply_recompute

LENGTHS = ((9, 7), (1, 15), (4, 12))  # two documents a sample of 16 tokens


def packed_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 96, (len(LENGTHS), 16), generator=generator)
    labels = torch.randint(0, 96, tokens.shape, generator=generator)
    positions = torch.tensor([[*range(first), *range(second)] for first, second in LENGTHS])
    documents = torch.tensor([[0] * first + [1] * second for first, second in LENGTHS])
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.ones(tokens.shape),
        position_ids=positions,
        sample_ids=np.arange(len(LENGTHS)),
        global_valid_tokens=float(tokens.numel()),
        document_ids=documents.to(torch.int32),
    )


def pieces() -> list[tuple[int, slice]]:
    """Every document of the batch: its row and its columns."""
    return [
        (row, piece)
        for row, (first, second) in enumerate(LENGTHS)
        for piece in (slice(0, first), slice(first, first + second))
    ]


def gradients_of(model: GPT) -> dict[str, Tensor]:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


@given(st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=3))
def test_the_mask_is_causal_and_of_one_document(rows: list[list[int]]) -> None:
    """Any numbers will do as ids; even a document that comes back is one document."""
    mask = document_mask(torch.tensor(rows, dtype=torch.int32), torch.bfloat16)
    assert mask.shape == (len(rows), 1, 9, 9) and mask.dtype == torch.bfloat16
    for row, query, key in itertools.product(range(len(rows)), range(9), range(9)):
        allowed = key <= query and rows[row][key] == rows[row][query]
        assert mask[row, 0, query, key] == (0.0 if allowed else -torch.inf)


def test_packed_documents_give_the_logits_and_gradients_of_each_alone(tiny_model: GPT) -> None:
    batch = packed_batch()
    packed = tiny_model(batch.tokens, None, None, batch.position_ids, batch.document_ids)
    tiny_model(batch.tokens, batch.labels, None, batch.position_ids, batch.document_ids).backward()
    packed_gradients = gradients_of(tiny_model)

    for row, piece in pieces():
        alone = tiny_model(batch.tokens[row : row + 1, piece])
        torch.testing.assert_close(packed[row : row + 1, piece], alone, rtol=1e-5, atol=1e-5)
        tokens, labels = batch.tokens[row : row + 1, piece], batch.labels[row : row + 1, piece]
        tiny_model(tokens, labels).backward()
    for name, gradient in gradients_of(tiny_model).items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 1000))
def test_any_cut_into_documents(lengths: list[int], seed: int) -> None:
    model = GPT(ModelShape(32, 16, 2, 2, 32, 24))
    initialize(model, seed=seed)
    tokens = torch.randint(0, 32, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)]])
    positions = torch.tensor([[position for length in lengths for position in range(length)]])
    with torch.no_grad():
        packed = model(tokens, position_ids=positions, document_ids=ids)
        alone = torch.cat([model(piece) for piece in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_without_document_ids_the_first_document_reaches_the_second(tiny_model: GPT) -> None:
    batch = packed_batch()
    changed = batch.tokens.clone()
    for row, (first, _) in enumerate(LENGTHS):
        changed[row, :first] = (changed[row, :first] + 1) % 96

    def second_documents(tokens: Tensor, document_ids: Tensor | None) -> Tensor:
        logits = tiny_model(tokens, position_ids=batch.position_ids, document_ids=document_ids)
        return torch.cat([logits[row, first:] for row, (first, _) in enumerate(LENGTHS)])

    leaking = second_documents(batch.tokens, None), second_documents(changed, None)
    assert ((leaking[0] - leaking[1]).abs().amax(dim=1) > 1e-4).all(), "every token sees it"
    apart = [second_documents(tokens, batch.document_ids) for tokens in (batch.tokens, changed)]
    assert torch.equal(*apart)


def test_one_document_is_plain_causal_attention(tiny_model: GPT) -> None:
    batch = packed_batch()
    one = torch.zeros_like(batch.tokens)
    torch.testing.assert_close(
        tiny_model(batch.tokens, document_ids=one), tiny_model(batch.tokens), rtol=1e-5, atol=1e-5
    )


def test_the_default_is_torchs_causal_path(
    tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without document ids no mask exists, and attention is the very call it always was."""
    batch, calls = packed_batch(), 0
    monkeypatch.setattr(kernels, "usable", lambda device, dtype: False)
    expected = tiny_model(batch.tokens, batch.labels)
    attend = F.scaled_dot_product_attention

    def causal(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        nonlocal calls
        calls += 1
        plain = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "enable_gqa": False}
        assert options == {**plain, "scale": None}
        return attend(q, k, v, is_causal=True)

    monkeypatch.setattr(F, "scaled_dot_product_attention", causal)
    monkeypatch.setattr("fourfold.model.positions.document_mask", None)
    assert torch.equal(tiny_model(batch.tokens, batch.labels), expected)
    assert calls == 2, "once a layer"


def test_all_layers_share_one_mask(tiny_model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for the backward pass once, and not once a layer."""
    batch, masks = packed_batch(), []
    monkeypatch.setattr(kernels, "usable", lambda device, dtype: False)

    def recorded(document_ids: Tensor, dtype: torch.dtype, window: None) -> Tensor:
        masks.append(document_mask(document_ids, dtype, window))
        return masks[-1]

    monkeypatch.setattr("fourfold.model.positions.document_mask", recorded)
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == (3, 1, 16, 16):
            kept.add(tensor.data_ptr())
        return tensor

    for dtype in ("float32", "bfloat16"):
        kept.clear()
        masks.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
        ):
            tiny_model(batch.tokens, batch.labels, document_ids=batch.document_ids)
        assert kept == {mask.data_ptr() for mask in masks} and len(kept) == 1, dtype


def run(
    shape: ModelShape,
    *,
    precision: Precision | None = None,
    granularity: str | None = None,
    compiled: bool = False,
    micro: int = 3,
    batch: Batch | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the batch through a Runner, as in training."""
    model = GPT(shape)
    initialize(model, seed=1)
    if granularity:
        apply_recompute(model, Recompute(granularity))
    if compiled:
        for layer in model.layers.values():
            layer.compile()
    batch = batch or packed_batch()
    runner = runner_of(model, precision or Precision("float32", None), micro)
    loss = runner.run(batch, step=3).item()
    return loss, {name: p.grad for name, p in runner.masters.items() if p.grad is not None}


def with_dropout(shape: ModelShape, dropout: float = 0.2) -> ModelShape:
    return dataclasses.replace(
        shape, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
@pytest.mark.parametrize("level", [None, "O1", "O2"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_is_exact_with_the_mask(
    tiny_shape: ModelShape, granularity: str, level: str | None, dropout: float
) -> None:
    shape = with_dropout(tiny_shape, dropout)
    precision = Precision("bfloat16" if level else "float32", level)
    loss, gradients = run(shape, precision=precision)
    other_loss, others = run(shape, precision=precision, granularity=granularity)
    assert other_loss == loss
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(others[name], gradient), name


def test_the_runner_cuts_document_ids_with_the_batch(tiny_shape: ModelShape) -> None:
    loss, gradients = run(tiny_shape, micro=3)
    other_loss, others = run(tiny_shape, micro=1)
    leaking_loss, _ = run(tiny_shape, batch=dataclasses.replace(packed_batch(), document_ids=None))
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert abs(leaking_loss - loss) > 1e-4
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_dropout_keeps_documents_apart(tiny_shape: ModelShape) -> None:
    """The same seed drops the same places, so what a document sees of another would show."""
    model = GPT(with_dropout(tiny_shape))
    initialize(model, seed=1)
    batch = packed_batch()
    changed = batch.tokens.clone()
    changed[0, :9] = (changed[0, :9] + 1) % 96
    one, other = (
        model(tokens, None, None, batch.position_ids, batch.document_ids, dropout_seed=4)
        for tokens in (batch.tokens, changed)
    )
    assert torch.equal(one[0, 9:], other[0, 9:])
    assert not torch.equal(one[0, :9], other[0, :9])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bf16_is_close_to_fp32(tiny_shape: ModelShape, level: str) -> None:
    loss, gradients = run(tiny_shape)
    low_loss, low = run(tiny_shape, precision=Precision("bfloat16", level))
    assert 0 < abs(low_loss - loss) < 0.02
    for name, gradient in gradients.items():
        assert (low[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-3, name


def test_a_static_graph_computes_the_same(tiny_shape: ModelShape) -> None:
    shape = dataclasses.replace(tiny_shape, num_layers=1)
    loss, gradients = run(shape)
    other_loss, others = run(shape, compiled=True)
    assert other_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
