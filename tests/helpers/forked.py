"""`fourfold WORDS`, started at once: forked from the warm test process, which has torch loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold import cli

SECONDS = 300


def fourfold(
    *words: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, its output and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _run([str(word) for word in words], cwd, environment or {}, output, errors)
        _, status = os.waitpid(child, 0)
        return subprocess.CompletedProcess(
            words,
            os.waitstatus_to_exitcode(status),
            output.read_text(errors="replace"),
            errors.read_text(errors="replace"),
        )


def _run(
    words: list[str], cwd: Path | None, environment: Mapping[str, str], output: Path, errors: Path
) -> None:
    code: Any = 1
    try:
        signal.alarm(SECONDS)
        if cwd is not None:
            os.chdir(cwd)
        os.environ.update(environment)
        _redirect(output, errors)
        cli.main(words)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(output: Path, errors: Path) -> None:
    """Standard input is empty; the rest goes to files, past whatever captures it here."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for file, number in ((output, 1), (errors, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
