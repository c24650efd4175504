"""Dropout on every axis: different where it must differ, equal where it must be equal.

That hidden dropout of every layout without sequence parallelism is one process's is in the table of
layouts; here is what the table cannot have, since heads and positions on several ranks draw masks
of their own.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layout_runs import Runs, different, losses, notices
from helpers.traces import relative

from fourfold.data import Batch
from fourfold.engine import Engine
from fourfold.model import gpt, kernels

slow = pytest.mark.slow
COMPILED = kernels.usable(torch.device("cpu"), torch.float32)
ATTENTION = "Model.attention_probs_dropout_prob=0.2"
HIDDEN = "Model.hidden_dropout_prob=0.2"
DROPOUT = (ATTENTION, HIDDEN)
SHORT = "Engine.max_steps=3"

Masks = dict[str, list[torch.Tensor]]


def masks_of_a_step(engine: Engine) -> Masks:
    """What the first step drops on this rank, in the order it is drawn."""
    masks: Masks = {"hidden": [], "attention": []}
    drop, attend = F.dropout, F.scaled_dot_product_attention

    def again(draw: object, into: list[torch.Tensor]) -> None:
        state = torch.get_rng_state()
        into.append(draw().detach() != 0)  # type: ignore[operator]
        torch.set_rng_state(state)

    def spied_drop(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        again(lambda: drop(torch.ones_like(x), p, training), masks["hidden"])
        return drop(x, p, training)

    def spied_attend(q: torch.Tensor, *given: torch.Tensor, **named: object) -> torch.Tensor:
        seen = torch.eye(q.shape[2]).expand(*q.shape[:2], -1, -1)  # of the own value, and no other
        equal = torch.zeros_like(q)
        again(lambda: attend(equal, equal, seen, **named), masks["attention"])
        return attend(q, *given, **named)

    fused = gpt.causal_attention

    def spied_fused(q: torch.Tensor, *given: Any) -> torch.Tensor:
        length = q.shape[2]
        seen = torch.eye(length).expand(*q.shape[:2], -1, -1)
        equal = torch.zeros_like(seen)
        again(lambda: fused(equal, equal, seen, *given[2:]), masks["attention"])
        return fused(q, *given)

    gpt.causal_attention = spied_fused  # type: ignore[assignment]
    F.dropout, F.scaled_dot_product_attention = spied_drop, spied_attend  # type: ignore[assignment]
    batch: Batch = engine.data.loaders["train"].batch(0)
    engine.runner.run(batch, 1)
    engine.data.close()
    return masks


def shared(masks: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which of the masks are the same."""
    return [(i, j) for (i, a), (j, b) in combinations(enumerate(masks), 2) if torch.equal(a, b)]


def heads(masks: Masks) -> list[torch.Tensor]:
    """One mask for each head of each sample."""
    return [head for mask in masks["attention"] for sample in mask for head in sample]


@pytest.mark.parametrize(
    "layout",
    [
        "mp2",
        "sh2 stage3 mp2",
        pytest.param("pp2 mp2", marks=slow),
        pytest.param("dp2 mp2", marks=slow),
    ],
)
def test_no_two_heads_share_a_mask_and_what_is_replicated_stays_so(
    layout: str,
    runs: Runs,
) -> None:
    ranks = runs.on_ranks(layout, "run", masks_of_a_step, *DROPOUT)
    assert not shared([head for masks in ranks for head in heads(masks)])
    for first, second in zip(ranks[::2], ranks[1::2]):
        # The model-parallel ranks, which are next to each other.
        assert len(first["hidden"]) == len(second["hidden"]) > 0
        for one, other in zip(first["hidden"], second["hidden"]):
            assert torch.equal(one, other)
    apart = [mask for masks in ranks[::2] for mask in masks["hidden"]]
    assert not shared(apart), "other samples and layers have other masks"


