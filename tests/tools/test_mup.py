"""muP: what width changes in the table, in the logits and in an update, and the checks of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_text_run import TextRun, make_run
from typer.testing import CliRunner

from fourfold.cli.mup import app
from fourfold.config.load import read_config
from fourfold.errors import UserError
from fourfold.model import GPT, ModelShape
from fourfold.model.gpt_table import gpt_parameters
from fourfold.model.init import initialize
from fourfold.optim import Optimizer
from fourfold.tools.mup import (
    PLACES,
    Coordinates,
    Sweep,
    Trial,
    WidthFamily,
    check_coordinates,
    lowest_point,
    power,
    random_batch,
    sweep_learning_rates,
)

SMALL = ["-o", "Model.max_position_embeddings=32", "-o", "Data.dataset.max_seq_len=16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("run"))


def family(run: TextRun, widths: list[int], *overrides: str) -> WidthFamily:
    return WidthFamily.of(read_config(run.config, overrides), widths)


# -- what width changes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 2, "activation": "swiglu", "tie_word_embeddings": False}],
    ids=["gpt2", "llama"],
)
def test_matrices_of_the_layers_begin_smaller_and_learn_slower(options: dict[str, object]) -> None:
    plain = ModelShape(96, 64, 2, 8, 256, 32, depth_scaled_init=True, **options)  # type: ignore[arg-type]
    scaled = ModelShape(96, 64, 2, 8, 256, 32, depth_scaled_init=True, mup_base_width=16, **options)  # type: ignore[arg-type]
    table, changed = gpt_parameters(plain), set()
    for name, row in gpt_parameters(scaled):
        before = table[name]
        assert before.lr_scale == 1.0
        if row != before:
            changed.add(row.name)
            assert row.lr_scale == 1 / 4 and row.init_std == before.init_std / 2
    assert changed == {row.name for row in table.layer() if len(row.shape) == 2}


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_divided_by_the_ratio_of_widths(tied: bool) -> None:
    shape = ModelShape(96, 64, 1, 4, 256, 32, tie_word_embeddings=tied, logit_scale=3.0)
    scaled = ModelShape(
        96, 64, 1, 4, 256, 32, tie_word_embeddings=tied, logit_scale=3.0, mup_base_width=16
    )
    plain, divided = GPT(shape), GPT(scaled)
    initialize(plain, seed=1)
    divided.load_state_dict(plain.state_dict())
    tokens = torch.arange(20).view(2, 10)
    torch.testing.assert_close(divided(tokens), plain(tokens) / 4)


def test_a_network_of_the_base_width_is_the_plain_one() -> None:
    shape = ModelShape(96, 64, 1, 4, 256, 32)
    same = ModelShape(96, 64, 1, 4, 256, 32, mup_base_width=64)
    assert gpt_parameters(same).rows == gpt_parameters(shape).rows
    assert same.output_scale == 1.0


def test_the_first_update_of_adam_is_the_learning_rate_of_each_row(run: TextRun) -> None:
    """Which is the size of Adam's first step wherever there is a gradient."""
    config = family(run, [32, 128]).config(128, mup=True, Optimizer__weight_decay=0.0)
    trial = Trial(config)
    before = {name: one.clone() for name, one in trial.model.state_dict().items()}
    trial.step(random_batch(config), 1e-3)
    for name, now in trial.model.state_dict().items():
        row = trial.model.table[name]
        slower = 4 if row.is_matrix and row.in_every_layer else 1
        moved = float((now - before[name]).abs().max())
        assert moved == pytest.approx(1e-3 / slower, rel=0.02), name


def test_weights_decay_at_the_learning_rate_of_the_schedule() -> None:
    """Not slower with their own: what decay balances would grow with the width."""
    slow, fast = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Optimizer(
        {"slow": slow, "fast": fast}, decayed={"slow", "fast"}, lr_scales={"slow": 0.25},
        weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8, grad_clip=0.0,
    )  # fmt: skip
    for parameter in (slow, fast):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.update(0.5, norm=0.0)
    torch.testing.assert_close(slow.data, torch.full((3,), 0.95))
    torch.testing.assert_close(fast.data, slow.data)


# -- widths ---------------------------------------------------------------------------------------


