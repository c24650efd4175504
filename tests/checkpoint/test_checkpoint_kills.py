"""Writers killed at any moment, and readers beside a busy writer."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_samples import (
    blank,
    crash_before_call,
    in_child,
    same_bits,
    sample,
    state_of,
)

from fourfold import checkpoint


def save_from(step: int, output_dir: Path, floats: int, keep_last: int, report: int) -> None:
    """Save one step after the other for ever, reporting each when it is committed."""
    while True:
        checkpoint.save(output_dir, step, sample(step, floats), state_of(step), keep_last)
        os.write(report, step.to_bytes(8, "little"))
        step += 1


def fork_writer(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork a process that runs `work(pipe)`; return its id and the pipe's reading end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            os.close(reading)
            work(writing)
        finally:
            os._exit(1)
    os.close(writing)
    return pid, reading


def drain(pipe: int) -> list[int]:
    with os.fdopen(pipe, "rb") as stream:
        data = stream.read()
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"


@pytest.mark.parametrize("kills", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    rng = random.Random(8)
    floats = 1 << 20  # 4 + 2 MB, and as much again for what is being replaced
    began = time.monotonic()
    checkpoint.save(tmp_path, 0, sample(0, floats), state_of(0))
    one_save_seconds = time.monotonic() - began
    into = blank(sample(0, floats))
    step = committed = interrupted = 0
    for _ in range(kills):
        keep_last = rng.choice([1, 2])
        # It starts by replacing the step it resumed from.
        pid, pipe = fork_writer(
            lambda report, step=step, keep=keep_last: save_from(
                step, tmp_path, floats, keep, report
            )
        )
        time.sleep(rng.uniform(0.0, 4 * one_save_seconds))
        kill_and_wait(pid)
        finished = drain(pipe)
        committed = max([committed, *finished])
        # On a busy machine the first save may have been a quick one.
        one_save_seconds *= 1.0 if finished else 1.1
        interrupted += any(path.name.startswith(".") for path in tmp_path.iterdir())

        directory, state = checkpoint.resume(tmp_path, into, pytest.fail)
        step = state["step"]
        assert committed <= step <= committed + 1
        assert same_bits(into, sample(step, floats)), directory
    assert interrupted > 0, "no kill fell into a save: the test has lost its point"
    assert committed > 0, "no save ever finished: the test has lost its point"


def test_a_crash_before_every_single_change_to_the_disk(tmp_path: Path) -> None:
    """Replace step_2, then save step_3 and drop step_1, dying before the n-th call, for all n."""
    before = tmp_path / "before"
    for step in (1, 2):
        checkpoint.save(before, step, sample(step), state_of(step))

    for number in range(200):
        run = shutil.copytree(before, tmp_path / f"run{number}")

        def write(run: Path = run, number: int = number) -> None:
            crash_before_call(number)
            checkpoint.save(run, 2, sample(22), state_of(22), keep_last=2)
            checkpoint.save(run, 3, sample(3), state_of(3), keep_last=2)

        exit_code = in_child(write)
        assert exit_code in (0, 77)

        into = blank(sample(0))
        _, state = checkpoint.resume(run, into, pytest.fail)
        assert state in (state_of(2), state_of(22), state_of(3))
        assert same_bits(into, sample(state["step"]))
        assert all(checkpoint.verify(path) == [] for path in checkpoint.candidates(run))

        checkpoint.save(run, 4, sample(4), state_of(4), keep_last=2)
        assert {path.name for path in run.iterdir()} in (
            {"step_2", "step_4", "latest"},
            {"step_3", "step_4", "latest"},
        )
        assert all(checkpoint.verify(path) == [] for path in checkpoint.candidates(run))
        if exit_code == 0:
            assert number > 25, "fewer steps than the protocol has"
            return
    pytest.fail("the writer never got to its end")


@pytest.mark.parametrize("replaces", [False, True], ids=["new steps", "one step again and again"])
def test_a_reader_beside_a_writer_always_gets_one_whole_checkpoint(
    tmp_path: Path, replaces: bool
) -> None:
    floats = 1 << 10
    checkpoint.save(tmp_path, 0, sample(0, floats), state_of(0))

    def write(report: int) -> None:
        number = 0
        while True:
            number += 1
            step = 0 if replaces else number
            checkpoint.save(tmp_path, step, sample(number, floats), state_of(number), keep_last=1)
            os.write(report, number.to_bytes(8, "little"))

    pid, pipe = fork_writer(write)
    seen: list[int] = []
    deadline = time.monotonic() + 60
    try:
        while len(set(seen)) < 100 and time.monotonic() < deadline:
            into = blank(sample(0, floats))
            _, state = checkpoint.resume(tmp_path, into, pytest.fail)
            assert same_bits(into, sample(state["step"], floats)), "two checkpoints mixed"
            seen.append(state["step"])
    finally:
        kill_and_wait(pid)
    assert seen == sorted(seen), "a reader went back in time"
    assert len(set(seen)) > 3 and len(drain(pipe)) > 3
