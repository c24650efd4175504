"""The profiler's tables: one per view of FleetX's `Profiler.summary`.

overview  time per step, and how it divides      op      operators by their own time
device    how busy host and device were          mem     operators by the memory they took
model     phases of a step                       memcpy  copies and fills
dist      communication                          udf     ranges marked by the user's code
kernel    device kernels
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from fourfold.metrics.meter import PROFILER_PREFIX

VIEWS = ("overview", "device", "model", "dist", "kernel", "op", "mem", "memcpy", "udf")
DEFAULT_VIEWS = ("overview", "model", "kernel", "op")

MOST_ROWS = 20
STEP_MARK = "ProfilerStep"
COMMUNICATION = ("c10d::", "nccl", "gloo:", "record_param_comms", "_c10d_functional")
COPIES = ("memcpy", "memset", "aten::copy_", "aten::clone", "aten::fill_", "aten::zero_")

Row = FunctionEventAvg


def render_views(rows: Iterable[Row], views: Sequence[str], steps: int) -> list[str]:
    """The text of each chosen view, from the profiler's averages over `steps` steps."""
    rows = list(rows)
    draw: dict[str, Callable[[], str]] = {
        "overview": lambda: _overview(rows, steps),
        "device": lambda: _device(rows, steps),
        "model": lambda: _ranges("model: phases of a step", _marked(rows, phases=True), steps),
        "dist": lambda: _times("dist: communication", _named(rows, COMMUNICATION), steps),
        "kernel": lambda: _times("kernel: device kernels", _kernels(rows), steps),
        "op": lambda: _times("op: operators", _operators(rows), steps),
        "mem": lambda: _memory(_operators(rows), steps),
        "memcpy": lambda: _times("memcpy: copies and fills", _named(rows, COPIES), steps),
        "udf": lambda: _ranges("udf: ranges marked in code", _marked(rows, phases=False), steps),
    }
    return [draw[view]() for view in views]


def _name(row: Row) -> str:
    return row.key or ""


def _on_host(row: Row) -> bool:
    return row.device_type == DeviceType.CPU


def _operators(rows: list[Row]) -> list[Row]:
    return [row for row in rows if _on_host(row) and not row.is_user_annotation]


def _kernels(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not _on_host(row) and not row.is_user_annotation]


def _named(rows: list[Row], starts: Sequence[str]) -> list[Row]:
    real = [row for row in rows if not row.is_user_annotation]
    return [row for row in real if _name(row).lower().startswith(tuple(starts))]


def _marked(rows: list[Row], phases: bool) -> list[Row]:
    """Ranges marked in code: the phases the meter times, or all others."""
    marked = [row for row in rows if _on_host(row) and row.is_user_annotation]
    return [row for row in marked if _name(row).startswith(PROFILER_PREFIX) == phases]


def _wall_time(rows: list[Row]) -> float:
    steps = [row for row in rows if _on_host(row) and _name(row).startswith(STEP_MARK)]
    return sum(row.cpu_time_total for row in steps)


def _overview(rows: list[Row], steps: int) -> str:
    parts = {
        "wall time": _wall_time(rows),
        "operators on the host, all threads": _total(_operators(rows)),
        "kernels on the device, all streams": _total(_kernels(rows)),
        "of these, communication": _total(_named(rows, COMMUNICATION)),
        "of these, copies and fills": _total(_named(rows, COPIES)),
    }
    cells = [[name, f"{total / 1e3 / steps:.3f}"] for name, total in parts.items()]
    return _table(f"overview: {steps} steps", ["", "ms/step"], cells)


def _device(rows: list[Row], steps: int) -> str:
    cells = [
        [
            where,
            f"{sum(row.count for row in busy) / steps:.0f}",
            f"{_total(busy) / 1e3 / steps:.3f}",
            f"{_total(busy) / max(_wall_time(rows), 1e-9):.1%}",
        ]
        for where, busy in (("host", _operators(rows)), ("device", _kernels(rows)))
    ]
    return _table("device: busy time", ["", "calls/step", "ms/step", "of wall time"], cells)


def _total(rows: list[Row]) -> float:
    return sum(_own_time(row) for row in rows)


def _own_time(row: Row) -> float:
    return row.self_cpu_time_total if _on_host(row) else row.self_device_time_total


def _times(title: str, rows: list[Row], steps: int) -> str:
    """Rows by the time they took themselves, without what they called."""
    total = _total(rows)
    ranked = sorted(rows, key=_own_time, reverse=True)
    cells = [
        [
            _name(row),
            f"{row.count}",
            f"{_own_time(row) / 1e3 / steps:.3f}",
            f"{_own_time(row) / max(total, 1e-9):.1%}",
        ]
        for row in ranked
    ]
    return _table(title, ["name", "calls", "own ms/step", "share"], cells)


def _ranges(title: str, rows: list[Row], steps: int) -> str:
    """Rows by the whole time between their start and end."""
    ranked = sorted(rows, key=lambda row: row.cpu_time_total, reverse=True)
    cells = [
        [
            _name(row).removeprefix(PROFILER_PREFIX),
            f"{row.count}",
            f"{row.cpu_time_total / 1e3 / steps:.3f}",
        ]
        for row in ranked
    ]
    return _table(title, ["name", "calls", "ms/step"], cells)


def _memory(rows: list[Row], steps: int) -> str:
    """Operators by the memory they took and did not give back themselves."""
    held = [row for row in rows if row.self_cpu_memory_usage or row.self_device_memory_usage]
    ranked = sorted(
        held,
        key=lambda row: row.self_cpu_memory_usage + row.self_device_memory_usage,
        reverse=True,
    )
    cells = [
        [
            _name(row),
            f"{row.count}",
            f"{row.self_cpu_memory_usage / 2**20 / steps:.3f}",
            f"{row.self_device_memory_usage / 2**20 / steps:.3f}",
        ]
        for row in ranked
    ]
    return _table(
        "mem: operators by memory", ["name", "calls", "host MiB/step", "device MiB/step"], cells
    )


def _table(title: str, header: list[str], cells: list[list[str]]) -> str:
    """Plain text, the first column to the left and the numbers to the right."""
    if not cells:
        return f"{title}\n  none recorded\n"
    shown = [[row[0][:60], *row[1:]] for row in cells[:MOST_ROWS]]
    widths = [max(len(row[column]) for row in [header, *shown]) for column in range(len(header))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:])]
        )
        for row in [header, *shown]
    ]
    left_out = len(cells) - len(shown)
    if left_out:
        lines.append(f"and {left_out} more")
    return "\n".join([title, *(f"  {line}" for line in lines), ""])
