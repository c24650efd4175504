"""Signals to the supervisor: passed on, waited for, and nothing left when it is killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.supervised import eventually, exit_status, is_gone, rank, start_supervisor

from fourfold import heartbeat
from fourfold.launch import workers
from fourfold.signals import STOP_SIGNALS


def announced(directory: Path, nproc: int) -> bool:
    return len(list(directory.glob("ready_*"))) == nproc


def announce(directory: Path) -> None:
    (directory / f"ready_{rank()}").touch()


@pytest.fixture(autouse=True)
def without_nohup() -> Iterator[None]:
    """The tests may themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_ranks_that_stop_well_make_the_run_end_well(number: int, tmp_path: Path) -> None:
    def work() -> None:
        asked: list[int] = []
        signal.signal(number, lambda received, frame: asked.append(received))
        announce(tmp_path)
        while not asked:
            time.sleep(0.01)
        (tmp_path / f"saved_{rank()}").touch()

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, number)
    assert exit_status(supervisor) == 0
    assert len(list(tmp_path.glob("saved_*"))) == 2
    assert (tmp_path / "told").read_text() == ""


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_ranks_that_know_no_better_end_by_the_signal(number: int, tmp_path: Path) -> None:
    def work() -> None:
        announce(tmp_path)
        time.sleep(1000)

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, number)
    assert exit_status(supervisor) == 128 + number
    told = (tmp_path / "told").read_text()
    assert f"ended by {signal.Signals(number).name}" in told
    assert not (tmp_path / "attempt_1").exists(), "a stop is no reason to restart"


def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def work() -> None:
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        announce(tmp_path)
        while not (tmp_path / "enough").exists():
            time.sleep(0.01)

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, signal.SIGHUP)
    time.sleep(0.3)
    (tmp_path / "enough").touch()
    assert exit_status(supervisor) == 0


def test_stacks_are_written_on_request_and_the_run_goes_on(tmp_path: Path) -> None:
    def a_long_step() -> None:
        while not (tmp_path / "enough").exists():
            time.sleep(0.01)

    def work() -> None:
        announce(tmp_path)
        a_long_step()

    def stacks() -> int:
        logs = (tmp_path / "attempt_0").glob("rank_*.log")
        return sum("in a_long_step" in log.read_text() for log in logs)

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, signal.SIGQUIT)
    assert eventually(lambda: stacks() == 2)
    (tmp_path / "enough").touch()
    assert exit_status(supervisor) == 0
    assert f"in the logs in {tmp_path / 'attempt_0'}" in (tmp_path / "told").read_text()


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGINT, lambda *_: (tmp_path / f"first_{rank()}").touch())
        announce(tmp_path)
        while True:
            time.sleep(1)

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, signal.SIGINT)
    assert eventually(lambda: len(list(tmp_path.glob("first_*"))) == 2)
    os.kill(supervisor, signal.SIGINT)
    assert exit_status(supervisor) == 130


def test_an_interrupt_while_a_rank_sets_itself_up_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forget = workers.forget_answers

    def forget_and_be_interrupted() -> None:
        forget()
        os.kill(os.getpid(), signal.SIGINT)  # still blocked: it comes in a moment

    monkeypatch.setattr(workers, "forget_answers", forget_and_be_interrupted)
    supervisor = start_supervisor(lambda: None, 1, tmp_path, first_pause_seconds=0.01)
    assert exit_status(supervisor) != 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_stop_is_heeded_between_two_attempts(tmp_path: Path) -> None:
    def work() -> None:
        raise ValueError("broken")

    supervisor = start_supervisor(work, 2, tmp_path, first_pause_seconds=1000)
    told = tmp_path / "told"
    assert eventually(lambda: told.exists() and "ranks in 60 s" in told.read_text())
    os.kill(supervisor, signal.SIGTERM)
    assert exit_status(supervisor) == 143
    assert "ended by SIGTERM" in told.read_text()


def test_ranks_that_ignore_a_stop_are_ended_even_where_no_hang_is_watched_for(
    tmp_path: Path,
) -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        announce(tmp_path)
        while True:
            time.sleep(1)

    limits = {"hang_seconds": math.inf, "stop_seconds": 0.3}
    supervisor = start_supervisor(work, 2, tmp_path, **limits)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, signal.SIGTERM)
    assert exit_status(supervisor) == 143
    assert "the ranks did not stop within 0.3 s" in (tmp_path / "told").read_text()


def test_ranks_that_save_for_long_are_left_to_it(tmp_path: Path) -> None:
    def work() -> None:
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        announce(tmp_path)
        while not asked:
            time.sleep(0.01)
        for _ in range(20):
            heartbeat.alive()
            time.sleep(0.1)

    supervisor = start_supervisor(work, 2, tmp_path, stop_seconds=1.0)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, signal.SIGTERM)
    assert exit_status(supervisor) == 0


def test_an_error_while_stopping_is_shown(tmp_path: Path) -> None:
    def work() -> None:
        def refuse(*_: object) -> None:
            raise OSError("disk full")

        signal.signal(signal.SIGTERM, refuse if rank() == 1 else signal.SIG_IGN)
        announce(tmp_path)
        while True:
            time.sleep(1)

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    os.kill(supervisor, signal.SIGTERM)
    assert exit_status(supervisor) == 1
    assert "OSError: disk full" in (tmp_path / "told").read_text()


@pytest.mark.parametrize("start", ["exec", "fork", "orphan"])
def test_nothing_outlives_a_killed_supervisor(start: str, tmp_path: Path) -> None:
    grandchild: Callable[[], int] = {
        "exec": lambda: subprocess.Popen(["sleep", "1000"]).pid,
        "fork": lambda: os.fork() or time.sleep(1000) or 0,
        "orphan": lambda: int(
            subprocess.check_output(["sh", "-c", "sleep 1000 >/dev/null & echo $!"])
        ),
    }[start]

    def work() -> None:
        pids = [os.getpid(), grandchild()]
        (tmp_path / f"pids_{rank()}").write_text(" ".join(map(str, pids)))
        (tmp_path / f"store_{rank()}").write_text(str(Path(os.environ["FOURFOLD_STORE"]).parent))
        announce(tmp_path)
        time.sleep(1000)

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    stores = {file.read_text() for file in tmp_path.glob("store_*")}
    assert all(map(os.path.exists, stores))
    os.kill(supervisor, signal.SIGKILL)
    assert exit_status(supervisor) == -signal.SIGKILL
    pids = [int(pid) for file in tmp_path.glob("pids_*") for pid in file.read_text().split()]
    assert len(pids) == 4
    assert eventually(lambda: all(map(is_gone, pids)))
    assert eventually(lambda: not any(map(os.path.exists, stores))), "nor where they had met"


def test_ranks_die_with_the_supervisor_even_if_nobody_guards_them(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / f"pid_{rank()}").write_text(str(os.getpid()))
        announce(tmp_path)
        time.sleep(1000)

    supervisor = start_supervisor(work, 2, tmp_path)
    assert eventually(lambda: announced(tmp_path, 2))
    pids = [int(file.read_text()) for file in tmp_path.glob("pid_*")]
    reaper = os.getpgid(pids[0])
    assert reaper not in (*pids, supervisor)
    os.kill(reaper, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    assert exit_status(supervisor) == -signal.SIGKILL
    assert eventually(lambda: all(map(is_gone, pids)))
