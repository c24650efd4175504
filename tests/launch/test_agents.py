"""Agents of several machines, on loopback: who takes part, whose fault it is, who comes back."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.supervised import attempt, exit_status, rank
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from fourfold import heartbeat
from fourfold.errors import UserError
from fourfold.launch.agent import WatchLimits, run_agent
from fourfold.launch.launchers import read_machines
from fourfold.launch.rounds import Machines, Meeting, MeetingLost
from fourfold.launch.supervisor import Restarts
from fourfold.meeting import open_store
from fourfold.signals import SupervisorSignals, answer_with_stacks

HOST = socket.gethostname()
LOST_SECONDS = 5.0


@dataclass
class Agents:
    """Agents in processes of their own, as `fourfold train --nnodes` has them."""

    directory: Path
    nnodes: str
    work: Callable[[], None]
    nproc: int = 1
    max_restarts: int = 0
    pause_seconds: float = 0.1  # before the first restart
    runs_on: tuple[int, ...] = ()  # the numbers of ranks it can run on, if not on any

    def __post_init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.master = f"127.0.0.1:{probe.getsockname()[1]}"
        self.pids: dict[int, int] = {}

    def start(self, *nodes: int) -> None:
        for node in nodes:
            self.pids[node] = os.fork()
            if self.pids[node] == 0:
                self._run(node)

    def _run(self, node: int) -> None:
        code = 99
        answer_with_stacks()
        machines = read_machines(self.nnodes, node, self.master)
        try:
            with (self.directory / f"told_{node}").open("a", buffering=1) as told:
                code = run_agent(
                    machines,
                    self.nproc,
                    self._plan,
                    self.directory / "logs",
                    WatchLimits(60.0, LOST_SECONDS, 30.0),
                    Restarts(self.max_restarts, self.pause_seconds, None),
                    stopped_code=0,
                    echo=lambda line: None,
                    tell=lambda line: print(line, file=told),
                )
        except UserError as error:
            (self.directory / f"told_{node}").write_text(str(error))
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _plan(self, world_size: int) -> Callable[[], None]:
        if self.runs_on and world_size not in self.runs_on:
            raise UserError(f"no layout of {world_size}")
        return self.work

    def told(self, node: int) -> str:
        path = self.directory / f"told_{node}"
        return path.read_text() if path.exists() else ""

    def ends(self) -> list[int]:
        return [exit_status(pid) for pid in self.pids.values()]

    def kill(self) -> None:
        for pid in self.pids.values():
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(nnodes: str, work: Callable[[], None], **options: Any) -> Agents:
        made.append(Agents(tmp_path, nnodes, work, **options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def meet() -> None:
    """Every rank sees every other in the store of this round."""
    store = open_store(rank(), world_size(), 30.0)
    store.set(f"here/{rank()}", str(os.getpid()))
    store.wait([f"here/{other}" for other in range(world_size())])


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_of_all_machines_meet(agents: Callable[..., Agents], tmp_path: Path) -> None:
    def work() -> None:
        meet()
        (tmp_path / f"rank_{rank()}").write_text(os.environ["LOCAL_RANK"])

    two = agents("2", work, nproc=2)
    two.start(0, 1)
    assert two.ends() == [0, 0]
    places = [(tmp_path / f"rank_{number}").read_text() for number in range(4)]
    assert places == ["0", "1", "0", "1"]
    assert f"{HOST} has ranks 2 and 3 of 4" in two.told(1)
    logs = {path.name for path in (tmp_path / "logs" / HOST / "attempt_0").iterdir()}
    assert logs == {f"rank_{number}.log" for number in range(4)}


def test_all_machines_name_the_rank_that_failed(agents: Callable[..., Agents]) -> None:
    def work() -> None:
        meet()
        heartbeat.beat(7, "forward_backward")
        if rank() == 1:
            raise ValueError("out of luck")
        time.sleep(60)

    two = agents("2", work)
    two.start(0, 1)
    assert two.ends() == [1, 1]
    for node in (0, 1):
        assert f"rank 1 on {HOST} failed at step 7 (forward_backward)" in two.told(node)
        assert "ValueError: out of luck" in two.told(node)


def test_a_mistake_in_the_input_is_told_once_and_not_repeated(
    agents: Callable[..., Agents],
) -> None:
    def work() -> None:
        if rank() == 1:
            raise UserError("no such file")
        time.sleep(60)

    two = agents("2", work, max_restarts=3)
    two.start(0, 1)
    assert two.ends() == [2, 2]
    assert two.told(0).count("no such file") == two.told(1).count("no such file") == 1


def test_all_are_restarted_where_one_failed(agents: Callable[..., Agents]) -> None:
    """Also those whose ranks have ended well before."""

    def work() -> None:
        meet()
        if attempt() == 0 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    two = agents("2", work, max_restarts=1)
    two.start(0, 1)
    assert two.ends() == [0, 0]
    assert f"rank 1 on {HOST} was killed by signal 9 (SIGKILL)" in two.told(0)
    assert "restart 1 of 1" in two.told(0) and "restart 1 of 1" in two.told(1)


def test_a_log_that_cannot_be_written_is_named_and_tried_again(
    agents: Callable[..., Agents], tmp_path: Path
) -> None:
    """As on a disk that is full when a round begins, and has room when the next one does."""

    def work() -> None:
        meet()
        if attempt() == 0 and rank() == 1:
            (tmp_path / "logs" / HOST / "attempt_1").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    two = agents("2", work, max_restarts=2)
    two.start(0, 1)
    assert two.ends() == [0, 0]
    for node in (0, 1):
        assert f"{HOST}: cannot write the log" in two.told(node)
        assert "restart 2 of 2" in two.told(node)


def test_a_machine_that_waits_says_for_whom(agents: Callable[..., Agents]) -> None:
    two = agents("2", meet)
    two.start(0)
    until(lambda: "waiting for 1 of 2 machines at" in two.told(0))
    two.start(1)
    assert two.ends() == [0, 0]


def training(directory: Path) -> None:
    """What ranks of a run do: steps, and a save when they are asked to stop."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    store = open_store(rank(), world_size(), 30.0)
    for step in range(1, 10_000):
        heartbeat.beat(step, "reader")
        store.set(f"step/{step}/{rank()}", "stop" if asked else "go")
        keys = [f"step/{step}/{other}" for other in range(world_size())]
        store.wait(keys)
        (directory / f"world_{world_size()}").touch()
        if b"stop" in store.multi_get(keys):
            heartbeat.beat(step, heartbeat.STOPPED)
            return
        if (directory / "finish").exists() and step % 20 == 0:
            heartbeat.beat(step, heartbeat.FINISHED)
            return
        time.sleep(0.02)


