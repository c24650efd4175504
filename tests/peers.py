"""Other programs on what Fourfold writes: Megatron Core, Paddle, lm_eval.

They live in an environment of their own, `.venv-peers` (`make setup-peers`), because what they
depend on is no part of Fourfold. A test hands a snippet of Python to that interpreter:

    @needs_peers
    def test_paddle_reads_it(tmp_path):
        names = in_peers("import paddle; answer = sorted(paddle.load(given['file']))", file=...)
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"

Test = TypeVar("Test", bound=Callable[..., Any])

_FRAME = """
import json, sys
given = json.loads(sys.argv[1])
{code}
with open(sys.argv[2], "w") as file:
    json.dump(answer, file)
"""


def needs_peers(test: Test) -> Test:
    """Mark a test that calls `in_peers`: slow, and skipped where the environment is missing."""
    missing = not (PYTHON.parent.parent / ".ready").exists()
    for mark in (
        pytest.mark.slow,
        pytest.mark.peers,
        pytest.mark.skipif(missing, reason="needs the other programs; run `make setup-peers`"),
    ):
        test = mark(test)
    return test


def in_peers(code: str, seconds: float = 300.0, **given: Any) -> Any:
    """What `code` left in `answer`, having found `given` as a dictionary; both go as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer.json"
        done = subprocess.run(
            [PYTHON, "-c", _FRAME.format(code=code), json.dumps(given, default=str), result],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(result.read_text())
