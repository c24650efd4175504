"""Narrower weights: close to the model, the same for every batch, and refused where impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import small_model

from fourfold.errors import UserError
from fourfold.generate import Decoder, Options, generate
from fourfold.generate.weights import FORMATS, HalfLinear, Int8Linear

PROMPTS = [[5], list(range(20, 60)), [5, 6, 7], [150] * 17]

# The relative error of all logits together, on weights far wilder than a trained model's.
ALLOWED = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 8e-2}


def logits_after(decoder: Decoder) -> torch.Tensor:
    decoder.reserve(len(PROMPTS), 48)
    first = decoder.read(PROMPTS)
    return torch.stack([first, decoder.advance([1, 2, 3, 4])])


@pytest.mark.parametrize("weights", FORMATS)
def test_logits_stay_close_to_the_models(weights: Any) -> None:
    model = small_model()
    rows = [[prompt, [*prompt, number]] for number, prompt in enumerate(PROMPTS, start=1)]
    with torch.no_grad():
        expected = torch.stack(
            [
                torch.stack([model(torch.tensor([row[step]]))[0, -1] for row in rows])
                for step in (0, 1)
            ]
        )
    found = logits_after(Decoder(small_model(), weights))
    error = float((found - expected).norm() / expected.norm())
    assert error < ALLOWED[weights]
    assert weights == "float32" or error > 1e-6  # something was indeed rounded


@pytest.mark.parametrize("weights", FORMATS)
def test_a_batch_gives_what_each_prompt_gives_alone(weights: Any) -> None:
    options = Options(max_dec_len=8, top_k=40, seed=2)
    decoder = Decoder(small_model(), weights)
    together = [one.ids for [one] in generate(decoder, PROMPTS, options, eos_id=None)]
    alone = [generate(decoder, [prompt], options, eos_id=None)[0][0].ids for prompt in PROMPTS]
    assert together == alone


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


def test_half_without_fbgemm_is_plain_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(8, 6), torch.randn(8), torch.randn(3, 6)
    packed = HalfLinear(weight, bias)(x)
    engines = property(lambda self: ["qnnpack"])
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", engines)
    plain = HalfLinear(weight, bias)
    assert plain.packed is None
    torch.testing.assert_close(plain(x), packed, atol=0.02, rtol=0.02)
