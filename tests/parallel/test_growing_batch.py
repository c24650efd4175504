"""A batch that grows takes the same samples and gives the same losses on every layout.

Batches of 4, 8, 12 and 16 samples: with them the number of micro-batches of a step changes, which
pipelines, sharded gradients and the messages of plain data parallelism all count.
"""

from __future__ import annotations

import pytest
from helpers.layout_runs import Runs, in_step, losses, notices, records
from helpers.traces import relative

from fourfold import checkpoint
from fourfold.engine import Engine
from fourfold.optim import build_schedule
from fourfold.signals import STOP_FILE

BATCHES = [4, 4, 8, 12, 16, 16]
GROWING = (
    "Data.batch_size.global_batch_size=16",
    "Data.batch_size.local_batch_size=null",
    "Data.batch_size.micro_batch_size=1",
    "Data.batch_size.rampup=[4,4,18]",
    f"Engine.train_samples={sum(BATCHES)}",
    "Engine.max_steps=100",
    "Engine.logging_freq=1",
    "Optimizer.lr.decay_samples=60",
    "Optimizer.lr.warmup_samples=8",
    "Optimizer.lr.decay_style=linear",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("growing"))
    return runs.fit("one", "reference", *GROWING)


def test_the_run_takes_the_samples_it_was_given(reference):
    told = records(reference)
    assert [record["global_batch_size"] for record in told] == BATCHES
    assert [record["samples"] for record in told] == [4, 8, 16, 28, 44, 60]
    assert told[-1]["tokens"] == 60 * 16
    assert "grows from 4 to 16 samples over the first 4 steps, 28 samples" in notices(reference)
    state = checkpoint.read_state(checkpoint.candidates(reference)[0])
    assert (state["step"], state["consumed_samples"]) == (6, 60)


def test_the_rate_follows_the_samples_read_before_a_step(runs, reference):
    config = runs.config("one", "rates", *GROWING)
    lr, schedule = config.Optimizer.lr, build_schedule(config)
    top, low = lr.max_lr, lr.min_lr
    expected = [0.0, top / 2, top, *(low + (top - low) * (60 - n) / 52 for n in (16, 28, 44, 60))]
    assert [schedule.lr_at(step) for step in range(1, 8)] == pytest.approx(expected)
    # The log shows the rate of the step that comes next.
    assert [record["learning_rate"] for record in records(reference)] == pytest.approx(expected[1:])


@pytest.mark.parametrize("layout", ["dp2", "pp2", "sh2 stage2", "pp2 interleaved", "dp2 mp2"])
def test_every_layout_gives_the_same_losses(runs, reference, layout):
    run = runs.fit(layout, "grown", *GROWING)
    assert [record["global_batch_size"] for record in records(run)] == BATCHES
    assert relative(losses(run), losses(reference)) < 1e-5


def test_a_run_stopped_while_its_batch_grows_goes_on_elsewhere(runs, reference):
    def stop(engine: Engine) -> None:
        if engine.mesh.rank == 0:
            in_step(engine, 3, (engine.output_dir / STOP_FILE).touch)

    runs.fit("pp2", "moved", *GROWING, prepare=stop)
    run = runs.fit("dp2", "moved", *GROWING)
    assert relative(losses(run), losses(reference)) < 1e-5


def test_another_growth_goes_on_at_the_next_sample(runs):
    runs.fit("one", "saved", *GROWING)
    other = [word for word in GROWING if "rampup" not in word]
    run = runs.fit("dp2", "saved", *other, "Engine.train_samples=100", "Data.dataset.order=elastic")
    assert [record["samples"] for record in records(run)][-3:] == [60, 76, 92]
    assert "The run continues with sample 60 and batches of 16, to step 8" in notices(run)
