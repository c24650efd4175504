"""The processors (CPU cores) of this machine: their name, and how many this process may use.

A container often sees all cores of its machine and may use few of them, so the affinity mask and
the CPU quota of its control group (cgroup, version 1 or 2) both count.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path


def processor_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "a CPU"


def num_processors() -> int:
    """Processors this process may use, by its affinity mask and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, cgroup_processors())))


def threads_of_rank(ranks: int, *, take_turns: bool = False) -> int:
    """Threads for each of the ranks of this machine: its share of the processors.

    Ranks that `take_turns`, as the stages of a pipeline wait for each other, get twice that: what
    one leaves idle another uses.
    """
    processors = num_processors()
    share = max(1, processors // ranks)
    return min(processors, 2 * share) if take_turns else share


def cgroup_processors(root: Path = Path("/")) -> float:
    """The container's CPU quota in processors; infinite without a limit.

    The limits of the enclosing groups count as well. A container may see its own group as the root
    of the hierarchy, so a group whose path does not exist is looked up at the root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    limits = [math.inf]
    for line in lines:
        _, kinds, group = line.split(":", 2)
        mounted = root / "sys/fs/cgroup"
        if kinds:
            if "cpu" not in kinds.split(","):
                continue
            mounted /= "cpu"  # version 1; in version 2 all kinds are one
        inside = Path(group.lstrip("/"))
        limits += [_quota(mounted / each) for each in [inside, *inside.parents]]
    return min(limits)


def _quota(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf  # "max", or not limited by time
