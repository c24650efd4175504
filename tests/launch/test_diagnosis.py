"""Of several ranks that failed, which one is to blame."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.heartbeat import Beat, Board, Failure, attach, beat
from fourfold.launch.diagnosis import Frame, RankStack, main_thread, ranks, root_cause, suspects
from fourfold.launch.workers import Ending, RankLog
from fourfold.launch.workers import __file__ as WORKER

LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:4711\n"


@pytest.fixture
def ended(tmp_path: Path):  # type: ignore[no-untyped-def]
    def make(rank: int, status: int, moment: float, error: str = "") -> Ending:
        log = RankLog(tmp_path / f"rank_{rank}.log", 0)
        os.write(log.descriptor, b"step 1\n")
        failure = Failure(moment, log.size()) if error else None
        os.write(log.descriptor, error.encode())
        return Ending(rank, status, moment, False, failure, Beat(0.0, 1, "save"), log)

    return make


def test_the_first_to_fail_is_the_cause(ended) -> None:  # type: ignore[no-untyped-def]
    failures = [ended(0, 1, 9.0, "ValueError: late\n"), ended(1, 1, 5.0, "ValueError: early\n")]
    assert root_cause(failures).rank == 1


@pytest.mark.parametrize(
    ("status", "error"), [(-signal.SIGKILL, ""), (2, "fourfold: bad file\n"), (1, "KeyError: 3\n")]
)
def test_in_one_moment_lost_connections_are_not_the_cause(ended, status, error) -> None:  # type: ignore[no-untyped-def]
    failures = [ended(0, 1, 5.0, LOST), ended(1, status, 5.1, error), ended(2, 1, 5.05, LOST)]
    assert root_cause(failures).rank == 1


def test_an_abort_in_the_same_moment_is_a_consequence(ended) -> None:  # type: ignore[no-untyped-def]
    failures = [ended(0, -signal.SIGABRT, 5.0), ended(1, 1, 5.1, "KeyError: 3\n")]
    assert root_cause(failures).rank == 1


def test_a_lost_connection_long_before_is_the_cause(ended) -> None:  # type: ignore[no-untyped-def]
    failures = [ended(0, 1, 5.0, LOST), ended(1, -signal.SIGKILL, 8.0)]
    assert root_cause(failures).rank == 0


def test_when_the_error_came_counts_not_when_its_process_ended(ended) -> None:  # type: ignore[no-untyped-def]
    slow = replace(ended(0, 1, 5.0, "ValueError: first\n"), noticed=7.0)
    quick = ended(1, 1, 6.0, "ValueError: second\n")
    assert root_cause([quick, slow]).rank == 0


def test_a_rank_that_cannot_answer_is_suspected_before_one_that_is_busy() -> None:
    here = [Frame("/src/a.py", 1, "compute")]
    waiting = [Frame("/lib/torch/_ops.py", 1, "f"), Frame("/lib/torch/distributed/a.py", 1, "g")]
    busy, mute, waits, later = (
        RankStack(0, Beat(2.0, 3, "save"), "R", here),
        RankStack(1, Beat(2.0, 3, "save"), "T", []),
        RankStack(2, Beat(2.0, 3, "save"), "S", waiting),
        RankStack(3, Beat(1.0, 4, "save"), "S", waiting),
    )
    assert suspects([busy, mute, waits]) == [mute]
    assert suspects([waits, busy]) == [busy]
    assert suspects([later, waits]) == [waits]
    assert suspects([busy]) == [busy]


def test_names_of_ranks() -> None:
    assert ranks([4]) == "rank 4"
    assert ranks([0, 2]) == "ranks 0 and 2"
    assert ranks([0, 2, 5]) == "ranks 0, 2 and 5"


def test_the_stack_of_the_working_thread_is_found() -> None:
    dump = (
        "step 3\nThread 0x0001 (most recent call first):\n"
        '  File "/lib/threading.py", line 5 in run\n\n'
        "Current thread 0x0002 (most recent call first):\n"
        '  File "/src/a.py", line 7 in inner\n'
        '  File "/src/a.py", line 9 in <lambda>\n'
        f'  File "{WORKER}", line 1 in _exit_code\n'
    )
    assert main_thread(dump) == [], "not yet written to its end"
    frames = main_thread(dump + f'  File "{WORKER}", line 2 in run_rank\n')
    assert [str(frame) for frame in frames] == ["inner (src/a.py:7)", "<lambda> (src/a.py:9)"]


def test_beats_are_kept_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.heartbeat._attached", None)
    beat(1, "reader")  # nobody listens
    board = Board(3)
    assert board.newest() == 0.0 and str(board.last_beat(1)) == "its start"
    attach(board, 1)
    beat(12, "a phase whose name is too long to be kept")
    assert board.last_beat(1).step == 12
    assert board.last_beat(1).phase == "a phase whose name is to"
    assert board.newest() == board.last_beat(1).seconds > 0.0
    assert board.last_beat(0) == board.last_beat(2) == Beat(0.0, 0, "")
    assert board.failure(1) is None
    board.fail(1, 77)
    failure = board.failure(1)
    assert failure is not None and failure.log_offset == 77
    assert board.failure(0) is None and board.last_beat(1).step == 12
