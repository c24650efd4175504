"""Counting what a rank sends: collectives by axis and kind, as they are issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.mesh import AXES, Mesh

KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "broadcast_": "broadcast",
}
SENT = "send"

Kind = tuple[str, str]  # axis, what is done


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of each kind. A collective's bytes are those of its whole tensor."""

    calls: Counter[Kind] = field(default_factory=Counter)
    bytes_: Counter[Kind] = field(default_factory=Counter)

    def add(self, axis: str, kind: str, bytes_: int, calls: int = 1) -> None:
        self.calls[axis, kind] += calls
        self.bytes_[axis, kind] += bytes_

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        total = Traffic(Counter(self.calls), Counter(self.bytes_))
        for kind in other.calls:
            total.add(*kind, times * other.bytes_[kind], times * other.calls[kind])
            if not total.calls[kind]:
                del total.calls[kind], total.bytes_[kind]
        return total


class Counting(TorchDispatchMode):
    """Every call of torch.distributed while this is active goes to `traffic`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.traffic = Traffic()
        # What is agreed on by all ranks is not counted here, so a group that has all is an axis's.
        self.axes = {
            group.group_name: axis for axis in AXES if (group := mesh.group(axis)) is not None
        }
        if mesh.ends_group is not None:
            self.axes[mesh.ends_group.group_name] = "pp ends"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name in KINDS:
            self.traffic.add(self._axis(args), KINDS[name], _largest(args))
        return func(*args, **(kwargs or {}))

    def _axis(self, given: Iterable[Any]) -> str:
        groups = [
            dist.ProcessGroup.unbox(value)
            for value in given
            if isinstance(value, torch.ScriptObject) and str(value._type()).endswith("ProcessGroup")
        ]
        return self.axes[groups[0].group_name]


def _largest(given: Any) -> int:
    """Bytes of the largest tensor (or list of tensors) given."""
    sizes = [0]
    for value in given:
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel() * value.itemsize)
        elif isinstance(value, list):
            sizes.append(sum(_largest([inner]) for inner in value))
    return max(sizes)
