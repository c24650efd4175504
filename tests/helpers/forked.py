"""`fourfold WORDS`, started at once: forked from the warm test process, which has torch loaded."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
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


def fourfold_in_a_terminal(columns: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in a terminal of so many columns: all that it was sent."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.environ["TERM"] = "xterm-256color"
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            os.environ.pop(name, None)
        terminal = Path(os.ttyname(theirs))
        _run([str(word) for word in words], None, {}, terminal, terminal)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that nobody has the other end
            break
        if not part:
            break
        seen += part
    os.close(ours)
    _, status = os.waitpid(child, 0)
    text = seen.decode(errors="replace")
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), text, "")


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
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", closefd=False, encoding="utf-8")
