"""Other programs on what Fourfold writes: Megatron Core, Paddle, lm_eval.

They live in an environment of their own, `.venv-peers` (`make setup-peers`), because what they
depend on is no part of Fourfold. A test hands a snippet of Python to that interpreter:

    @needs_peers
    def test_paddle_reads_it(tmp_path):
        names = in_peers("import paddle; answer = sorted(paddle.load(given['file']))", file=...)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
        program = [PYTHON, "-c", _FRAME.format(code=code), json.dumps(given, default=str), result]
        running = subprocess.Popen(
            program,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that what it started ends with it
        )
        try:
            output, _ = running.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        assert running.returncode == 0, output[-6000:]
        return json.loads(result.read_text())
