"""Saves that fail: the run goes on where it can, says so, and ends where it must."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.tiny_run import Configure

from fourfold import checkpoint
from fourfold.checkpoint import writing
from fourfold.checkpoint.rendezvous import SaveRendezvous
from fourfold.engine import Engine, build_engine, saving
from fourfold.errors import CheckpointError, UserError
from fourfold.metrics import read_jsonl


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(saving, "PAUSE_SECONDS", 0.001)


class Disk:
    """Fails the writes it is told to, counted from the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = 0
        self.fails: Callable[[int], bool] = lambda number: False
        self.error = errno.ENOSPC
        real = writing.write_shards

        def write_shards(*given: Any) -> object:
            self.writes += 1
            if self.fails(self.writes):
                raise OSError(self.error, os.strerror(self.error))
            return real(*given)

        monkeypatch.setattr(writing, "write_shards", write_shards)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def told(output_dir: Path) -> str:
    records = read_jsonl(output_dir / "metrics.jsonl")
    return "\n".join(f"{r.get('level')} {r['text']}" for r in records if r["kind"] == "notice")


def steps(output_dir: Path) -> set[str]:
    return {path.name for path in output_dir.glob("step_*")}


def test_a_save_that_fails_once_is_tried_again(
    configure: Configure, disk: Disk, tmp_path: Path
) -> None:
    disk.fails = lambda number: number == 2
    build_engine(configure("run", "Engine.save_load.keep_last=0")).fit()
    assert steps(tmp_path / "run") == {"step_2", "step_4", "step_6", "step_8"}
    assert "WARNING cannot save checkpoint" in told(tmp_path / "run")
    assert "Trying again in 0.01 s" in told(tmp_path / "run")


@pytest.mark.parametrize("in_background", ["False", "True"])
def test_a_run_goes_on_past_a_save_that_fails(
    configure: Configure, disk: Disk, tmp_path: Path, in_background: str
) -> None:
    # Three times step 4, or step 4 once in the background, where it is not tried again.
    disk.fails = lambda number: number in ((2,) if in_background == "True" else (2, 3, 4))
    overrides = ["Engine.save_load.keep_last=0", f"Engine.save_load.async_save={in_background}"]
    build_engine(configure("run", *overrides)).fit()
    assert steps(tmp_path / "run") == {"step_2", "step_6", "step_8"}
    text = told(tmp_path / "run")
    assert f"ERROR cannot save checkpoint {tmp_path}/run/step_4: [Errno 28] No space left" in text
    assert f"the last good checkpoint is {tmp_path}/run/step_2. The run continues" in text
    assert "failed in a row: 1, allowed: 2" in text
    events = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "event"]
    (event,) = [r for r in events if r["event"] == "failed_save"]
    assert event["step"] == 4 and "No space left" in event["reason"]


def test_it_stops_after_the_stated_number_of_failures_in_a_row(
    configure: Configure, disk: Disk, tmp_path: Path
) -> None:
    disk.fails = lambda number: number > 1
    engine = build_engine(configure("run", "Engine.save_load.max_failed_saves=2"))
    with pytest.raises(CheckpointError) as caught:
        engine.fit()
    assert engine.step == 6
    assert f"the last good checkpoint is {tmp_path}/run/step_2" in str(caught.value)
    assert "max_failed_saves=2" in str(caught.value)


def test_with_0_it_goes_on_but_the_last_save_must_succeed(
    configure: Configure, disk: Disk, tmp_path: Path
) -> None:
    disk.fails = lambda number: number > 1
    disk.error = errno.EIO
    engine = build_engine(configure("run", "Engine.save_load.max_failed_saves=0"))
    with pytest.raises(UserError) as caught:
        engine.fit()
    assert engine.step == 8 and steps(tmp_path / "run") == {"step_2"}
    message = str(caught.value)
    assert "step_8: [Errno 5] Input/output error" in message
    assert "the disk or the file server has failed" in message and "make room" not in message
    assert f"the last good checkpoint is {tmp_path}/run/step_2" in message


