"""One run at a time in an output directory, and a dead one keeps nobody out."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tiny_run import Configure, exit_status, start_child

from fourfold.engine import build_engine, lock
from fourfold.engine.lock import claim
from fourfold.errors import RunError, UserError


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.05)


@pytest.fixture(params=["flock", "lease"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the locks of a file system, and without."""

    def missing(*given: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if request.param == "lease":
        monkeypatch.setattr(lock.fcntl, "flock", missing)
    return str(request.param)


class Holder:
    """A process that claims a directory and does not let go."""

    def __init__(self, output_dir: Path) -> None:
        ready = output_dir.with_name("claimed")

        def work() -> None:
            kept = claim(output_dir)
            kept.keep()
            ready.touch()
            time.sleep(1000)

        self.pid = start_child(work)
        self.alive = True
        while not ready.exists():
            time.sleep(0.01)

    def kill(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
            exit_status(self.pid)
        self.alive = False


@pytest.fixture
def holder(either: str, tmp_path: Path) -> Iterator[Holder]:
    process = Holder(tmp_path / "run")
    yield process
    process.kill()


def test_who_comes_second_is_told_who_is_there(holder: Holder, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        claim(tmp_path / "run")
    said = str(refused.value)
    assert f"process {holder.pid} on {socket.gethostname()}, since 20" in said
    assert str(tmp_path / "run") in said and "\n" not in said


def test_a_killed_run_keeps_nobody_out(holder: Holder, tmp_path: Path) -> None:
    holder.kill()
    claim(tmp_path / "run").release()


def test_what_is_released_is_free_and_what_is_held_can_be_claimed_again(
    either: str, tmp_path: Path
) -> None:
    first = claim(tmp_path)
    assert claim(tmp_path / "." / "") is first
    first.release()
    assert not list(tmp_path.iterdir())
    second = claim(tmp_path)
    assert second is not first and second.is_held
    second.release()


def test_forked_processes_share_the_claim_until_the_last_has_ended(tmp_path: Path) -> None:
    def supervisor() -> None:
        kept = claim(tmp_path / "run")

        def rank() -> None:
            assert claim(tmp_path / "run") is kept
            (tmp_path / "forked").touch()
            while not (tmp_path / "enough").exists():
                time.sleep(0.01)

        start_child(rank)
        time.sleep(1000)

    pid = start_child(supervisor)
    while not (tmp_path / "forked").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert exit_status(pid) == -signal.SIGKILL
    with pytest.raises(UserError, match=f"process {pid} on"):
        claim(tmp_path / "run")
    (tmp_path / "enough").touch()
    lock.WAIT_SECONDS = 20.0  # set back by `hasty`
    claim(tmp_path / "run").release()


@pytest.mark.parametrize("either", ["lease"], indirect=True)
@pytest.mark.parametrize(("age", "is_void"), [(10, False), (1000, True)])
def test_a_lease_of_another_machine_runs_out(
    either: str, age: float, is_void: bool, tmp_path: Path
) -> None:
    file = tmp_path / lock.LOCK_FILE
    file.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "x", "token": "y"}))
    then = time.time() - age
    os.utime(file, (then, then))
    if is_void:
        claim(tmp_path).release()
        assert not file.exists()
    else:
        with pytest.raises(UserError, match="process 1 on elsewhere"):
            claim(tmp_path)
    assert not list(tmp_path.glob(f"{lock.LOCK_FILE}.*"))


@pytest.mark.parametrize("either", ["lease"], indirect=True)
def test_a_lease_is_renewed(either: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.01)
    kept = claim(tmp_path)
    os.utime(kept.path, (0, 0))
    kept.keep()
    deadline = time.monotonic() + 20
    while kept.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept.release()


def test_a_run_refuses_a_directory_in_use_before_it_takes_anything(
    configure: Configure, tmp_path: Path
) -> None:
    process = Holder(tmp_path / "run")
    try:
        with pytest.raises(UserError, match=f"process {process.pid} on"):
            build_engine(configure("run"))
    finally:
        process.kill()
    engine = build_engine(configure("run", "Engine.max_steps=1"))
    engine.fit()
    assert not engine.claim.is_held


@pytest.mark.parametrize("place", ["/proc/nowhere/run", "file/run"])
def test_a_place_that_cannot_be_written_is_one_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a run cannot write there \(.+\); choose another"):
        claim(tmp_path / place)


def test_machines_of_one_launch_take_over_and_the_older_epoch_ends(
    either: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was cut off still holds the file, and must commit nothing any more."""
    monkeypatch.setenv(lock.LAUNCH, "node0:29500")
    output_dir = tmp_path / "run"
    told = tmp_path / "told"

    def cut_off() -> None:
        kept = claim(output_dir)
        kept.check()
        (tmp_path / "claimed").touch()
        while not (tmp_path / "taken").exists():
            time.sleep(0.01)
        try:
            kept.check()
        except RunError as error:
            told.write_text(str(error))
        kept.release()

    pid = start_child(cut_off)
    while not (tmp_path / "claimed").exists():
        time.sleep(0.01)
    held = claim(output_dir)
    held.check()
    (tmp_path / "taken").touch()
    assert exit_status(pid) == 0
    assert (
        f"taken over by process {os.getpid()} on {socket.gethostname()} (epoch" in told.read_text()
    )
    held.check()  # that the other has released its own does not end ours
    assert (output_dir / lock.LOCK_FILE).exists()
    monkeypatch.setenv(lock.LAUNCH, "node0:29501")

    def another_launch() -> None:
        with pytest.raises(UserError, match="in use by another run"):
            claim(output_dir)

    assert exit_status(start_child(lambda: (lock._held.clear(), another_launch()))) == 0
    held.release()


def test_a_checkpoint_is_not_committed_by_an_older_epoch(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(configure("run", "Engine.max_steps=4"))
    assert engine.claim is not None

    def taken_over() -> None:
        raise RunError("was taken over")

    monkeypatch.setattr(engine.claim, "check", taken_over)
    engine.ranks = replace(engine.ranks, may_commit=engine.claim.check)
    with pytest.raises(RunError, match="taken over"):
        engine.fit()
    assert not list(engine.output_dir.glob("step_*"))
