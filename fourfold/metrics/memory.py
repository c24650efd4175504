"""How much memory this process and its accelerator use, now and at the peak, in bytes.

Where the system does not tell a number, the answer is None, never a guess.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

PROC_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class HostMemory:
    rss_bytes: int | None
    peak_rss_bytes: int | None


@dataclass(frozen=True)
class DeviceMemory:
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def host_memory() -> HostMemory:
    """Resident memory of this process. The peak counts from the start of the process."""
    fields = _proc_status()
    peak = fields.get("VmHWM")
    return HostMemory(fields.get("VmRSS"), peak if peak is not None else _peak_from_rusage())


def device_memory() -> DeviceMemory | None:
    """Memory torch holds on the current CUDA (or ROCm) device; None when none is in use."""
    if not torch.cuda.is_initialized():
        return None
    return DeviceMemory(
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )


def _proc_status() -> dict[str, int]:
    """The kB lines of /proc/self/status in bytes; empty where there is no such file."""
    try:
        lines = PROC_STATUS.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {
        word[0].rstrip(":"): int(word[1]) * 1024
        for word in words
        if len(word) == 3 and word[2] == "kB"
    }


def _peak_from_rusage() -> int | None:
    # A peak inherited from the parent at fork is included here, which is why /proc comes first.
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return peak * unit
