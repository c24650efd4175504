"""Conversion and the disk: too little room, files pushed to it before they get their name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.foreign_files import assert_same, megatron_tree, weights
from helpers.ranks import on_ranks

from fourfold.convert import Kind, convert, load_foreign
from fourfold.errors import CheckpointError

KINDS: list[Kind] = ["fourfold", "hf", "fleetx", "megatron"]
ROWS = 7000  # of 32 numbers: 0.9 MB, most of the model
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB: not quite room for the model, but for its largest tensor."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(params=["fourfold", "hf"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    megatron_tree(tmp_path / "first", weights(vocabulary=ROWS))
    convert(tmp_path / "first", tmp_path / "source", request.param)
    return tmp_path / "source"


def refusal(source: Path, disk: Path, to: Kind, free: int | None = None) -> str:
    """What a conversion onto the disk says, in a process of its own: it must not take ours along.
    With `free` the disk claims so much room until it is written to."""

    def work(rank: int) -> str:
        if free is not None:
            shutil.disk_usage = lambda path: Usage(free, 0, free)  # type: ignore[assignment]
        with pytest.raises(CheckpointError) as refused:
            convert(source, disk / "out", to)
        return str(refused.value)

    return on_ranks(1, work)[0]


@pytest.mark.parametrize("to", KINDS)
def test_too_little_room_is_told_before_anything_is_written(
    source: Path, small_disk: Path, to: Kind
) -> None:
    said = refusal(source, small_disk, to)
    assert f"{small_disk} has 0.001 GB free, and the conversion needs up to" in said
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("to", KINDS)
def test_a_disk_that_fills_up_is_an_error_that_leaves_nothing(
    source: Path, small_disk: Path, to: Kind
) -> None:
    said = refusal(source, small_disk, to, free=1 << 40)
    assert f"cannot write {small_disk / 'out'}" in said or "cannot save checkpoint" in said
    assert "No space left on device" in said
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("to", KINDS)
def test_everything_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, to: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron_tree(tmp_path / "source", weights())
    pushed: list[Path] = []
    named: dict[Path, list[Path]] = {}
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        pushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def watched_rename(path: Path, target: Path) -> Path:
        named[Path(target)] = [p.relative_to(path) for p in pushed if p.is_relative_to(path)]
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    out = tmp_path / "out"
    convert(tmp_path / "source", out, to)
    assert pushed[-1] == tmp_path  # the name itself
    monkeypatch.undo()
    expected = {Path("."), *(path.relative_to(out) for path in out.rglob("*"))}
    assert expected - set(named[out]) == set()


def test_weights_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of a Fourfold checkpoint is written before the first tensor is used."""
    megatron_tree(tmp_path / "first", weights())
    convert(tmp_path / "first", tmp_path / "source", "fourfold")

    def no_scratch(*_: object, **__: object) -> None:
        raise AssertionError("a scratch file was made")

    monkeypatch.setattr(torch, "from_file", no_scratch)
    convert(tmp_path / "source", tmp_path / "out", "hf")
    with load_foreign(tmp_path / "source") as model:
        assert_same(model, weights())


def test_checkpoint_that_goes_away_while_it_is_read(tmp_path: Path) -> None:
    megatron_tree(tmp_path / "first", weights())
    convert(tmp_path / "first", tmp_path / "source", "fourfold")
    with load_foreign(tmp_path / "source") as model:
        shutil.rmtree(tmp_path / "source" / "step_0")
        with pytest.raises(CheckpointError, match="was replaced or removed while it was read"):
            dict(model.tensors())
