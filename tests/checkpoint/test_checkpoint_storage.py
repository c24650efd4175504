"""Checkpoints on real broken storage: full, without inodes, read-only, gone.

Disks are made by mounting, which needs the right to; where it is missing these tests are skipped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoint_ranks import save_rows
from helpers.checkpoint_samples import blank, same_bits, sample, state_of

from fourfold import checkpoint
from fourfold.checkpoint import directory, streams
from fourfold.errors import CheckpointError

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount("size=2m")`: a new file system in memory, gone after the test."""
    places: list[Path] = []

    def make(options: str) -> Path:
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mounting is not permitted here: {error}")
        places.append(place)
        return place

    yield make
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=False)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_fills_up_while_it_is_written_to(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    disk = mount("size=4m")
    save_rows(disk, 1, sample(1), state_of(1), size)
    monkeypatch.setattr(checkpoint.writing, "free_bytes", lambda place: 1 << 40)
    large = sample(2, floats=1 << 20)
    results = save_rows(disk, 2, large, state_of(2), size)
    assert isinstance(results[0], CheckpointError)
    assert "[Errno 28] No space left on device" in str(results[0])
    assert "; make room (" in str(results[0])
    assert {path.name for path in disk.iterdir()} == {"step_1", "latest"}
    remount(disk, "size=40m")
    save_rows(disk, 2, large, state_of(2), size)
    into = blank(large)
    assert checkpoint.resume(disk, into, pytest.fail)[1] == state_of(2)
    assert same_bits(into, large)


def test_a_disk_without_inodes_is_told_by_every_rank_at_once(mount: Mount) -> None:
    disk = mount("size=40m,nr_inodes=8")
    for number in range(7):
        (disk / f"file{number}").touch()
    results = save_rows(disk, 2, sample(2), state_of(2), size=3, timeout_seconds=3600.0)
    assert len({str(result) for result in results}) == 1
    assert "[Errno 28] No space left on device" in str(results[1])


@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_is_read_only(mount: Mount, size: int) -> None:
    disk = mount("size=40m")
    save_rows(disk, 1, sample(1), state_of(1), size)
    remount(disk, "ro")
    for result in save_rows(disk, 2, sample(2), state_of(2), size):
        assert isinstance(result, CheckpointError)
        assert "[Errno 30] Read-only file system" in str(result)
        assert "remount it read-write" in str(result) and "make room" not in str(result)
    into = blank(sample(1))
    assert checkpoint.resume(disk, into, pytest.fail)[1] == state_of(1)
    remount(disk, "rw")
    save_rows(disk, 2, sample(2), state_of(2), size)
    assert checkpoint.resume(disk, into, pytest.fail)[1] == state_of(2)


def test_merging_onto_a_read_only_or_full_disk_tells_the_real_reason(
    mount: Mount, tmp_path: Path
) -> None:
    save_rows(tmp_path / "run", 2, sample(2, floats=1 << 20), state_of(2), size=2)
    disk = mount("size=2m")
    with pytest.raises(CheckpointError, match=r"GB \(\d+ bytes\) free and .* are needed"):
        checkpoint.merge(tmp_path / "run" / "step_2", disk / "whole")
    remount(disk, "ro")
    with pytest.raises(CheckpointError, match=r"cannot merge .*Read-only file system.*; the file"):
        checkpoint.merge(tmp_path / "run" / "step_2", disk / "whole")
    with pytest.raises(CheckpointError, match=r"cannot merge .*Read-only file system"):
        checkpoint.merge(tmp_path / "run" / "step_2", disk / "new" / "whole")
    assert list(disk.iterdir()) == []


def test_a_disk_that_fills_up_during_a_merge(
    mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_rows(tmp_path / "run", 2, sample(2, floats=1 << 20), state_of(2), size=2)
    disk = mount("size=3m")
    monkeypatch.setattr(checkpoint.reading, "free_bytes", lambda place: 1 << 40)
    with pytest.raises(CheckpointError, match=r"cannot merge .*No space left on device; make room"):
        checkpoint.merge(tmp_path / "run" / "step_2", disk / "whole")
    assert list(disk.iterdir()) == []


# --- without a mount --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EIO, "the disk or the file server has failed"),
        (errno.ENOTCONN, "the disk or the file server has failed"),
        (errno.ESTALE, "the disk or the file server has failed"),
        (errno.EDQUOT, "make room"),
        (errno.EACCES, "allow the user of this process to write there"),
    ],
)
def test_each_error_comes_with_advice_that_fits_even_if_nothing_answers_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    """A file system that vanishes fails every call, also those that ask it how it is."""

    def gone(*given: object, **named: object) -> object:
        raise OSError(number, os.strerror(number))

    for name in ("mkdir", "listdir", "scandir", "statvfs", "rename", "unlink", "lstat"):
        monkeypatch.setattr(os, name, gone)
    with pytest.raises(CheckpointError, match=f"step_2: .*{os.strerror(number)}.*{advice}"):
        checkpoint.save(tmp_path / "run", 2, sample(2), state_of(2))


@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_at: str
) -> None:
    straight = checkpoint.save(tmp_path / "straight", 2, sample(2, floats=5000), state_of(2))
    real_open, real_write = os.open, os.pwrite

    def opens(path: Any, flags: int, *mode: int, **named: Any) -> int:
        if refused_at == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *mode, **named)

    def writes(descriptor: int, data: Any, start: int) -> int:
        if refused_at == "write" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(descriptor, data, start)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "pwrite", writes)
    step = checkpoint.save(tmp_path / "other", 2, sample(2, floats=5000), state_of(2))
    for path in straight.glob("*.safetensors"):
        assert path.read_bytes() == (step / path.name).read_bytes()
    assert checkpoint.verify(step) == []


def test_a_writer_beats_as_long_as_it_writes_and_not_when_it_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CHUNK_BYTES", streams.BLOCK_BYTES)
    monkeypatch.setattr(streams, "BEAT_SECONDS", 0.001)
    real = os.fsync
    stuck_beats: list[tuple[int, int]] = []  # before and after each time

    def stuck(descriptor: int) -> None:
        before = len(beats)
        time.sleep(0.2)
        if threading.current_thread() is not threading.main_thread():
            stuck_beats.append((before, len(beats)))
        real(descriptor)

    beats: list[None] = []
    ranks = checkpoint.RankGroup(beat=lambda: beats.append(None))
    monkeypatch.setattr(os, "fsync", stuck)
    step = checkpoint.save(tmp_path, 2, sample(2, floats=1 << 16), state_of(2), ranks=ranks)
    monkeypatch.undo()
    # While the last of its threads is stuck, the others are or have ended.
    before, after = max(stuck_beats)
    assert beats and after <= before + 2, "a rank stuck in a system call seems to live"
    beats.clear()
    checkpoint.load(step, blank(sample(2, floats=1 << 16)), ranks=ranks)
    assert beats


def test_leftovers_that_cannot_be_removed_do_not_hide_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left").mkdir()

    def read_only(*given: object, **named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "unlink", read_only)
    monkeypatch.setattr(os, "rmdir", read_only)
    directory.remove(tmp_path / "left")
    directory.remove(tmp_path / "nothing")
    monkeypatch.undo()
    assert (tmp_path / "left").exists()
