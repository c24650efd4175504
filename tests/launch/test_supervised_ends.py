"""How supervised runs end: well, by one rank's fault, after restarts; and what the user reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.supervised import add_up, attempt, exit_status, meet, rank, run
from helpers.tiny_run import start_child

from fourfold.errors import ConfigError, UserError
from fourfold.heartbeat import beat
from fourfold.launch.supervisor import Restarts, supervise
from fourfold.launch.workers import LogFile


def test_all_ranks_end_well(tmp_path: Path) -> None:
    def work() -> None:
        meet()
        print(f"rank {rank()} of {os.environ['WORLD_SIZE']} sees {add_up():g}")
        print(f"local {os.environ['LOCAL_RANK']} {os.environ['LOCAL_WORLD_SIZE']}", end="")

    console = run(work, 3, tmp_path)
    assert console.code == 0
    assert console.shown == ["rank 0 of 3 sees 3", "local 0 3"] and not console.told
    for number in range(3):
        log = (tmp_path / "attempt_0" / f"rank_{number}.log").read_text()
        assert log.startswith("--- attempt 0, ")
        assert log.endswith(f"rank {number} of 3 sees 3\nlocal {number} 3")


def test_processors_are_shared_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    console = run(lambda: print(torch.get_num_threads()), 1, tmp_path)
    assert console.shown == [str(processors)]
    console = run(lambda: print(torch.get_num_threads()), processors, tmp_path)
    assert console.shown == ["1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what this process has
    assert run(lambda: print(torch.get_num_threads()), 1, tmp_path).shown == ["1"]


def exists(pid: str) -> bool:
    """Also true of a zombie."""
    return Path("/proc", pid).exists()


def end_by(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fail() -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (end_by(signal.SIGKILL), "rank 1 was killed by signal 9 (SIGKILL) at step 2 (optimizer)"),
        (end_by(signal.SIGSEGV), "rank 1 was killed by signal 11 (SIGSEGV) at step 2 (optimizer)"),
        (fail, "rank 1 failed at step 2 (optimizer) with exit code 1"),
        (lambda: sys.exit(3), "rank 1 failed at step 2 (optimizer) with exit code 3"),
        (lambda: sys.exit("enough"), "enough"),
        (lambda: os._exit(4), "rank 1 failed at step 2 (optimizer) with exit code 4"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exception", "exit", "exit message", "_exit"],
)
def test_the_rank_that_failed_first_is_named(
    end: Callable[[], None], said: str, tmp_path: Path
) -> None:
    def work() -> None:
        meet()
        print("under way")
        for step in (1, 2, 3):
            beat(step, "optimizer")
            add_up()
            if rank() == 1 and step == 2:
                end()

    console = run(work, 3, tmp_path)
    assert console.code == 1
    assert said in console.said
    assert f"the log of rank 1 is {tmp_path / 'attempt_0' / 'rank_1.log'}" in console.said
    assert console.shown == ["under way"], "the victims' errors stay in their logs"
    assert "by peer" not in console.said and "rank 0" not in console.said
    assert "by peer" in (tmp_path / "attempt_0" / "rank_0.log").read_text()


def test_the_error_is_shown_with_its_traceback(tmp_path: Path) -> None:
    console = run(fail, 1, tmp_path)
    assert "    ValueError: no such thing" in console.told
    assert "in fail" in console.said
    assert not console.shown, "rank 0's own error is shown once, by the supervisor"


def test_a_crash_shows_where_it_was(tmp_path: Path) -> None:
    console = run(end_by(signal.SIGSEGV), 1, tmp_path)
    assert "Fatal Python error: Segmentation fault" in console.said
    assert "Extension modules" not in console.said


def test_a_user_error_is_shown_alone_and_never_restarted(tmp_path: Path) -> None:
    def work() -> None:
        meet()
        if rank() == 2:
            raise UserError("the file is empty; give another")
        add_up()

    console = run(work, 3, tmp_path, max_restarts=2)
    assert console.code == 2
    assert console.told == ["fourfold: the file is empty; give another"]
    assert not (tmp_path / "attempt_1").exists()


def test_the_same_user_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    def work() -> None:
        raise ConfigError(["first problem", "second problem"])

    console = run(work, 4, tmp_path)
    assert console.code == 2
    assert console.told == ["fourfold: first problem", "second problem"]


def test_a_restart_forks_all_ranks_again(tmp_path: Path) -> None:
    def work() -> None:
        meet()
        total = add_up()
        if attempt() < 2 and rank() == attempt():
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"attempt {attempt()}: {total + add_up():g}")

    console = run(work, 2, tmp_path, max_restarts=3, first_pause_seconds=0.01)
    assert console.code == 0
    assert console.shown == ["attempt 2: 4"]
    assert [line for line in console.told if "restarting" in line] == [
        f"fourfold: restarting all ranks in {pause} s (restart {n} of 3)"
        for n, pause in ((1, 0.01), (2, 0.02))
    ]
    assert "rank 0 was killed" in console.said and "rank 1 was killed" in console.said
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"attempt_{n}" for n in range(3)]


def test_restarts_have_a_limit(tmp_path: Path) -> None:
    console = run(fail, 2, tmp_path, max_restarts=2, first_pause_seconds=0.01)
    assert console.code == 1
    assert len([line for line in console.told if "exit code 1" in line]) == 3
    assert (tmp_path / "attempt_2").exists() and not (tmp_path / "attempt_3").exists()


def test_restarts_count_anew_after_a_new_checkpoint(tmp_path: Path) -> None:
    """Of a run that gets further between its failures, none is ever the last."""
    steps = [None, None, 40, 40, 40, 80, 80, 80]
    told: list[str] = []
    restarts = Restarts(2, 1.0, lambda: steps.pop(0))
    while restarts.another(told.append):
        pass
    assert [line.removeprefix("fourfold: restarting all ranks ") for line in told] == [
        "from the beginning in 1 s (restart 1 of 2)",
        "from step 40 in 1 s (restart 1 of 2)",
        "from step 40 in 2 s (restart 2 of 2)",
    ]


def test_pauses_double_up_to_a_minute() -> None:
    restarts = Restarts(5000, 1.0, None)
    pauses = []
    while restarts.another(lambda line: None):
        pauses.append(restarts.pause_seconds)
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and set(pauses[8:]) == {60}


def test_ranks_that_will_not_end_are_killed_with_what_they_started(tmp_path: Path) -> None:
    def work() -> None:
        if rank() == 0:
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            raise ValueError("the others do not care")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleeper = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {sleeper.pid}")
        (tmp_path / "ready").touch()
        while True:
            signal.pause()

    console = run(work, 2, tmp_path / "logs", grace_seconds=0.1)
    assert console.code == 1 and "the others do not care" in console.said
    assert not any(exists(pid) for pid in (tmp_path / "pids").read_text().split())


def test_what_a_good_run_leaves_behind_is_ended_too(tmp_path: Path) -> None:
    def work() -> None:
        print(subprocess.Popen(["sleep", "1000"]).pid)

    console = run(work, 1, tmp_path)
    assert console.code == 0
    assert not exists(console.shown[0])


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UserError, match="cannot write the log"):
        run(fail, 2, tmp_path / "logs")


def test_a_log_that_is_removed_or_emptied_costs_nothing(tmp_path: Path) -> None:
    """By a clean-up script, or one that rotates logs."""

    def work() -> None:
        meet()
        print("before")
        logs = tmp_path / "attempt_0"
        if rank() == 0:
            os.truncate(logs / "rank_0.log", 0)
            time.sleep(0.3)
            print("emptied")
            time.sleep(0.3)
            for log in logs.iterdir():
                log.unlink()
            logs.rmdir()
            time.sleep(0.3)
            print("removed")
        add_up()
        if rank() == 1:
            fail()
        add_up()

    console = run(work, 2, tmp_path)
    assert console.code == 1
    assert {"emptied", "removed"} <= set(console.shown)
    assert "    ValueError: no such thing" in console.told


def test_a_console_that_nobody_reads_costs_nothing(tmp_path: Path) -> None:
    def supervisor() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        for stream in (1, 2):
            os.dup2(writing, stream)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
        assert supervise(lambda: print("x" * 100_000), 2, tmp_path) == 0
        assert supervise(fail, 1, tmp_path) == 1
        sys.stdout.flush()
        (tmp_path / "survived").touch()

    assert exit_status(start_child(supervisor)) == 0
    assert (tmp_path / "survived").exists()


def test_the_warm_process_can_be_forked() -> None:
    """What forked ranks find imported must have started neither threads nor processes."""
    code = (
        "import os, fourfold.engine, fourfold.launch; "
        "print(len(os.listdir('/proc/self/task')), "
        "repr(open(f'/proc/self/task/{os.getpid()}/children').read()))"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout == "1 ''\n"


def test_what_the_log_has_no_room_for_is_shown_all_the_same() -> None:
    theirs, ours = os.pipe()
    with open("/dev/full", "wb", buffering=0) as full:
        log = LogFile(full.fileno(), ours)
        assert log.write(b"the disk is full\n") == 17
        with pytest.raises(OSError, match="No space left"):
            LogFile(full.fileno(), None).write(b"nobody is shown this")
    assert os.read(theirs, 100) == b"the disk is full\n"
    os.close(theirs)
    os.close(ours)
