"""Runs that are asked to stop, and runs whose numbers go bad."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.tiny_run import Configure, exit_status, start_child

from fourfold import checkpoint
from fourfold.data import Batch
from fourfold.engine import Engine, build_engine
from fourfold.errors import ConfigError, UserError
from fourfold.metrics import read_jsonl
from fourfold.signals import STOP_SIGNALS, StopRequest

LONG = "Engine.max_steps=100000"


def when_step_reached(engine: Engine, step: int, act: object) -> None:
    """Call `act` in the middle of `step`."""
    run = engine.runner.run

    def spied(batch: Batch, current: int, scale: float = 1.0) -> torch.Tensor:
        if current == step:
            act()  # type: ignore[operator]
        return run(batch, current, scale)

    engine.runner.run = spied  # type: ignore[method-assign]


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_finishes_the_step_saves_and_exits_well(
    number: signal.Signals, configure: Configure, tmp_path: Path
) -> None:
    def work() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        engine = build_engine(configure("run", LONG))
        when_step_reached(engine, 5, lambda: os.kill(os.getpid(), number))
        engine.fit()

    assert exit_status(start_child(work)) == 0
    newest = checkpoint.candidates(tmp_path / "run")[0]
    assert newest.name == "step_5"
    texts = [r.get("text", "") for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert any(number.name in text and "saved" in text for text in texts)


def test_what_nohup_ignores_stays_ignored(configure: Configure) -> None:
    config = configure("run", "Engine.max_steps=4")

    def work() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        engine = build_engine(config)
        when_step_reached(engine, 2, lambda: os.kill(os.getpid(), signal.SIGHUP))
        engine.fit()
        assert engine.step == 4

    assert exit_status(start_child(work)) == 0


def test_a_second_interrupt_ends_at_once(configure: Configure, tmp_path: Path) -> None:
    def work() -> None:
        engine = build_engine(configure("run", LONG))

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGINT)

        when_step_reached(engine, 3, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.fit()

    assert exit_status(start_child(work)) == 0
    assert checkpoint.candidates(tmp_path / "run")[0].name == "step_2"


@pytest.mark.parametrize("part", ["eval", "test"])
def test_an_evaluation_is_cut_short_and_not_reported(
    part: str, configure: Configure, tmp_path: Path
) -> None:
    long = (
        "Engine.eval_iters=9999",
        "Engine.test_iters=9999",
        "Data.batch_size.local_batch_size=4",
    )
    freq = f"Engine.eval_freq={3 if part == 'eval' else 0}"
    config = configure("run", *long, freq, "Engine.max_steps=4", world_size=2)

    def work(rank: int) -> int:
        engine = build_engine(config, world_size=2)
        evaluate, evaluated = engine.runner.evaluate, 0

        def spied(batch: Batch) -> torch.Tensor:
            nonlocal evaluated
            evaluated += 1
            if (rank, evaluated) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(batch)

        engine.runner.evaluate = spied  # type: ignore[method-assign]
        engine.fit()
        assert engine.step == (3 if part == "eval" else 4)
        return evaluated

    assert on_ranks(2, work) == [3, 3]
    newest = checkpoint.candidates(tmp_path / "run")[0]
    assert newest.name == ("step_3" if part == "eval" else "step_4")
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert not [record for record in records if record["kind"] in ("eval", "test")]
    assert any("cut short by a stop" in record.get("text", "") for record in records)


def test_one_rank_looks_for_the_stop_file(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    assert StopRequest(tmp_path, watches_file=False).reason() is None
    assert (tmp_path / "STOP").exists()
    assert StopRequest(tmp_path).reason() == f"the file {tmp_path / 'STOP'}"
    assert not (tmp_path / "STOP").exists()


def test_a_stop_file_stops_once(configure: Configure, tmp_path: Path) -> None:
    engine = build_engine(configure("run", LONG))
    file = tmp_path / "run" / "STOP"
    when_step_reached(engine, 3, file.touch)
    engine.fit()
    assert engine.step == 3 and not file.exists()
    assert checkpoint.candidates(tmp_path / "run")[0].name == "step_3"
    again = build_engine(configure("run", "Engine.max_steps=4"))
    again.fit()
    assert again.step == 4


def poison(engine: Engine, steps: set[int]) -> None:
    """Make one gradient infinite in the given steps."""
    run = engine.runner.run

    def poisoned(batch: Batch, step: int, scale: float = 1.0) -> torch.Tensor:
        loss = run(batch, step, scale)
        if step in steps:
            next(iter(engine.runner.masters.values())).grad[0, 0] = float("inf")
        return loss

    engine.runner.run = poisoned  # type: ignore[method-assign]


def test_a_bad_update_is_skipped_and_its_samples_logged(
    configure: Configure, tmp_path: Path
) -> None:
    engine = build_engine(configure("run", "Engine.max_steps=3", "Engine.save_load.save_steps=1"))
    poison(engine, {2})
    engine.fit()
    events = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "event"]
    assert [event["event"] for event in events] == ["skipped_update"]
    assert events[0]["step"] == 2 and events[0]["sample_ids"] == list(range(8, 16))
    assert engine.optimizer.updates == 2

    def weights(step: int) -> torch.Tensor:
        directory = tmp_path / "run" / f"step_{step}"
        names = checkpoint.tensor_names(directory)
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
        checkpoint.load(directory, tensors)
        return torch.cat([t.flatten() for t in tensors.values()])

    assert torch.equal(weights(1), weights(2))
    assert not torch.equal(weights(2), weights(3))


def test_too_many_bad_updates_end_the_run_with_nothing_lost(
    configure: Configure, tmp_path: Path
) -> None:
    engine = build_engine(configure("run", "Engine.max_skipped_steps=3"))
    poison(engine, {3, 4, 5, 6, 7, 8})
    with pytest.raises(UserError, match="3 updates in a row, up to step 5"):
        engine.fit()
    assert checkpoint.candidates(tmp_path / "run")[0].name == "step_5"


def test_missing_input_dir_is_a_clear_error(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="input_dir"):
        build_engine(configure("run", "Data.dataset.input_dir=null"))


def test_a_vocabulary_too_small_for_the_data_is_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match="vocab"):
        build_engine(configure("run", "Model.vocab_size=100"))


def test_another_number_of_processes_is_a_clear_error(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"needs 1 process.*2 are running"):
        build_engine(configure("run"), world_size=2)