@pytest.mark.parametrize("layout", ["mp2 sp", pytest.param("pp2 mp2 sp", marks=slow)])
def test_with_sequence_parallelism_no_two_places_share_a_mask(layout: str, runs: Runs) -> None:
    ranks = runs.on_ranks(layout, "run", masks_of_a_step, *DROPOUT)
    assert not shared([head for masks in ranks for head in heads(masks)])
    assert not shared([mask for masks in ranks for mask in masks["hidden"]])
    assert ranks[0]["hidden"][0].shape[1] == 8, "half of the 16 positions"


@pytest.mark.parametrize(
    "layout",
    [
        "sh2 stage3",
        "pp2 zbv",
        pytest.param("dp2", marks=slow),
        pytest.param("pp2", marks=slow),
    ],
)
def test_where_no_head_is_cut_off_attention_drops_what_one_process_does(
    layout: str,
    runs: Runs,
) -> None:
    one = runs.fit("one", "one", *DROPOUT, SHORT)
    other = runs.fit(layout, "other", *DROPOUT, SHORT)
    assert relative(losses(other), losses(one)) < 1e-5


@pytest.mark.skipif(not COMPILED, reason="torch's kernel drops by the generator, not by the head")
@pytest.mark.parametrize("layout", ["mp2", pytest.param("dp2 mp2", marks=slow)])
def test_a_head_drops_the_same_on_whichever_rank_it_is(layout: str, runs: Runs) -> None:
    one = runs.fit("one", "one", *DROPOUT, SHORT)
    other = runs.fit(layout, "other", *DROPOUT, SHORT)
    assert relative(losses(other), losses(one)) < 1e-5


@pytest.mark.parametrize("layout", ["mp2", "mp2 sp", pytest.param("dp2 mp2", marks=slow)])
def test_replicas_do_not_drift_apart(layout: str, runs: Runs) -> None:
    """`fit` raises on every rank if any replica differs by a bit after any step."""
    runs.fit(layout, "run", *DROPOUT, SHORT, "Engine.check_replicas_freq=1")


@pytest.mark.parametrize(("setting", "told"), [(ATTENTION, True), (HIDDEN, False)])
def test_that_a_processor_is_slow_at_it_is_said(
    setting: str, told: bool, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "usable", lambda device, dtype: False)
    run = runs.fit("one", "run", setting, "Engine.max_steps=1")
    said = "Model.attention_probs_dropout_prob=0.2: on a CPU attention with dropout is several"
    assert (said in notices(run)) == told


def checkpoint_of(run: Path) -> Path:
    return run / "step_4"


@pytest.mark.parametrize("layout", ["mp2 sp", pytest.param("pp2 mp2", marks=slow)])
def test_a_run_is_reproducible_and_resumable_to_the_bit(layout: str, runs: Runs) -> None:
    settings = (*DROPOUT, "Engine.max_steps=4")
    once = runs.fit(layout, "once", *settings)
    again = runs.fit(layout, "again", *settings)
    assert losses(once) == losses(again)
    assert not different(checkpoint_of(once), checkpoint_of(again))
    resumed = runs.fit(layout, "resumed", *settings, f"Engine.save_load.ckpt_dir={once / 'step_2'}")
    assert not different(checkpoint_of(once), checkpoint_of(resumed))


@pytest.mark.parametrize(
    ("layout", "granularity"),
    [
        ("mp2", "core_attn"),
        pytest.param("mp2", "full", marks=slow),
        pytest.param("mp2 sp", "full", marks=slow),
        pytest.param("pp2 mp2", "full_attn", marks=slow),
    ],
)
def test_recomputation_drops_the_same_numbers(layout: str, granularity: str, runs: Runs) -> None:
    settings = (*DROPOUT, SHORT)
    kept = runs.fit(layout, "kept", *settings)
    recompute = f"Model.recompute_granularity={granularity}"
    recomputed = runs.fit(layout, "recomputed", *settings, "Model.use_recompute=True", recompute)
    assert losses(recomputed) == losses(kept)
    assert not different(kept / "step_3", recomputed / "step_3")
