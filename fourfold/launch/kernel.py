"""What only the Linux kernel can promise: no process outlives the one that answers for it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have this process killed when the thread that started it ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the request was made


def adopt_orphans(adopt: bool) -> None:
    """Whether descendants whose parent ends become our children, which we can then reap."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does; "?" where it does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