def test_a_wider_network_has_more_heads_of_the_same_size(run: TextRun) -> None:
    made = family(run, [32, 96], "Model.num_attention_heads=4", "Model.num_key_value_heads=2")
    model = made.config(96, mup=True).Model
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (12, 6, 8)
    assert (model.ffn_hidden_size, model.mup_base_width) == (384, 32)
    assert made.config(96, mup=False).Model.mup_base_width is None


@pytest.mark.parametrize(
    ("widths", "told"),
    [([32], "one width says nothing"), ([32, 40], "a width of 40 would have 2.5 attention heads")],
)
def test_widths_that_cannot_be_are_refused(run: TextRun, widths: list[int], told: str) -> None:
    with pytest.raises(UserError, match=told):
        family(run, widths)


# -- the checks -----------------------------------------------------------------------------------


def test_activations_are_flat_under_mup_and_not_without(run: TextRun) -> None:
    made = family(run, [16, 32, 64, 128], "Model.num_layers=1")
    batch = random_batch(made.config(16, mup=False))
    found = {
        mup: check_coordinates(made, 3, [batch], mup=mup, report=lambda line: None)
        for mup in (True, False)
    }
    assert found[True].all_flat, [found[True].exponent(place) for place in PLACES]
    growing = {place for place in PLACES if found[False].exponent(place) > 0.5}
    assert growing >= {"attention", "feed-forward", "residual stream", "logits"}
    # The same at the base width, where there is nothing to scale.
    assert np.array_equal(found[True].sizes[:, 0], found[False].sizes[:, 0])


def test_exponents_and_verdicts() -> None:
    widths = [8, 16, 32]
    assert power(widths, np.array([1.0, 2.0, 4.0])) == pytest.approx(1.0)
    assert power(widths, np.array([3.0, 3.0, math.inf])) == math.inf
    sizes = np.ones((len(PLACES), 3, 2))
    assert Coordinates(widths, sizes).all_flat
    sizes[PLACES.index("logits"), :, 1] = [4.0, 2.0, 1.0]  # shrinking is not flat either
    found = Coordinates(widths, sizes)
    assert not found.is_flat("logits") and found.is_flat("attention") and not found.all_flat


def test_the_best_rate_lies_between_those_tried() -> None:
    rates = [0.01, 0.02, 0.04, 0.08]
    losses = (np.log2(rates) - math.log2(0.025)) ** 2
    assert lowest_point(rates, losses) == pytest.approx(0.025)
    assert lowest_point(rates, np.array([1.0, 2.0, 3.0, 4.0])) == 0.01
    assert lowest_point(rates, np.array([3.0, 2.0, math.inf, math.inf])) == 0.02
    moved = Sweep([8, 16], rates, np.stack([losses, losses[::-1]]))
    assert moved.moved == pytest.approx(0.032 / 0.025) and moved.is_bracketed
    assert not Sweep([8], rates, np.array([[1.0, 2.0, 3.0, 4.0]])).is_bracketed


def test_the_command_says_flat_or_not(run: TextRun, tmp_path: Path) -> None:
    picture = tmp_path / "coordinates.png"
    words = ["check", "-c", str(run.config), "--widths", "16,64", "--steps", "3", *SMALL]
    said = CliRunner().invoke(app, [*words, "--plot", str(picture)])
    assert said.exit_code == 0, said.output
    assert "without muP (base width 16): not flat\nwith muP (base width 16): flat" in said.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Logits that grow so far that the network is another one are noticed.
    said = CliRunner().invoke(app, [*words, "-o", "Optimizer.lr.max_lr=3.0"])
    assert said.exit_code == 1 and "with muP (base width 16): not flat" in said.output


@pytest.mark.slow
def test_the_best_learning_rate_stays_under_mup_and_moves_without(run: TextRun) -> None:
    """Over eight times the width; the words of the text are drawn at random, so that all there is
    to learn is their spelling, and a run of 60 steps does."""
    made = family(run, [32, 256], "Model.num_attention_heads=4")
    rates = [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064]
    found = {
        mup: sweep_learning_rates(made, rates, 60, mup=mup, report=lambda line: None)
        for mup in (True, False)
    }
    assert found[True].is_bracketed and found[True].moved < 1.5, found[True]
    assert found[False].moved > 2, found[False]
