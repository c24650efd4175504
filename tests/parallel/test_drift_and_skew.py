"""Ranks that go their own way: replicas that drift, a slow rank, a bad number, a lone signal."""

from __future__ import annotations

import json
import os
import platform
import signal
import time

import pytest
import torch
from helpers.layout_runs import Command, Runs, different, in_step, notices, records

from fourfold import checkpoint
from fourfold.data import Batch
from fourfold.engine import Engine
from fourfold.parallel.data_parallel import ReplicaDrift
from fourfold.parallel.parameters import tied_key

TIED_EMBEDDING = tied_key("embeddings.word.weight")
slow = pytest.mark.slow
EVERY_STEP = "Engine.check_replicas_freq=1"
NORM = "layers.0.norm1.weight"
MATRIX = "layers.1.mlp.up.weight"


def drift(engine: Engine, rank: int, key: str, at_step: int) -> None:
    """After the update of one step one rank's copy of a parameter is off by a millionth."""
    update = engine.optimizer.update

    def spoiled(rate: float, norm: float, scale: float = 1.0) -> None:
        update(rate, norm, scale)
        if engine.step == at_step and engine.mesh.rank == rank:
            engine.runner.shards[key].local.mul_(1 + 1e-6)

    engine.optimizer.update = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("layout", "rank", "key", "whom"),
    [
        ("dp4", 2, MATRIX, "rank 2 and the other data-parallel ranks"),
        ("mp2", 1, NORM, "model-parallel ranks 0, 1"),
        ("pp2", 1, TIED_EMBEDDING, "pipeline ranks 0, 1"),
        ("pp2 zbv", 0, TIED_EMBEDDING, "the two copies on rank 0"),
        ("dp2 sh2 stage3", 3, MATRIX, "data-parallel ranks 1, 3"),
        pytest.param("mp2 sp", 0, NORM, "model-parallel ranks 0, 1", marks=slow),
        pytest.param("dp2 pp2", 3, TIED_EMBEDDING, "data-parallel ranks 1, 3", marks=slow),
        pytest.param("sh2 stage2 mp2", 2, NORM, "model-parallel ranks 2, 3", marks=slow),
        pytest.param("pp2 mp2", 3, TIED_EMBEDDING, "pipeline ranks 1, 3", marks=slow),
    ],
)
def test_a_replica_that_drifts_is_caught_at_that_step_by_all(
    layout: str, rank: int, key: str, whom: str, runs: Runs
) -> None:
    def work(engine: Engine) -> str:
        drift(engine, rank, key, at_step=2)
        with pytest.raises(ReplicaDrift) as caught:
            engine.fit()
        assert engine.step == 2
        return str(caught.value)

    told = runs.on_ranks(layout, "run", work, EVERY_STEP)
    assert len(set(told)) == 1, "all ranks must say the same"
    name = key.partition("#")[0]
    said = f"step 2: 1 parameter(s) that must be alike differ between {whom}: {name}."
    assert told[0].startswith(said)


def test_the_command_says_what_drifted_and_where(runs: Runs) -> None:
    make = Engine.__init__

    def spoil() -> None:
        def spoiled(engine: Engine, *given: object) -> None:
            make(engine, *given)  # type: ignore[arg-type]
            drift(engine, 1, NORM, at_step=2)

        Engine.__init__ = spoiled  # type: ignore[method-assign,assignment]

    words = runs.command("dp2", "run", EVERY_STEP, "Engine.save_load.save_steps=1")
    with Command(words, runs.folder / "console", spoil) as command:
        assert command.wait() == 1
        said = command.said()
    assert said.count(f"differ between data-parallel ranks 0, 1: {NORM}.") == 1
    assert "Traceback" not in said
    assert checkpoint.candidates(runs.folder / "run")[0].name == "step_1", "nothing bad was saved"


# -- how evenly the ranks work --------------------------------------------------------------------


def dawdle(engine: Engine, rank: int, seconds: float) -> None:
    """One rank reads slowly."""
    loader = engine.data.loaders["train"]
    read = loader.batch

    def slowly(step: int) -> Batch:
        if engine.mesh.rank == rank:
            time.sleep(seconds)
        return read(step)

    loader.batch = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", ["dp2", pytest.param("pp2", marks=slow)])
def test_a_slow_rank_is_named_by_host_and_phase(layout: str, runs: Runs) -> None:
    steps = "Engine.max_steps=12"
    run = runs.fit(layout, "run", steps, prepare=lambda engine: dawdle(engine, 1, 0.3))
    warnings = [r["text"] for r in records(run, "notice") if r["level"] == "WARNING"]
    (text,) = [text for text in warnings if not text.startswith("preflight")]
    assert text.startswith(f"rank 1 on {platform.node()} holds the others up: waits")
    (event,) = [r for r in records(run, "event") if r["event"] == "straggler"]
    assert (event["phase"], event["rank"], event["host"]) == ("data", 1, platform.node())
    assert min(record["ranks"]["busy_seconds_most"] for record in records(run)) >= 0.3


