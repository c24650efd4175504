"""Killed at any moment, the same call goes on, and the result is that of an undisturbed run.

Also the memory all processes take together, for an input of two gigabytes.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.tokenizer import train

PREPARE = """
import sys
from fourfold.tools.prepare.manifest import PrepareSettings
from fourfold.tools.prepare.pipeline import prepare_files
from fourfold.tools.prepare.input_files import find_inputs

if __name__ == "__main__":
    tokenizer, prefix, workers, chunk_bytes, *inputs = sys.argv[1:]
    settings = PrepareSettings(
        tokenizer=tokenizer, workers=int(workers), chunk_bytes=int(chunk_bytes) or None
    )
    prepare_files(find_inputs(inputs), prefix, settings)
    assert "torch" not in sys.modules
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "prepare_it.py"
    path.write_text(PREPARE)
    return path


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    return train(["the cat sat on the mat, the rat sat on the cat. " * 3], 270).save(tmp_path)


def write_inputs(directory: Path, megabytes: float) -> list[Path]:
    line = json.dumps({"text": "the cat sat on the mat, été\n" * 40}).encode() + b"\n"
    lines = line * int(megabytes * 1e6 / len(line))
    (directory / "a.jsonl").write_bytes(lines + b"bad\n")
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(lines + b"{}\n", 1))
    return [directory / "a.jsonl", directory / "b.jsonl.gz"]


def write_archive(directory: Path, megabytes: float) -> list[Path]:
    """One file, large enough to be cut: one process decompresses it for both workers."""
    chance = random.Random(0)
    texts = [f"the cat {chance.getrandbits(200):x}\n" * 8 for _ in range(int(megabytes * 2000))]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    (directory / "c.jsonl.gz").write_bytes(gzip.compress(lines + b"bad\n", 1))
    return [directory / "c.jsonl.gz"]


def files_of(prefix: Path) -> dict[str, bytes]:
    found = [
        prefix.with_name(f"{prefix.name}_text_document.{end}") for end in ("bin", "idx", "json")
    ]
    return {
        file.name.removeprefix(prefix.name): file.read_bytes() for file in found if file.exists()
    }


def killed_and_resumed(
    tmp_path: Path,
    script: Path,
    tokenizer_file: Path,
    megabytes: float,
    kills: int,
    write: Callable[[Path, float], list[Path]] = write_inputs,
) -> None:
    inputs = list(map(str, write(tmp_path, megabytes)))

    def command(name: str) -> list[str]:
        place = [str(tokenizer_file), str(tmp_path / name), "2", "20000"]
        return [sys.executable, str(script), *place, *inputs]

    begin = time.monotonic()
    subprocess.run(command("whole"), check=True)
    undisturbed = time.monotonic() - begin
    expected = files_of(tmp_path / "whole")
    assert sorted(expected) == [f"_text_document.{ending}" for ending in ("bin", "idx", "json")]
    work = tmp_path / "killed_text_document.parts"
    chance = random.Random(megabytes)
    struck = finished_before = 0
    while struck < kills:
        process = subprocess.Popen(command("killed"))
        try:
            process.wait(chance.uniform(0.3, 1.0) * undisturbed)
            undisturbed *= 0.8  # the machine is faster now: strike earlier
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            struck += 1
        process.wait()
        final = files_of(tmp_path / "killed")
        assert all(expected[name] == content for name, content in final.items())
        if "_text_document.json" in final:  # whole before we struck: once more from the start
            assert final == expected
            for name in final:
                (tmp_path / f"killed{name}").unlink()
            finished_before = 0
        else:
            finished = len(list(work.glob("*/part-*.json"))) if work.exists() else 0
            assert finished >= finished_before, "finished work was lost"
            finished_before = finished
    subprocess.run(command("killed"), check=True)
    assert files_of(tmp_path / "killed") == expected
    assert not work.exists()


def test_killed_and_resumed(tmp_path: Path, script: Path, tokenizer_file: Path) -> None:
    killed_and_resumed(tmp_path, script, tokenizer_file, megabytes=0.3, kills=4)


def test_killed_and_resumed_with_one_large_archive(
    tmp_path: Path, script: Path, tokenizer_file: Path
) -> None:
    killed_and_resumed(tmp_path, script, tokenizer_file, megabytes=1, kills=3, write=write_archive)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: Path, script: Path, tokenizer_file: Path) -> None:
    killed_and_resumed(tmp_path, script, tokenizer_file, megabytes=4, kills=20)


def test_workers_do_not_outlive_their_parent(
    tmp_path: Path, script: Path, tokenizer_file: Path
) -> None:
    (path, *_) = write_inputs(tmp_path, 3)
    place = [str(tokenizer_file), str(tmp_path / "out"), "2", "20000"]
    parent = subprocess.Popen([sys.executable, str(script), *place, str(path)])
    children: list[int] = []
    while len(children) < 2 and parent.poll() is None:
        children = [child for child in children_of(parent.pid) if "spawn_main" in command_of(child)]
        time.sleep(0.02)
    assert len(children) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any("spawn_main" in command_of(c) for c in children):
        time.sleep(0.1)
    assert not any("spawn_main" in command_of(child) for child in children)


def children_of(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def peak_megabytes(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) / 1e3 if lines else 0.0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_for_two_gigabytes(tmp_path: Path, script: Path, tokenizer_file: Path) -> None:
    """Half the bound of the documentation: these documents are small."""
    line = json.dumps({"text": "the cat sat on the mat, été\n" * 400}).encode() + b"\n"
    with (tmp_path / "in.jsonl").open("wb") as file:
        for _ in range(200):
            file.write(line * int(1e7 / len(line)))
    place = [str(tokenizer_file), str(tmp_path / "out"), "2", "0", str(tmp_path / "in.jsonl")]
    process = subprocess.Popen([sys.executable, str(script), *place])
    peaks: dict[int, float] = {}
    while process.poll() is None:
        for pid in [process.pid, *children_of(process.pid)]:
            peaks[pid] = max(peaks.get(pid, 0.0), peak_megabytes(pid))
        time.sleep(0.2)
    assert process.returncode == 0
    print(sorted(round(peak) for peak in peaks.values()))
    assert max(peaks.values()) < 500
