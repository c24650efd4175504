"""One run, several layouts: it is stopped, goes on under another one, and its curve is the same.

Each run here has one directory. It is asked to stop in the middle, saves, and the same command with
other degrees goes on with what is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.layout_runs import Runs, in_step, losses, notices, records, tensors
from helpers.tiny_run import FIXTURE
from helpers.traces import relative

from fourfold import checkpoint
from fourfold.engine import Engine
from fourfold.signals import STOP_FILE

slow = pytest.mark.slow
STEPS = 6
LENGTH = f"Engine.max_steps={STEPS}"
BLEND = FIXTURE.parent / "megatron_blend"
ONE_EACH = "Data.batch_size.micro_batch_size=1"


def name(legs: list[tuple[str, ...]]) -> str:
    return " then ".join(" ".join(word.split(".")[-1] for word in leg) for leg in legs)


def stop_at(step: int) -> object:
    """Ask for a stop in this step, as `touch output/STOP` does."""

    def prepare(engine: Engine) -> None:
        if engine.mesh.rank == 0:
            in_step(engine, step, (engine.output_dir / STOP_FILE).touch)

    return prepare


def go_on(runs: Runs, legs: list[tuple[str, ...]], *shared: str) -> Path:
    """Run the legs, each a layout and its own settings, for the same number of steps each."""
    for number, (layout, *own) in enumerate(legs, start=1):
        prepare = stop_at(STEPS * number // len(legs)) if number < len(legs) else None
        run = runs.fit(layout, "changed", LENGTH, *shared, *own, prepare=prepare)
        newest = checkpoint.candidates(run)[0]
        assert newest.name == f"step_{STEPS * number // len(legs)}"
    return run


@pytest.mark.parametrize(
    "legs",
    [
        [("dp2 pp2 mp2",), ("sh8 stage3", ONE_EACH), ("one",)],
        pytest.param([("pp2 mp2 sp",), ("sh2 stage3",), ("one",)], marks=slow),
        [("one",), ("pp2 sh2 stage2", ONE_EACH), ("dp2", "Data.batch_size.micro_batch_size=4")],
        pytest.param([("dp2 sh2 stage3 mp2 sp",), ("pp4 mp2",), ("dp8", ONE_EACH)], marks=slow),
        pytest.param([("pp2 zbv mp2",), ("pp2 interleaved sh2",), ("mp4 sp",)], marks=slow),
    ],
    ids=name,
)
def test_the_curve_of_one_process_goes_on_under_every_layout(
    legs: list[tuple[str, ...]], runs: Runs
) -> None:
    straight = runs.fit("one", "straight", LENGTH)
    changed = go_on(runs, legs)
    assert relative(losses(changed), losses(straight)) < 1e-5
    seen = [record["tokens"] for record in records(changed)]
    assert seen == [record["tokens"] for record in records(straight)]
    assert "seen before" not in notices(changed)


@pytest.mark.parametrize(
    "legs", [[("dp2",), ("pp2",)], pytest.param([("sh2 stage3",), ("mp2",)], marks=slow)], ids=name
)
def test_a_run_goes_on_in_another_precision(legs: list[tuple[str, ...]], runs: Runs) -> None:
    straight = runs.fit("one", "straight", LENGTH)
    low = ("Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2")
    changed = go_on(runs, [legs[0], (*legs[1], *low)])
    half = STEPS // 2
    assert relative(losses(changed)[:half], losses(straight)[:half]) < 1e-5
    assert 1e-6 < relative(losses(changed)[half:], losses(straight)[half:]) < 5e-3


@pytest.mark.parametrize(
    "legs",
    [
        [("dp2",), ("sh4 stage3",)],
        pytest.param([("pp2 sh2",), ("dp8", ONE_EACH), ("one",)], marks=slow),
    ],
    ids=name,
)
def test_a_mixture_in_elastic_order_serves_the_same_samples_to_any_ranks(
    legs: list[tuple[str, ...]], runs: Runs
) -> None:
    parts = [BLEND / f"part{number}_text_document" for number in (0, 1)]
    mixing = (
        f"Data.dataset.input_dir=0.3 {parts[0]} 0.7 {parts[1]}",
        "Data.dataset.order=elastic",
    )
    straight = runs.fit("one", "straight", LENGTH, *mixing)
    changed = go_on(runs, legs, *mixing)
    assert relative(losses(changed), losses(straight)) < 1e-5
    served = [
        checkpoint.read_state(run / f"step_{STEPS}")["mixture"]["sources"]
        for run in (straight, changed)
    ]
    assert served[0] == served[1]


def test_an_average_of_weights_goes_on_under_another_layout(runs: Runs) -> None:
    """From a pipeline, which holds the embedding twice, to shards of everything."""
    asked = ("Optimizer.name=Muon", "Optimizer.ema_decay=0.9", "Data.dataset.order=elastic")
    alone = runs.fit("one", "alone", *asked, "Engine.max_steps=4")
    runs.fit("pp2 mp2", "moved", *asked, "Engine.max_steps=2")
    moved = runs.fit("sh2 stage3", "moved", *asked, "Engine.max_steps=4")
    ours, theirs = tensors(moved / "step_4"), tensors(alone / "step_4")
    assert ours.keys() == theirs.keys()
    averages = [name for name in ours if name.startswith("ema.")]
    assert len(averages) == sum(name.startswith("model.") for name in ours)
    for name in averages:
        apart = float((ours[name] - theirs[name]).abs().max())
        assert apart < 1e-5 * max(float(theirs[name].abs().max()), 0.01), name
        if "bias" not in name:
            assert not torch.equal(ours[name], ours[name.replace("ema.", "model.", 1)]), name