def test_a_request_to_stop_ends_the_waiting(
    configure: Configure, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would last an hour. The run then stops with a save of its own."""
    monkeypatch.setattr(saving, "RETRY_SECONDS", (3600.0, 3600.0))

    def fails(number: int) -> bool:
        if number == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return number == 1

    disk.fails = fails
    engine = build_engine(configure("run", "Engine.max_steps=100000"))
    engine.fit()
    assert engine.step == 3 and steps(tmp_path / "run") == {"step_3"}
    assert "stopped by SIGTERM at step 3; the run is saved" in told(tmp_path / "run")


# --- giving up with a save under way ----------------------------------------------------------


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A save in the background takes as long as somebody waits for it, and 0.3 s more."""
    real = writing.write_shards

    def write_shards(*given: Any) -> object:
        threading.Event().wait(0.3)
        return real(*given)

    monkeypatch.setattr(writing, "write_shards", write_shards)
    yield


def diverging(configure: Configure, *overrides: str) -> Engine:
    """A run whose loss is not a number in its third step, which is once too often."""
    engine = build_engine(configure("run", "Engine.max_skipped_steps=1", *overrides))
    run = engine.runner.run

    def diverge(batch: Any, step: int, scale: float = 1.0) -> torch.Tensor:
        loss = run(batch, step, scale)
        return loss * float("nan") if step == 3 else loss

    engine.runner.run = diverge  # type: ignore[method-assign]
    return engine


def test_the_checkpoint_named_by_a_run_that_gives_up_is_there(
    configure: Configure, slow_writes: None, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="not finite") as caught:
        diverging(configure, "Engine.save_load.async_save=True").fit()
    assert str(tmp_path / "run" / "step_3") in str(caught.value)
    assert checkpoint.verify(tmp_path / "run" / "step_3") == []


def test_a_run_that_gives_up_on_a_full_disk_gives_both_reasons(
    configure: Configure, disk: Disk
) -> None:
    disk.fails = lambda number: True
    with pytest.raises(UserError, match=r"not finite.* in no checkpoint \(cannot save .*No space"):
        diverging(configure).fit()


def test_an_error_lets_the_save_under_way_come_to_its_end(
    configure: Configure, slow_writes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(configure("run", "Engine.save_load.async_save=True"))
    run = engine.runner.run

    def failing(batch: Any, step: int, scale: float = 1.0) -> torch.Tensor:
        if step == 3:
            raise ZeroDivisionError("of ours")
        return run(batch, step, scale)

    monkeypatch.setattr(engine.runner, "run", failing)
    with pytest.raises(ZeroDivisionError):
        engine.fit()
    assert checkpoint.verify(tmp_path / "run" / "step_2") == []


# --- many ranks -------------------------------------------------------------------------------

TWO = (
    "Distributed.dp_degree=2",
    "Data.batch_size.local_batch_size=null",
    "Engine.eval_freq=0",
    "Engine.test_iters=0",
)


def on_two(configure: Configure, work: Callable[[Engine], Any], *overrides: str) -> list[Any]:
    def run(rank: int) -> Any:
        engine = build_engine(configure("run", *TWO, *overrides, world_size=2), 2)
        try:
            return work(engine)
        except UserError as error:
            return str(error)

    return on_ranks(2, run)


def test_all_ranks_go_on_past_a_save_that_fails_on_one(
    configure: Configure, tmp_path: Path
) -> None:
    def work(engine: Engine) -> int:
        real, written = writing.write_shards, 0

        def write_shards(*given: Any) -> object:
            nonlocal written
            written += 1
            if engine.mesh.rank == 1 and written in (2, 3, 4):
                raise OSError(errno.EIO, "Input/output error")
            return real(*given)

        writing.write_shards = write_shards
        engine.fit()
        return engine.saves.failed_in_a_row

    assert on_two(configure, work, "Engine.save_load.keep_last=0") == [0, 0]
    assert steps(tmp_path / "run") == {"step_2", "step_6", "step_8"}
    assert "step_4: rank 1: [Errno 5] Input/output error" in told(tmp_path / "run")


def test_all_ranks_end_with_the_reason_of_rank_0(configure: Configure, tmp_path: Path) -> None:
    """Also where rank 0 cannot begin: nobody waits for the time to run out."""

    def work(engine: Engine) -> None:
        def no_inodes(meeting: SaveRendezvous) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        SaveRendezvous.open = no_inodes  # type: ignore[method-assign]
        engine.fit()

    overrides = ["Engine.max_steps=2", "Distributed.timeout_seconds=3600"]
    for message in on_two(configure, work, *overrides):
        assert "step_2: [Errno 28] No space left on device; make room" in message
        assert "this run has no earlier checkpoint" in message


def test_an_output_directory_that_is_not_shared_is_refused_before_the_first_step(
    configure: Configure, tmp_path: Path
) -> None:
    def work(rank: int) -> str:
        # One name, which is another directory on each of them.
        (own := tmp_path / f"machine_{rank}").mkdir()
        os.chdir(own)
        config = configure("run", *TWO, "Engine.save_load.output_dir=run", world_size=2)
        engine = build_engine(config, 2)
        with pytest.raises(UserError) as caught:
            engine.fit()
        return str(caught.value)

    for message in on_ranks(2, work):
        assert "rank 1 on " in message and "does not see what rank 0 has written" in message
        assert "on a file system that all machines share" in message
    assert not list(tmp_path.rglob(".shared-*"))


def test_room_for_the_parts_of_all_ranks_is_looked_for_at_the_start(
    configure: Configure, tmp_path: Path
) -> None:
    def work(engine: Engine) -> object:
        own = saving.bytes_to_save(engine.runner, engine.optimizer)
        parts = [part for (part,) in engine.mesh.all_gather(own)]
        # Enough for either of the two, but not for both.
        checkpoint.free_bytes = lambda place: int(max(parts))  # type: ignore[assignment]
        return engine.fit()

    for message in on_two(configure, work):
        assert "a checkpoint of this run takes" in message and "make room" in message
    assert steps(tmp_path / "run") == set()


# --- room -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "fit", "warned"),
    [(1, 2.5, False), (1, 1.5, True), (3, 3.5, True), (3, 4.5, False), (0, 3.5, True)],
)
def test_too_little_room_for_what_is_kept_is_a_notice(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep_last: int,
    fit: float,
    warned: bool,
) -> None:
    """The run saves four times; of a checkpoint `fit` would find room."""
    engine = build_engine(configure("run", f"Engine.save_load.keep_last={keep_last}"))
    one = saving.bytes_to_save(engine.runner, engine.optimizer) * saving.OVERHEAD
    monkeypatch.setattr(checkpoint, "free_bytes", lambda place: int(fit * one))
    engine.fit()
    expected = f"this run is going to need .* checkpoints of .*keep_last={keep_last}"
    assert bool(re.search(expected, told(tmp_path / "run"))) == warned


def test_no_room_for_a_single_checkpoint_is_refused(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(configure("run"))
    monkeypatch.setattr(checkpoint, "free_bytes", lambda place: 1000)
    with pytest.raises(UserError, match=r"takes .* GB and .* has 0\.000 GB free; make room"):
        engine.fit()
    assert engine.step == 0


def test_a_run_that_saves_nothing_needs_no_room(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(configure("run"))
    monkeypatch.setattr(checkpoint, "free_bytes", lambda place: 1000)
    engine.fit(save=False)
    assert engine.step == 8


def test_hashing_can_be_turned_off(configure: Configure, tmp_path: Path) -> None:
    build_engine(configure("run", "Engine.max_steps=2")).fit()
    (path,) = (tmp_path / "run" / "step_2").glob("model-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is corrupted"):
        build_engine(configure("run")).resume()
    trusting = build_engine(configure("run", "Engine.save_load.verify_hashes=False"))
    trusting.resume()
    assert trusting.step == 2
