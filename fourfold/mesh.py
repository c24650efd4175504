"""Layout: how many ways each axis is cut. And where this process stands: world, rank, device.

The rank order is the documents': data outermost, then pipeline, sharding, and model innermost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fourfold.errors import UserError


@dataclass(frozen=True)
class Layout:
    """The degrees of the four axes. Degree 1 means the axis is off."""

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    mp: int = 1
    stage: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.sharding * self.mp

    @property
    def data_degree(self) -> int:
        """How many ways the global batch is cut: data and sharding ranks read different samples."""
        return self.dp * self.sharding

    def __str__(self) -> str:
        parts = [f"dp{self.dp}", f"pp{self.pp}", f"sharding{self.sharding}", f"mp{self.mp}"]
        if self.sharding > 1:
            parts[2] += f"(stage {self.stage})"
        return " x ".join(parts)

    def check(self, running: int) -> None:
        """Refuse what the processes at hand cannot form: for now, anything but one of each."""
        if self.world_size > 1 or running > 1:
            raise UserError(
                f"the layout {self} needs {self.world_size} process(es) and {running} "
                f"{'is' if running == 1 else 'are'} running, but this version trains on one "
                "device only; set every degree under Distributed to 1 and start a single process"
            )


def world_size() -> int:
    """How many processes the launcher started; torchrun and its like set WORLD_SIZE."""
    return _environment_int("WORLD_SIZE", 1)


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"the environment variable {name}={text!r} is not a whole number; unset it or "
            "start through a launcher that sets it"
        ) from None


def select_device(wanted: str) -> torch.device:
    """`auto` takes a GPU when there is one; `gpu` and `cuda` insist on it."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"Global.device={wanted} but this machine has no usable GPU; "
            "set Global.device to auto or cpu"
        )
    device = torch.device("cuda", _environment_int("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device
