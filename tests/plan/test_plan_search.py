"""The search: it offers what training accepts, misses nothing, and more memory never hurts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import Config, load_config
from fourfold.cost.workload import workload_of
from fourfold.errors import ConfigError
from fourfold.plan import parse_cluster, plan
from fourfold.plan.auto import describe_cluster
from fourfold.plan.calibrate import physics_check
from fourfold.plan.cluster import PIPELINE_BAND, STAGE_BAND
from fourfold.plan.planner import candidate_of
from fourfold.plan.report import (
    Economics,
    advice_lines,
    as_json,
    best_of_kind,
    devices_for,
    goodput_of,
    headings,
    table,
)
from fourfold.plan.search import legal_spreads, one_spread
from fourfold.plan.suggestions import (
    impossible,
    near_misses,
    sensitivity,
    shape_lint,
    smallest_world,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "gpt"
ONE_SAMPLE = ["Data.batch_size.local_batch_size=1", "Data.batch_size.micro_batch_size=1"]
BIG = CONFIGS / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml"
SMALL = CONFIGS / "quickstart_gpt2.yaml"
SMALL_CHANGES = ["Model.num_layers=6", "Data.batch_size.micro_batch_size=null"]


def small(*changes: str) -> Config:
    return load_config(SMALL, [*SMALL_CHANGES, *changes])


def layouts(config: Config, world: int) -> list[object]:
    spread = legal_spreads(workload_of(config), world)
    assert spread is not None
    return [one_spread(spread, index) for index in range(len(np.asarray(spread.mp)))]


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
def test_everything_offered_is_accepted_by_training(world: int) -> None:
    config = small()
    workload = workload_of(config)
    cluster = parse_cluster(f"{world}xA100-80G")
    made = plan(config, cluster)
    seen = set()
    for spread in layouts(config, world):
        assert spread.world == world
        key = (spread.mp, spread.pp, spread.sharding, spread.schedule, spread.micro_batch)
        if key in seen:
            continue
        seen.add(key)
        candidate = candidate_of(workload, spread, cluster, made.coefficients)
        resolved = load_config(SMALL, [*SMALL_CHANGES, *candidate.overrides()], world)
        assert resolved.Distributed.dp_degree == spread.dp
        assert resolved.Data.batch_size.global_batch_size == workload.global_batch
        assert resolved.Engine.accumulate_steps == spread.micro_batches
        assert not [line for line in resolved.notices if "accumulate" in line]


def test_nothing_that_training_accepts_is_missed() -> None:
    """Every 1F1B layout of four ranks that `load_config` takes, found by trying them all."""
    offered = {
        (s.mp, s.pp, s.sharding, s.micro_batch) for s in layouts(small(), 4) if s.schedule == "1F1B"
    }
    accepted = set()
    for mp, pp, sharding, size in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8, 16)):
        if 4 % (mp * pp * sharding):
            continue
        changes = [
            f"Distributed.mp_degree={mp}",
            f"Distributed.pp_degree={pp}",
            f"Distributed.sharding.sharding_degree={sharding}",
            "Data.batch_size.local_batch_size=null",
            f"Data.batch_size.micro_batch_size={size}",
        ]
        try:
            load_config(SMALL, [*SMALL_CHANGES[:1], *changes], 4)
        except ConfigError:
            continue
        accepted.add((mp, pp, sharding, size))
    assert offered == accepted


def test_fixed_degrees_are_kept() -> None:
    made = plan(small(), parse_cluster("8xA100-80G"), fixed={"mp": 2, "recompute": "full"})
    assert made.candidates
    assert {(c.spread.mp, c.spread.recompute) for c in made.candidates} == {(2, "full")}


def test_the_files_own_layout_of_175b_is_planned() -> None:
    made = plan(load_config(BIG), parse_cluster("16x8xA100-80G"))
    own = made.own
    assert own is not None and own.fit == "fits"
    assert (own.spread.mp, own.spread.pp, own.spread.dp) == (8, 16, 1)
    # FleetX and Megatron-LM both published about 14.6k tokens/s for this layout.
    assert own.tokens_per_second == pytest.approx(14600, rel=own.band)
    assert made.best is not None and made.best.seconds < own.seconds
    inside = [c.seconds for c in made.candidates if c.fit == "fits" and c.spread.mp <= 8]
    assert inside == sorted(inside)


def test_layers_cut_over_nodes_come_last_unless_that_is_asked_for() -> None:
    cluster, config = parse_cluster("16x8xA100-80G"), load_config(BIG)
    crosses = [candidate.spread.mp > 8 for candidate in plan(config, cluster).candidates]
    assert any(crosses) and crosses == sorted(crosses)
    asked = plan(config, cluster, fixed={"mp": 16})
    assert asked.best is not None and asked.best.spread.mp == 16
    # Where nothing else is legal they are there: one device a node, one sample, two layers.
    few = load_config(BIG, ["Model.num_layers=1", "Distributed.pp_degree=1", *ONE_SAMPLE])
    assert plan(few, parse_cluster("4x1xA100-80G")).candidates


def test_fits_is_said_only_with_the_room_that_memory_may_need() -> None:
    made = plan(load_config(BIG), parse_cluster("16x8xA100-80G"))
    for candidate in made.candidates:
        above = PIPELINE_BAND.above if candidate.spread.pp > 1 else STAGE_BAND.above
        room = candidate.bytes_ * (1 + above) <= candidate.capacity
        assert candidate.fit == ("fits" if room else "tight"), candidate.layout
    assert {candidate.fit for candidate in made.candidates} == {"fits", "tight"}
    assert made.cluster.usable_bytes == 79.1 * 2**30
    # Of those that are tight, the nearly full ones come last.
    tight = [c.concern for c in made.candidates if c.fit == "tight" and c.spread.mp <= 8]
    assert tight == sorted(tight)


def test_memory_has_a_range_by_kind_of_run() -> None:
    made = plan(load_config(BIG), parse_cluster("16x8xA100-80G"))
    piped = next(c for c in made.candidates if c.spread.pp > 1)
    alone = next(c for c in made.candidates if c.spread.pp == 1)
    for candidate, band in ((piped, PIPELINE_BAND), (alone, STAGE_BAND)):
        assert candidate.most_bytes == pytest.approx(candidate.bytes_ * (1 + band.above))
        assert candidate.least_bytes == pytest.approx(candidate.bytes_ * (1 - band.below))
        numbers = re.findall(r"[\d.]+", candidate.memory_text)
        assert [float(number) * 2**30 for number in numbers] == pytest.approx(
            [candidate.bytes_, candidate.least_bytes, candidate.most_bytes], rel=0.05
        )
    # A cluster file may say better.
    known = made.cluster.device.model_copy(update={"memory_band": 0.05})
    calibrated = made.cluster.model_copy(update={"device": known})
    assert float(calibrated.memory_band(4).above) == 0.05


def test_predictions_above_anything_published_are_marked() -> None:
    made = plan(load_config(BIG), parse_cluster("16x8xA100-80G"))
    economics = Economics(made, None, None)
    published = best_of_kind(made)
    assert published is not None and made.best is not None
    assert made.best.mfu > published.share, "or find another example"
    shown = table(made, 40, economics)
    mfu = headings(economics).index("MFU")
    found = as_json(made, 40, economics)
    marks = [entry["above_published"] for entry in found["candidates"]]
    assert marks == [candidate.mfu > published.share for candidate in made.candidates[:40]]
    assert [row[mfu].endswith("!") for row in shown[:40]] == marks and not all(marks)
    assert found["published_mfu"]["share"] == published.share
    lines = list(advice_lines(made, 5, economics))
    assert any("above anything published for this kind" in line for line in lines)
    assert any("Fourfold itself has not been measured on a GPU" in line for line in lines)
    # Of processors nothing is published.
    assert best_of_kind(replace(made, cluster=describe_cluster(1, None, "cpu")[0])) is None


def test_published_errors_on_one_side_make_a_band_on_one_side() -> None:
    made = plan(load_config(BIG), parse_cluster("16x8xV100-32G"))
    assert made.best is not None
    assert (made.best.band, made.best.band_below) == (0.45, 0.05)
    assert made.best.band_text == "+45% -5%" and " +" in made.best.seconds_text


def test_a_file_that_does_not_divide_the_cluster_says_so() -> None:
    made = plan(load_config(BIG), parse_cluster("10x8xA100-80G"))
    assert made.own is None
    assert "do not divide" in str(made.own_problem)


@settings(max_examples=4, deadline=None)
@given(st.floats(1, 200), st.floats(1.01, 3))
def test_more_memory_never_makes_a_fit_not_fit(gib: float, factor: float) -> None:
    cluster = parse_cluster("8xA100-80G")

    def fitting(memory: float) -> set[str]:
        device = cluster.device.model_copy(update={"memory_gib": memory})
        made = plan(load_config(BIG), cluster.model_copy(update={"device": device, "nodes": 4}))
        return {c.layout.split("(")[0] for c in made.candidates}

    assert fitting(gib) <= fitting(gib * factor)


def test_near_misses_and_sensitivity_speak_of_the_best() -> None:
    made = plan(load_config(BIG), parse_cluster("16x8xA100-80G"))
    assert made.best is not None
    sentences = list(near_misses(made))
    assert sentences and all("GiB more than the 79.1 of a device" in line for line in sentences)
    changes = sensitivity(made, made.best)
    assert any(change.knob.startswith("micro_batch_size") for change in changes)
    slower = [c for c in changes if c.knob.startswith("recompute") and c.fit == "fits"]
    assert all(change.time > -0.005 for change in slower)


def test_175b_on_eight_small_cards_is_impossible_and_says_by_how_much() -> None:
    made = plan(load_config(BIG), parse_cluster("8xV100-16G"))
    assert made.best is None
    first, second, *_ = impossible(made)
    assert "no layout fits 1x8xV100-16G" in first and "GiB more than the 15.7" in first
    assert "smallest cluster of V100-16G that would" in second
    enough = smallest_world(made.workload, made.cluster)
    assert enough is not None
    assert plan(load_config(BIG), enough).candidates
    fewer = enough.model_copy(update={"nodes": enough.nodes - 1})
    assert not [c for c in plan(load_config(BIG), fewer).candidates if c.fit == "fits"]


def test_shapes_that_waste_are_named() -> None:
    config = small("Model.vocab_size=8190", "Model.hidden_size=252")
    remarks = " ".join(shape_lint(workload_of(config), None))
    assert "vocab_size 8190" in remarks and "head size 252 / 4 = 63" in remarks
    assert not list(shape_lint(workload_of(small()), None))


def test_a_rate_above_what_is_possible_is_a_wrong_label() -> None:
    """FleetX's log of "1.3B" at 11,500 tokens/s per V100 was a smaller model."""
    as_labelled = 11_500 * 8 * 1.3e9
    assert "check the model size" in str(physics_check(as_labelled, 125e12, "log"))
    assert physics_check(11_500 * 8 * 0.355e9, 125e12, "log") is None


