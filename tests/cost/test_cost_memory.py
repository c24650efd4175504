"""Memory: published arithmetic reproduced, exact parameter counts, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.planned_networks import gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cost.memory import (
    activation_bytes,
    fullest_stage,
    memory_of,
    micro_batches_in_flight,
    stage_parameters,
)
from fourfold.cost.workload import RECOMPUTE_MODES, Network, Software, Spread
from fourfold.model import ModelShape, count_parameters

FLEETX = Software(flash=False, gradient_bytes=2, logit_bytes=6)
GPT3 = gpt(96, 12288, 96, 49152, 51200, 2048)


def total(network: Network, spread: Spread, software: Software) -> float:
    return float(fullest_stage(network, spread, software)[0].total)


@pytest.mark.parametrize(
    ("hidden", "recompute", "documented"), [(1024, "none", 30.9e9), (2048, "full", 26.0e9)]
)
def test_the_documents_single_card_figures(hidden: int, recompute: str, documented: float) -> None:
    network = gpt(24, hidden, 16, 4 * hidden, 50304, 1024)
    needed = total(network, Spread(micro_batch=8, recompute=recompute), FLEETX)
    assert needed == pytest.approx(documented, rel=0.02)


def test_korthikanti_per_layer_bytes() -> None:
    """sbh (34 + 5 a s / h) and its divided forms, table 2 of the paper."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    network, software = gpt(48, h, a, 4 * h, 51200, s), Software(flash=False)
    unit, scores = s * b * h, 5 * a * s / h
    alone = activation_bytes(network, Spread(micro_batch=b), software)
    split = activation_bytes(network, Spread(micro_batch=b, mp=t), software)
    sequence = activation_bytes(
        network, Spread(micro_batch=b, mp=t, sequence_parallel=True), software
    )
    assert alone["none"] == pytest.approx(unit * (34 + scores))
    assert split["none"] == pytest.approx(unit * (10 + 24 / t + scores / t))
    assert sequence["none"] == pytest.approx(unit / t * (34 + scores))
    assert sequence["core_attn"] == pytest.approx(34 * unit / t)
    assert alone["full"] == 2 * unit


@pytest.mark.parametrize(
    ("software", "changes", "gigabytes"),
    [
        (Software(gradient_bytes=2), {}, 31.4),
        (Software(gradient_bytes=2), {"sequence_parallel": True}, 10.3),
        (Software(gradient_bytes=2, flash=False), {}, 55.6),
    ],
)
def test_first_stage_of_175b_on_64_devices(
    software: Software, changes: dict[str, bool], gigabytes: float
) -> None:
    spread = replace(Spread(mp=8, pp=8, micro_batches=1536), **changes)
    memory = memory_of(GPT3, spread, software, 0)
    assert memory["activations"] / 1e9 == pytest.approx(gigabytes, rel=0.01)
    states = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert states / 1e9 == pytest.approx(44.7, rel=0.012)  # 16 bytes x 2.797 B and the positions


def test_stage_parameters_add_up_to_the_model() -> None:
    shape = ModelShape(1024, 64, 7, 4, 256, 32)
    network = gpt(7, 64, 4, 256, 1024, 32)
    spread = Spread(pp=3)
    held = sum(float(stage_parameters(network, spread, stage)) for stage in range(3))
    tied_copy = 1024 * 64  # the last stage has its own copy of the head
    assert held == count_parameters(shape) + tied_copy
    assert float(stage_parameters(network, Spread(), 0)) == count_parameters(shape)


def test_micro_batches_in_flight_of_each_schedule() -> None:
    def first(**changes: object) -> float:
        return float(micro_batches_in_flight(replace(Spread(pp=4), **changes), 0))

    later = [float(micro_batches_in_flight(Spread(pp=4, micro_batches=16), i)) for i in range(4)]
    assert later == [4, 3, 2, 1]
    assert first(micro_batches=2) == 2
    assert first(micro_batches=16) == 4
    assert first(micro_batches=16, schedule="GPipe") == 16
    assert first(micro_batches=16, schedule="Interleaved1F1B", virtual=3) == pytest.approx(5)


def test_sharding_stages_divide_what_they_say() -> None:
    whole = memory_of(GPT3, Spread(), Software(), 0)
    for stage, divided in ((1, {"optimizer"}), (2, {"optimizer", "gradients"})):
        memory = memory_of(GPT3, Spread(sharding=8, stage=stage), Software(), 0)
        for name in ("weights", "gradients", "optimizer"):
            share = 8 if name in divided else 1
            assert memory[name] == pytest.approx(whole[name] / share)
    third = memory_of(GPT3, Spread(sharding=8, stage=3), Software(), 0)
    assert third["weights"] == 0 and third["buffers"] > 0


LAYOUTS = st.builds(
    Spread,
    mp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    sharding=st.sampled_from([1, 2, 8]),
    stage=st.sampled_from([1, 2, 3]),
    micro_batch=st.integers(1, 8),
    micro_batches=st.integers(1, 32),
    recompute=st.sampled_from(RECOMPUTE_MODES),
    sequence_parallel=st.booleans(),
)
PROGRAMS = st.builds(Software, flash=st.booleans(), gradient_bytes=st.sampled_from([2, 4]))
MODEL = gpt(24, 2048, 16, 8192, 51200, 1024)


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, PROGRAMS, st.integers(8, 30))
def test_terms_add_up_and_no_stage_needs_more(
    spread: Spread, software: Software, layers: int
) -> None:
    network = replace(MODEL, layers=layers)
    memory, stage = fullest_stage(network, spread, software)
    values = memory.values_at()
    assert all(value >= 0 for value in values.values())
    assert sum(values.values()) == pytest.approx(float(memory.total))
    each = [float(memory_of(network, spread, software, i).total) for i in range(spread.pp)]
    assert max(each) == pytest.approx(float(memory.total))
    assert 0 <= int(stage) < spread.pp


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, PROGRAMS)
def test_less_to_hold_never_needs_more(spread: Spread, software: Software) -> None:
    needed = total(MODEL, spread, software)
    assert total(MODEL, replace(spread, micro_batch=spread.micro_batch + 1), software) >= needed
    assert total(replace(MODEL, layers=32), spread, software) >= needed
    assert total(replace(MODEL, seq=2048), spread, software) >= needed
    without = replace(spread, sequence_parallel=False)
    assert total(MODEL, replace(spread, sequence_parallel=True), software) <= total(
        MODEL, without, software
    )
    by_mode = [total(MODEL, replace(spread, recompute=mode), software) for mode in RECOMPUTE_MODES]
    kept = [float(activation_bytes(MODEL, spread, software)[mode]) for mode in RECOMPUTE_MODES]
    assert kept == sorted(kept, reverse=True)
    assert by_mode[0] >= by_mode[1] - 1


def test_texts_hold_the_numbers() -> None:
    spread = Spread(mp=8, pp=8, micro_batches=64)
    lines = {name: text for name, _, text in memory_of(GPT3, spread, Software(), 0).lines()}
    assert lines["weights"] == "2 bytes x 2.823 B parameters / 1"
    assert lines["activations"].startswith("8 in flight x 12 layers x 327.3 MB (all kept)")
