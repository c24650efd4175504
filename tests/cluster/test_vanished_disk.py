"""An output directory that goes away in the middle of a run: a sentence, and no traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.machines import Machines
from cluster.training import settings

needs_ext4 = pytest.mark.skipif(
    shutil.which("mkfs.ext4") is None, reason="not installed: e2fsprogs"
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Machines]:
    """Its mounts are its own, and vanish with it."""
    with Machines(1, tmp_path) as machines:
        yield machines


@needs_ext4
@pytest.mark.parametrize("words", [[], ["--nproc", "2"]], ids=["single", "supervised"])
def test_a_disk_that_becomes_read_only(words: list[str], alone: Machines, tmp_path: Path) -> None:
    """As Linux makes it after an error of the device: `remount,abort` does the same."""
    image, disk = tmp_path / "disk.img", tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["truncate", "-s", "64M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    alone.check(0, ["mount", "-o", "loop", image, disk])
    described = settings(tmp_path)
    described["Engine"]["save_load"] |= {  # type: ignore[index]
        "output_dir": str(disk / "run"),
        "max_failed_saves": 1,
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(described))
    command = alone.start(0, [sys.executable, "-m", "fourfold", "train", "-c", file, *words])
    command.until("global step 12,")
    alone.check(0, ["mount", "-o", "remount,abort", disk])
    assert command.wait() == 2, command.output()[-3000:]
    said = command.output()
    assert "Traceback" not in said, said[-3000:]
    assert "read-only" in said.splitlines()[-1], said[-3000:]
    assert "the last good checkpoint is" in said.splitlines()[-1]
    alone.check(0, ["umount", disk])
