"""Training and generation on CUDA without a GPU: no operation mixes devices, and host waits show.

Every tensor is fake, so this needs no GPU, only a C++ compiler (`helpers.fake_cuda`). It cannot
show numbers, streams or nccl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.fake_cuda import PLANTS, FakeCuda, Request, Seen, Wait
from helpers.layout_table import CASES, Case
from helpers.traces import Workshop

LAST_STEP, LOGGED_STEP = 5, 3
# Compiled graphs and double precision are no other devices' business than the CPU's.
ON_GPU = [case for case in CASES if case.dtype != "float64" and "static" not in case.name]
# Together they have every axis, kind of schedule, precision and optimizer, and a modern network.
QUICK = {
    "dp2",
    "pp2 interleaved",
    "pp2 zbv",
    "sh2 stage3 offload",
    "pp2 mp2 sp, reset_attention_mask=True, reset_position_ids=True",
    "sh2 stage3 mp2, use_recompute=True, recompute_granularity=full",
    "pp2 sh2 stage2 mp2, bfloat16 O1",
    "sh2 stage3 mp2 sp, float16 O2",
    "mp4 sp, llama",
    "pp2 mp2, name=Muon, float16 O2",
}


def train(fake: FakeCuda, folder: Path, case: Case, rank: int = 0, **named: Any) -> Seen:
    """Steps of one rank, of four micro-batches each."""
    shop, degrees = Workshop(folder), case.degrees
    samples = 4 * degrees.get("dp", 1) * degrees.get("sh", 1)
    overrides = [
        *shop.settings("run"),
        *case.overrides(),
        "Global.device=gpu",
        "Engine.eval_freq=0",
        "Engine.preflight=none",  # nobody answers
        "Engine.test_iters=0",
        f"Engine.logging_freq={LOGGED_STEP}",
        f"Engine.max_steps={LAST_STEP}",
        f"Data.batch_size.global_batch_size={samples}",
        "Data.batch_size.micro_batch_size=1",
    ]
    return fake.run(Request(str(shop.yaml), overrides, case.world, rank, **named))


def check(seen: Seen, case: Case, rank: int) -> None:
    assert seen.error is None, seen.where
    assert seen.operations > 100
    assert bool(seen.off_device) == ("offload" in case.layout)
    assert seen.logged == ([LOGGED_STEP] if rank == 0 else [])
    if "offload" not in case.layout:  # whose gradients go to the host as they come
        assert not (idle := between_logs(seen)), idle


def between_logs(seen: Seen) -> list[Wait]:
    """Waits that left the device without work: not in the first step, which sets things up, nor
    after the last. The result of a step is read when another is queued behind it."""
    return [
        wait
        for wait in seen.waits
        if 1 < wait.step < LAST_STEP and wait.behind < seen.operations / 2
    ]


def as_parameters(cases: list[Case]) -> list[Any]:
    assert {case.name for case in cases} >= QUICK
    return [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in cases
    ]


@pytest.mark.parametrize("case", as_parameters(ON_GPU))
def test_steps_mix_no_devices_and_wait_for_nothing(
    fake_cuda: FakeCuda, tmp_path: Path, case: Case
) -> None:
    """Of the last rank, which has the end of the network."""
    rank = case.world - 1
    check(train(fake_cuda, tmp_path, case, rank), case, rank)


def test_norms_by_layer_are_not_waited_for(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    case = Case("mp2", extras=("Engine.layer_norms=True",))
    check(train(fake_cuda, tmp_path, case), case, rank=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_the_first_rank_too(fake_cuda: FakeCuda, tmp_path: Path, case: Case) -> None:
    check(train(fake_cuda, tmp_path, case), case, rank=0)


@pytest.mark.parametrize("plant", [plant for plant in PLANTS if "host" in plant])
def test_a_tensor_left_on_the_host_is_found(
    fake_cuda: FakeCuda, tmp_path: Path, plant: str
) -> None:
    seen = train(fake_cuda, tmp_path, Case("dp1"), plant=plant)
    assert seen.error is not None and "cuda:0 and cpu" in seen.error, seen.where


def test_an_item_is_found_with_its_line(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    planted = train(fake_cuda, tmp_path / "planted", Case("dp1"), plant="an item()")
    clean = train(fake_cuda, tmp_path / "clean", Case("dp1"))
    assert len(planted.waits) == len(clean.waits) + LAST_STEP
    assert not between_logs(clean)
    lines = [wait.line for wait in between_logs(planted)]
    assert len(lines) == LAST_STEP - 2 and all("_run_micro_batches" in line for line in lines)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_generation(fake_cuda: FakeCuda, tmp_path: Path, weights: str) -> None:
    generate(fake_cuda, tmp_path, Case("dp1"), f"Inference.weights={weights}")


@pytest.mark.parametrize("layout", ["mp2", "pp2 interleaved", "sh2 stage3"])
def test_generation_over_ranks(fake_cuda: FakeCuda, tmp_path: Path, layout: str) -> None:
    for rank in range(2):
        generate(fake_cuda, tmp_path, Case(layout), rank=rank)


def generate(fake: FakeCuda, folder: Path, case: Case, *more: str, rank: int = 0) -> None:
    """Tokens of sequences of different lengths, which are masked and penalised."""
    shop = Workshop(folder)
    overrides = [*shop.settings("run"), *case.overrides(), *more]
    seen = fake.run(Request(str(shop.yaml), overrides, case.world, rank, generates=True))
    assert seen.error is None, seen.where
    # A token has to be known before the next: that is one wait, and no more than a handful.
    each = [sum(wait.step == step for wait in seen.waits) for step in (2, 3)]
    assert all(0 < waits < 40 for waits in each), seen.waits
