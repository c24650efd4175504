"""How many processors a process may use."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold import processors
from fourfold.processors import cgroup_processors, num_processors


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/elsewhere", {"cpu.max": "200000 100000"}, 2.0),
        (
            "4:cpu,cpuacct:/job\n3:cpuset:/\n0::/",
            {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "?", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_processors_of_a_container(
    tmp_path: Path, groups: str, files: dict[str, str], expected: float
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert cgroup_processors(tmp_path) == expected
    assert cgroup_processors(tmp_path / "absent") == math.inf


def test_processors_are_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, expected in ((0.3, 1), (1.2, 2), (math.inf, None)):
        monkeypatch.setattr("fourfold.processors.cgroup_processors", lambda quota=quota: quota)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
        assert num_processors() == (expected or 7)


def test_low_precision_products_run_wherever_they_are_announced() -> None:
    """In a process that has not computed yet, as a command is."""
    code = (
        "import torch; from fourfold.device import spare_missing_matrix_units as spare; "
        "spare(); ones = torch.ones(64, 64, dtype=torch.bfloat16); assert (ones @ ones).sum() > 0"
    )
    clean = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    subprocess.run([sys.executable, "-c", code], env=clean, check=True)


def test_ranks_share_the_processors_and_those_that_take_turns_get_twice_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "num_processors", lambda: 8)
    assert [processors.threads_of_rank(ranks) for ranks in (1, 3, 8, 16)] == [8, 2, 1, 1]
    turns = [processors.threads_of_rank(ranks, take_turns=True) for ranks in (1, 3, 8, 16)]
    assert turns == [8, 4, 2, 2]