def test_goodput_falls_with_the_number_of_devices() -> None:
    shares = [
        goodput_of(12 * 175e9, parse_cluster(f"{nodes}x8xH100")).share for nodes in (8, 128, 2048)
    ]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.98
    cluster = parse_cluster("8x8xA100-80G")
    month, quarter = (devices_for(d, 3e11, 150, 12 * 175e9, cluster) for d in (30, 90))
    assert month % 8 == 0 and 2.8 < month / quarter < 3.2
    assert quarter * 150 * 90 * 86400 > 3e11


def test_seed_document_cluster_is_a_benchmark_not_a_plan() -> None:
    made = plan(load_config(BIG), parse_cluster("8x8xA100-80G"), fixed={"mp": 8, "pp": 8})
    assert made.best is not None
    assert replace(made.best.spread).world == 64


def test_a_growing_batch_is_only_offered_layouts_that_cut_all_its_sizes(tmp_path):
    """What is offered must be accepted by the configuration's own checks."""
    path = tmp_path / "growing.yaml"
    path.write_text(
        "Model: {hidden_size: 64, num_layers: 4, num_attention_heads: 4, vocab_size: 512}\n"
        "Data: {batch_size: {global_batch_size: 24, rampup: [4, 4, 100]}}\n"
    )
    found = legal_spreads(workload_of(load_config(path)), 4)
    assert found is not None
    offered = {(int(dp) * int(sh), int(micro)) for dp, sh, micro in zip(*_data_axes(found))}
    assert offered == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    for ranks, micro in offered:
        size = f"Data.batch_size.micro_batch_size={micro}"
        load_config(path, [size, f"Distributed.mp_degree={4 // ranks}"], 4)


def _data_axes(spread):
    return spread.dp, spread.sharding, spread.micro_batch