def test_one_process_has_no_figures_of_others(runs: Runs) -> None:
    run = runs.fit("one", "run", "Engine.max_steps=2")
    assert [record["ranks"] for record in records(run)] == [None, None]


@pytest.mark.parametrize(
    "layout",
    [
        "pp2 sh2",
        "mp2 sp",
        pytest.param("dp2", marks=slow),
        pytest.param("sh2 stage3 mp2", marks=slow),
        pytest.param("pp2 zbv sh2", marks=slow),
    ],
)
def test_shares_of_a_step_make_sense(layout: str, runs: Runs) -> None:
    """Also where evaluations and saves stand between the steps."""
    between = ("Engine.eval_freq=1", "Engine.eval_iters=1", "Engine.save_load.save_steps=1")
    run = runs.fit(layout, "run", "Engine.max_steps=3", *between)
    for record in records(run):
        ranks = record["ranks"]
        busy = [ranks[f"busy_seconds_{which}"] for which in ("least", "median", "most")]
        assert 0 < busy[0] <= busy[1] <= busy[2]
        assert 0 < ranks["communication_share"] + ranks["bubble_share"] < 1, ranks
        assert (ranks["bubble_share"] > 0) == ("pp" in layout)
        assert ranks["communication_share"] >= 0


@pytest.mark.parametrize(
    "ranks", [pytest.param([0], marks=slow), pytest.param([1], marks=slow), [0, 1]]
)
def test_each_rank_that_is_profiled_writes_a_trace_of_its_own(ranks: list[int], runs: Runs) -> None:
    folder = runs.folder / "profile"
    settings = [f"Profiler.ranks={ranks}", f"Profiler.profiler_log={folder}"]
    runs.fit("dp2", "run", *settings, "Profiler.enable=True", "Engine.max_steps=2")
    names = {f"rank{rank}_steps_0_to_2.json": rank for rank in ranks}
    assert {path.name for path in folder.iterdir()} == names.keys()
    for name, rank in names.items():
        assert json.loads((folder / name).read_text())["distributedInfo"]["rank"] == rank


def test_a_rank_that_is_not_there_cannot_be_profiled(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="and the run has the ranks 0 to 1; name some"):
        runs.fit("dp2", "run", "Profiler.enable=True", "Profiler.ranks=[0, 2]")


# -- a bad number, and a signal, on one rank only -------------------------------------------------


def overflow(engine: Engine, rank: int, at_step: int, in_forward: bool) -> None:
    """On one rank a layer's activations, or its gradients, become infinite in one step."""

    def spoil(module: torch.nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
        if engine.step != at_step or not module.training:
            return output
        if in_forward:
            return output * float("inf")
        output.register_hook(lambda gradient: gradient * float("inf"))
        return output

    if engine.mesh.rank == rank:
        first = next(iter(engine.runner.parts[0].layers.values()))
        first.mlp.up.register_forward_hook(spoil)


@pytest.mark.parametrize(
    ("layout", "in_forward", "fp16"),
    [
        ("dp2", True, False),
        ("pp2", False, False),
        ("sh2 stage2", False, False),
        ("mp2", True, False),
        ("pp2", False, True),
        pytest.param("mp2 sp", False, False, marks=slow),
        pytest.param("pp2 zbv", True, False, marks=slow),
        pytest.param("dp2", False, True, marks=slow),
        pytest.param("sh2 stage3", False, True, marks=slow),
        pytest.param("mp2", False, True, marks=slow),
    ],
)
def test_all_ranks_skip_an_update_that_is_bad_on_one(
    layout: str, in_forward: bool, fp16: bool, runs: Runs
) -> None:
    def work(engine: Engine) -> tuple[int, int, float | None]:
        overflow(engine, 1, 2, in_forward)
        engine.fit()
        scale = engine.loss_scale.value if engine.loss_scale else None
        return engine.guard.skipped, engine.optimizer.updates, scale

    settings = ["Engine.max_steps=3", "Engine.save_load.save_steps=1", EVERY_STEP]
    if fp16:
        settings += ["Engine.mix_precision.dtype=float16", "Engine.mix_precision.scale_loss=1024"]
    ends = runs.on_ranks(layout, "run", work, *settings)
    assert set(ends) == {(1, 2, 512.0 if fp16 else None)}
    run = runs.folder / "run"
    assert [event["step"] for event in records(run, "event")] == [2]
    assert not different(run / "step_1", run / "step_2")
    assert different(run / "step_2", run / "step_3")


@pytest.mark.parametrize(("layout", "rank"), [("dp2", 1), ("pp2 mp2", 2)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    layout: str, rank: int, runs: Runs
) -> None:
    def work(engine: Engine) -> int:
        if engine.mesh.rank == rank:
            in_step(engine, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        engine.fit()
        return engine.step

    assert set(runs.on_ranks(layout, "run", work)) == {3}
    assert checkpoint.candidates(runs.folder / "run")[0].name == "step_3"
    assert "stopped by SIGTERM at step 3; the run is saved" in notices(runs.folder / "run")
