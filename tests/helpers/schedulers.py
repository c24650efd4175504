"""Programs of schedulers that read what we write or call us: kubernetes-validate, Kubeflow's
models, SkyPilot, Ray. They live in `.venv-schedulers` (`make setup-schedulers`), as those of
tests/helpers/peers.py in theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-schedulers" / "bin" / "python"

Test = TypeVar("Test", bound=Callable[..., Any])


def needs_schedulers(test: Test) -> Test:
    """Mark a test that calls `in_schedulers`: slow, and skipped where it cannot."""
    missing = not (PYTHON.parent.parent / ".ready").exists()
    reason = "needs the schedulers' programs; run `make setup-schedulers`"
    for mark in (pytest.mark.slow, pytest.mark.peers, pytest.mark.skipif(missing, reason=reason)):
        test = mark(test)
    return test


def in_schedulers(
    words: list[str | Path], cwd: Path, seconds: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run that Python with `words`, without a network and with a home of its own."""
    program = [str(PYTHON), *map(str, words)]
    if shutil.which("unshare") and os.geteuid() == 0:
        apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        program = [*apart, "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *program]
    own = {"HOME": str(cwd), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return subprocess.run(
        program,
        cwd=cwd,
        env={**os.environ, **own, **quiet},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