@pytest.mark.slow
def test_a_machine_that_was_lost_comes_back(agents: Callable[..., Agents], tmp_path: Path) -> None:
    """The agent that comes back has counted nothing; the other has counted its restarts."""
    two = agents("1:2", lambda: training(tmp_path), max_restarts=3)
    two.start(0, 1)
    until((tmp_path / "world_2").exists)
    os.kill(two.pids[1], signal.SIGKILL)
    os.waitpid(two.pids.pop(1), 0)
    until((tmp_path / "world_1").exists)
    assert f"{HOST} (rank 1) has not been heard of" in two.told(0)
    (tmp_path / "world_2").unlink()
    two.start(1)
    until((tmp_path / "world_2").exists)
    assert "1 more machine waits to join" in two.told(0)
    os.kill(two.pids[0], signal.SIGTERM)
    os.kill(two.pids[1], signal.SIGTERM)
    assert two.ends() == [0, 0]


@pytest.mark.slow
def test_a_machine_lost_between_two_rounds_is_named(
    agents: Callable[..., Agents], tmp_path: Path
) -> None:
    """No rank misses it: there are none, because another fault has just ended them."""

    def work() -> None:
        if attempt() == 0:
            meet()
            os.kill(os.getpid(), signal.SIGKILL)
        training(tmp_path)

    two = agents("1:2", work, max_restarts=3, pause_seconds=3.0)
    two.start(0, 1)
    until(lambda: "restarting all ranks" in two.told(1))
    os.kill(two.pids[1], signal.SIGKILL)
    os.waitpid(two.pids.pop(1), 0)
    until((tmp_path / "world_1").exists)
    assert two.told(0).count(f"{HOST} (rank 1) has not been heard of") == 1
    assert "last before this round" in two.told(0)
    os.kill(two.pids[0], signal.SIGTERM)
    assert two.ends() == [0]


@pytest.mark.slow
def test_as_many_machines_train_as_can_share_the_work(
    agents: Callable[..., Agents], tmp_path: Path
) -> None:
    """The one too many stands by, and is needed when another is lost."""
    three = agents("1:3", lambda: training(tmp_path), max_restarts=3, runs_on=(2,))
    three.start(0, 1, 2)
    until((tmp_path / "world_2").exists)
    until(lambda: "cannot be used now: no layout of 3" in three.told(0))
    os.kill(three.pids[1], signal.SIGKILL)
    os.waitpid(three.pids.pop(1), 0)
    until(lambda: f"{HOST} has rank 1 of 2" in three.told(2))
    (tmp_path / "finish").touch()
    assert three.ends() == [0, 0]


def test_what_no_number_of_machines_can_run_is_said(agents: Callable[..., Agents]) -> None:
    two = agents("1:2", meet, runs_on=(8,))
    two.start(0, 1)
    assert two.ends() == [2, 2]
    assert "no layout of 2" in two.told(0)


@pytest.mark.parametrize("nnodes", ["0", "2:1", "a", "2:", ":2", "1:2:3", "-1", "", "٣", "9999999"])
def test_numbers_of_machines_that_are_none(nnodes: str) -> None:
    with pytest.raises(UserError, match="--nnodes"):
        read_machines(nnodes, 0, "node0:29500")


def test_numbers_of_machines() -> None:
    assert read_machines("3", None, "n:1") == Machines(3, 3, None, "n", 1)
    assert read_machines("2:4", 1, "[fe80::1]:29500") == Machines(2, 4, 1, "fe80::1", 29500)
    with pytest.raises(UserError, match="--node-rank 4"):
        read_machines("2:4", 4, "n:1")


@pytest.mark.parametrize("kind", [RuntimeError, RendezvousConnectionError])
def test_a_connection_that_closes_while_joining_is_a_lost_meeting(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of torch's errors it ends with: no traceback, and the machine tries again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with SupervisorSignals() as signals:
        machines = read_machines("2", 0, f"127.0.0.1:{port}")
        assert machines is not None
        meeting = Meeting(machines, HOST, signals, print)

        def closed() -> None:
            raise kind("Failed to recv, got 0 bytes")

        monkeypatch.setattr(meeting.handler, "next_rendezvous", closed)
        with pytest.raises(MeetingLost, match="does not answer"):
            meeting.join(1, signals, LOST_SECONDS)
        meeting.abandon()
