"""Narrower weights: close to the model, the same for every batch, and refused where impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.networks import SHAPE, small_model

from fourfold import native
from fourfold.errors import UserError
from fourfold.generate import Decoder, Options, decoder, generate
from fourfold.generate.packed import PackedMatrix
from fourfold.generate.weights import FORMATS, HalfLinear, Int8Linear, _cast
from fourfold.model.gpt import GPT, Block

PROMPTS = [[5], list(range(20, 60)), [5, 6, 7], [150] * 17]

# The relative error of all logits together, on weights far wilder than a trained model's.
ALLOWED = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 8e-2, "int4": 0.5}


def logits_after(network: Decoder) -> torch.Tensor:
    network.reserve(len(PROMPTS), 48)
    first = network.read(PROMPTS)
    return torch.stack([first, network.advance([1, 2, 3, 4])])


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled kernels, and as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr("fourfold.generate.weights.kernels", lambda: None)
    elif native.why_not("decode"):
        pytest.skip("no kernels can be built here")
    return request.param


@pytest.mark.parametrize("weights", FORMATS)
def test_logits_stay_close_to_the_models(weights: Any, way: str) -> None:
    model = small_model()
    rows = [[prompt, [*prompt, number]] for number, prompt in enumerate(PROMPTS, start=1)]
    with torch.no_grad():
        expected = torch.stack(
            [
                torch.stack([model(torch.tensor([row[step]]))[0, -1] for row in rows])
                for step in (0, 1)
            ]
        )
    network = Decoder(small_model(), weights)
    assert (network.fused is not None) == (way == "kernels")
    found = logits_after(network)
    error = float((found - expected).norm() / expected.norm())
    assert error < ALLOWED[weights]
    assert weights == "float32" or error > 1e-6  # something was indeed rounded


@pytest.mark.parametrize("weights", FORMATS)
def test_a_batch_gives_what_each_prompt_gives_alone(weights: Any, way: str) -> None:
    options = Options(max_dec_len=8, top_k=40, seed=2)
    network = Decoder(small_model(), weights)
    together = [one.ids for [one] in generate(network, PROMPTS, options, eos_id=None)]
    alone = [generate(network, [prompt], options, eos_id=None)[0][0].ids for prompt in PROMPTS]
    assert together == alone


@pytest.mark.parametrize("weights", FORMATS)
def test_a_token_has_the_same_logits_to_the_bit_however_it_is_computed(weights: Any) -> None:
    """Alone or beside others, in a prompt or one at a time, whatever the number of threads."""
    network = Decoder(small_model(), weights)
    if network.fused is None:
        pytest.skip("no kernels can be built here")
    prompt = PROMPTS[1]
    network.reserve(8, 64)
    whole = network.read([prompt])
    network.reserve(8, 64)
    network.read([prompt[:1]])
    for token in prompt[1:]:
        single = network.advance([token])
    assert torch.equal(single, whole)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        network.reserve(8, 64)
        assert torch.equal(network.read([*PROMPTS, prompt])[[1, 4]], whole.expand(2, -1))
    finally:
        torch.set_num_threads(before)


def test_a_network_of_another_kind_runs_through_torch_with_packed_products() -> None:
    class OtherBlock(Block):
        """The same computation, which only this class says it is."""

    class Other(GPT):
        block = OtherBlock

    model = Other(SHAPE)
    model.load_state_dict(small_model().state_dict())
    network = Decoder(model, "float32")
    assert network.fused is None
    torch.testing.assert_close(
        logits_after(network), logits_after(Decoder(small_model())), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("weights", ["bfloat16", "float16"])
def test_on_a_gpu_the_mask_is_of_the_type_of_the_queries(
    weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's kernels demand. The model is cast as for a GPU, on a processor."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(decoder, "set_format", lambda model, to: _cast(model, to, cpu))
    attend, masks = F.scaled_dot_product_attention, []

    def spied(q: torch.Tensor, *given: torch.Tensor, **named: Any) -> torch.Tensor:
        if (mask := named.get("attn_mask")) is not None:
            masks.append(mask)
            assert mask.dtype == q.dtype == getattr(torch, weights)
        return attend(q, *given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    cast = logits_after(Decoder(small_model(), weights))
    assert masks, "rows of different lengths need a mask"
    monkeypatch.undo()
    expected = logits_after(Decoder(small_model()))
    assert float((cast - expected).norm() / expected.norm()) < 2 * ALLOWED["bfloat16"]


def test_int8_sums_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Int8Linear(torch.randn(24, 40, generator=generator), torch.randn(24))
    x = torch.randn(6, 40, generator=generator)
    x[2] = 0.0
    assert torch.equal(layer(x), torch.cat([layer(row.unsqueeze(0)) for row in x]))
    torch.testing.assert_close(layer(x)[2], layer.bias)


@pytest.mark.parametrize("value", [1e5, float("nan"), float("inf")])
def test_weights_beyond_half_precision_are_refused(value: float) -> None:
    weight = torch.zeros(4, 4)
    weight[1, 2] = value
    with pytest.raises(UserError, match="does not fit into float16"):
        HalfLinear(weight, None)
    if native.library("decode") is not None:
        with pytest.raises(UserError, match="does not fit into float16"):
            PackedMatrix("float16", weight)


def test_half_without_fbgemm_is_plain_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(8, 6), torch.randn(8), torch.randn(3, 6)
    packed = HalfLinear(weight, bias)(x)
    engines = property(lambda self: ["qnnpack"])
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", engines)
    plain = HalfLinear(weight, bias)
    assert plain.packed is None
    torch.testing.assert_close(plain(x), packed, atol=0.02, rtol=0.02)
