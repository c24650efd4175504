"""Three ranks save together and any of them is killed: what has a name is a whole checkpoint."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_ranks import rows_of
from helpers.checkpoint_samples import (
    blank,
    crash_before_call,
    in_child,
    same_bits,
    sample,
    state_of,
)

from fourfold import checkpoint
from fourfold.checkpoint import RankGroup
from fourfold.checkpoint.directory import COMMITTED

RANKS = 3
FLOATS = 1 << 16


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)
    return pid


def save_for_ever(output_dir: Path, ranks: RankGroup, first: int, in_background: bool) -> None:
    """This rank's part of one step after the other."""
    for step in itertools.count(first):
        pieces = rows_of(sample(step, FLOATS), ranks)
        begin = checkpoint.begin_save if in_background else checkpoint.save
        pending = begin(output_dir, step, pieces, state_of(step), keep_last=2, ranks=ranks)
        if isinstance(pending, checkpoint.PendingSave):
            pending.wait()


def every_name_loads(output_dir: Path) -> list[int]:
    """The steps that have a name; each must verify and be what was saved."""
    steps = []
    for path in output_dir.iterdir():
        if COMMITTED.fullmatch(path.name):
            assert checkpoint.verify(path) == []
            into = blank(sample(0, FLOATS))
            step = checkpoint.load(path, into)["step"]
            assert same_bits(into, sample(step, FLOATS)) and path.name.startswith(f"step_{step}")
            steps.append(step)
    return steps


def start_job(output_dir: Path, session: str, first: int, in_background: bool) -> list[int]:
    rank_groups = [RankGroup(rank, RANKS, session) for rank in range(RANKS)]
    return [
        fork(lambda ranks=ranks: save_for_ever(output_dir, ranks, first, in_background))
        for ranks in rank_groups
    ]


def end_job(pids: list[int], pauses: Iterator[float]) -> None:
    """Kill one rank after the other: those left live on for a while and may find out."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(next(pauses))
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "a rank ended by itself"


def seconds_of_three_saves(output_dir: Path) -> float:
    began = time.monotonic()
    pids = start_job(output_dir, "undisturbed", 0, False)
    while not (output_dir / "step_2").exists() and time.monotonic() < began + 30:
        time.sleep(0.001)
    end_job(pids, itertools.repeat(0.0))
    return time.monotonic() - began


def kill_random_ranks(output_dir: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    seconds = seconds_of_three_saves(output_dir)
    first = step = max(every_name_loads(output_dir))
    interrupted = 0
    for number in range(kills):
        pids = start_job(output_dir, f"session {number}", step, number % 2 == 0)
        time.sleep(rng.uniform(0.0, 1.5 * seconds))
        rng.shuffle(pids)
        end_job(pids, iter([rng.choice([0.0, seconds / 6]) for _ in pids]))
        interrupted += any(".tmp-crew-" in path.name for path in output_dir.iterdir())
        steps = every_name_loads(output_dir)
        assert max(steps) >= step, "a committed checkpoint is gone"
        step = max(steps)
    assert interrupted > 0, "no kill fell into a save: the test has lost its point"
    assert step > first, "no save ever finished: the test has lost its point"


def test_twenty_kills_of_ranks_at_random_moments(tmp_path: Path) -> None:
    kill_random_ranks(tmp_path, 20, seed=4)


@pytest.mark.slow
def test_two_hundred_kills_of_ranks_at_random_moments(tmp_path: Path) -> None:
    kill_random_ranks(tmp_path, 200, seed=5)


@pytest.mark.slow
def test_rank_0_dies_before_every_single_change_it_makes_to_the_disk(tmp_path: Path) -> None:
    """Replace step_1 by three ranks, rank 0 dying before its n-th call, for all n."""
    before = tmp_path / "before"
    checkpoint.save(before, 1, sample(11), state_of(11))
    for number in range(100):
        run = shutil.copytree(before, tmp_path / f"run{number}")
        rank_groups = [RankGroup(rank, RANKS, "a session") for rank in range(RANKS)]

        def save(ranks: RankGroup, run: Path = run) -> None:
            checkpoint.save(run, 1, rows_of(sample(1), ranks), state_of(1), ranks=ranks)

        def lead(
            number: int = number, first: RankGroup = rank_groups[0], save: Callable = save
        ) -> None:
            crash_before_call(number)
            save(first)

        others = [fork(lambda ranks=ranks, save=save: save(ranks)) for ranks in rank_groups[1:]]
        exit_code = in_child(lead)
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert exit_code in (0, 77)
        into = blank(sample(0))
        _, state = checkpoint.resume(run, into, pytest.fail)
        assert state in (state_of(1), state_of(11)) and same_bits(into, sample(state["step"]))
        assert all(checkpoint.verify(path) == [] for path in checkpoint.candidates(run))

        checkpoint.save(run, 2, sample(2), state_of(2))
        assert {path.name for path in run.iterdir()} == {"step_1", "step_2", "latest"}
        if exit_code == 0:
            assert number > 15, "fewer steps than the protocol has"
            return
    pytest.fail("rank 0 never got to its end")
