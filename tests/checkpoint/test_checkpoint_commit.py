"""The commit protocol: what a reader can meet, what stays, what goes."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest
from helpers.checkpoint_samples import blank, content, in_child, same_bits, sample, state_of

from fourfold import checkpoint
from fourfold.checkpoint import directory, reading, rendezvous, writing
from fourfold.errors import CheckpointError


def save(output_dir: Path, *steps: int, keep_last: int = 0) -> None:
    for step in steps:
        checkpoint.save(output_dir, step, sample(step), state_of(step), keep_last)


def names(output_dir: Path) -> set[str]:
    return {path.name for path in output_dir.iterdir()}


def order(where: Path) -> list[str]:
    return [path.name for path in checkpoint.candidates(where)]


def resumed(where: Path) -> int:
    into = blank(sample(0))
    directory, state = checkpoint.resume(where, into, lambda notice: None)
    assert same_bits(into, sample(state["step"])) and directory.name == f"step_{state['step']}"
    return state["step"]


# --- which checkpoint -------------------------------------------------------------------------


def test_where_may_be_the_output_directory_a_step_or_latest(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, 100)
    assert order(tmp_path) == ["step_100", "step_10", "step_9"]
    assert order(tmp_path / "latest") == order(tmp_path)
    assert order(tmp_path / "step_10") == ["step_10", "step_9"]
    assert (resumed(tmp_path), resumed(tmp_path / "step_10"), resumed(tmp_path / "latest")) == (
        100, 10, 100,
    )  # fmt: skip
    assert (tmp_path / "latest").read_text() == "step_100\n"


@pytest.mark.parametrize("text", [None, "step_1\n", "step_77", "", "../../etc", "\0" * 5000])
def test_latest_missing_stale_or_garbage(tmp_path: Path, text: str | None) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "latest").unlink()
    if text is not None:
        (tmp_path / "latest").write_text(text)
    assert resumed(tmp_path) == resumed(tmp_path / "latest") == 2
    save(tmp_path, 3)
    assert (tmp_path / "latest").read_text() == "step_3\n"


def test_latest_may_be_a_link(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_1")
    assert resumed(tmp_path / "latest") == 1


def test_nothing_there(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    for where in (
        tmp_path,
        tmp_path / "latest",
        tmp_path / "no" / "where",
        tmp_path / "run/step_5",
    ):
        assert order(where) == []
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            checkpoint.resume(where, blank(sample(1)), pytest.fail)


def test_other_things_in_the_output_directory_are_left_alone(tmp_path: Path) -> None:
    others = ["step_x", "step_-1", "step_01", "step_5.bak", ".step_5", "metrics.jsonl"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step_50").write_text("a file")
    save(tmp_path, 1, 2, keep_last=1)
    assert names(tmp_path) == {*others, "step_50", "step_2", "latest"}
    assert order(tmp_path) == ["step_2"]


def test_a_run_that_went_back_resumes_where_it_last_saved(tmp_path: Path) -> None:
    save(tmp_path, 100, 200, 300)
    save(tmp_path, 150)  # resumed from step_100
    assert order(tmp_path) == ["step_150", "step_100", "step_300", "step_200"]
    assert order(tmp_path / "step_150") == ["step_150", "step_100"]
    save(tmp_path, 160, keep_last=3)
    assert names(tmp_path) == {"step_160", "step_150", "step_300", "latest"}
    save(tmp_path, 170, keep_last=2)
    assert names(tmp_path) == {"step_170", "step_160", "latest"}


def test_a_look_that_missed_everything_is_taken_again(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1)
    answers = [[], checkpoint.candidates(tmp_path)]
    monkeypatch.setattr(reading, "candidates", lambda where: answers.pop(0))
    assert resumed(tmp_path) == 1


# --- retention --------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep_last", "expected"), [(0, 6), (1, 1), (3, 3), (10, 6)])
def test_keep_last(tmp_path: Path, keep_last: int, expected: int) -> None:
    for step in range(6):
        save(tmp_path, step, keep_last=keep_last)
    assert order(tmp_path) == [f"step_{step}" for step in range(5, 5 - expected, -1)]
    assert len(names(tmp_path)) == expected + 1


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step_3" / "manifest.json").write_text("{")
    save(tmp_path, 4, keep_last=2)
    assert {"step_4", "step_2"} <= names(tmp_path)
    assert "step_1" not in names(tmp_path)


def test_saving_goes_on_over_a_checkpoint_found_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step_2" / "manifest.json").unlink()
    assert resumed(tmp_path) == 1
    save(tmp_path, 2)
    assert resumed(tmp_path) == 2
    assert names(tmp_path) == {"step_1", "step_2", "latest"}


# --- replacing and cleaning -------------------------------------------------------------------


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint.save(tmp_path, 1, sample(11), state_of(11))
    into = blank(sample(11))
    assert checkpoint.load(tmp_path / "step_1", into) == state_of(11)
    assert same_bits(into, sample(11))
    assert names(tmp_path) == {"step_1", "latest"}


def test_a_replacement_cut_short_is_found_and_mended(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step_2").rename(tmp_path / "step_2.old")
    for where in (tmp_path, tmp_path / "step_2"):
        into = blank(sample(2))
        assert checkpoint.resume(where, into, pytest.fail)[1] == state_of(2)
        assert same_bits(into, sample(2))
    save(tmp_path, 3)
    assert names(tmp_path) == {"step_1", "step_2", "step_3", "latest"}
    assert resumed(tmp_path / "step_2") == 2


def test_leftovers_of_dead_writers_are_cleaned_and_of_living_ones_kept(tmp_path: Path) -> None:
    def leftover(step: int, purpose: str = "tmp") -> str:
        path = directory.private_name(tmp_path, f"step_{step}", purpose)
        path.mkdir()
        (path / "manifest.json").write_text("{}")
        return path.name

    def as_another_process() -> None:
        leftover(7)
        leftover(3, "trash")
        (tmp_path / directory.private_name(tmp_path, "latest", "tmp")).write_text("step_6")

    assert in_child(as_another_process) == 0
    leftover(8)  # of a save of our own that failed
    own = directory.private_name(tmp_path, "step_9", "tmp").name
    # A process with an id that lives again, and one that lives.
    host, pid, start = own.split("-")[1].split(".")
    again = own.replace(f".{start}-", f".{int(start, 16) - 1:x}-")
    parent = own.replace(f".{pid}.", f".{os.getppid():x}.")
    parent = parent.replace(f".{start}-", f".{directory._start_of(os.getppid())}-")
    # Writers of other machines: one at work, one that has changed nothing for two hours.
    away, dead = own.replace(host, "0" * 12), own.replace(host, "1" * 12)
    for name in (again, parent, away, dead):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    for path in (tmp_path / dead / "model.safetensors", tmp_path / dead):
        os.utime(path, (time.time() - 7200,) * 2)
    save(tmp_path, 1)
    assert names(tmp_path) == {"step_1", "latest", parent, away}


# --- failing saves ----------------------------------------------------------------------------


def test_too_little_space_is_noticed_before_writing(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1)
    before = content(tmp_path / "step_1")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 1000))
    monkeypatch.setattr(writing, "write_shards", pytest.fail)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2)
    message = str(caught.value)
    assert f"{tmp_path / 'step_2'}: the disk is too full" in message
    assert "bytes) and" in message and "has 0.000 GB (1000 bytes) free" in message
    assert names(tmp_path) == {"step_1", "latest"} and content(tmp_path / "step_1") == before


def test_a_write_that_fails_half_way_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def save_with_a_file_size_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(CheckpointError, match=r"cannot save checkpoint .*step_2: .*too large"):
            checkpoint.save(tmp_path, 2, sample(2, floats=1 << 16), state_of(2), keep_last=1)

    assert in_child(save_with_a_file_size_limit) == 0
    assert names(tmp_path) == {"step_1", "latest"}
    assert resumed(tmp_path) == 1


@pytest.mark.parametrize("broken", ["write_shards", "sync_directory", "commit"])
def test_an_input_output_error_or_an_interrupt_loses_nothing(
    tmp_path: Path, monkeypatch, broken: str
) -> None:
    save(tmp_path, 1, 2)
    for raised, expected in ((OSError(5, "I/O"), CheckpointError), (KeyboardInterrupt(),) * 2):

        def fail(*arguments: object, error: BaseException = raised) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(rendezvous if broken == "commit" else writing, broken, fail)
            with pytest.raises(expected if isinstance(expected, type) else type(expected)):
                save(tmp_path, 2)
        assert names(tmp_path) == {"step_1", "step_2", "latest"}
        assert resumed(tmp_path) == 2


def test_a_replacement_that_fails_leaves_the_first(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1, 2)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(5, "I/O")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="I/O"):
        save(tmp_path, 2)
    assert names(tmp_path) == {"step_1", "step_2", "latest"}
    assert resumed(tmp_path) == 2


def test_an_output_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save checkpoint .*file/run/step_1"):
        save(tmp_path / "file" / "run", 1)


def test_trouble_after_the_commit_does_not_fail_the_save(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(writing, "retire", fail)
    save(tmp_path, 1)
    assert resumed(tmp_path) == 1
    assert "step_1 is saved, but tidying up after it failed" in caplog.text
