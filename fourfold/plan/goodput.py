"""From step time to calendar and cost: interruptions, checkpoints, and how many devices it takes.

A device fails every `device_mtbf_hours` on average (50,000 h: Llama-3 405B's 419 interruptions in
54 days on 16,384 devices, and BLOOM's one or two a week on 384). Saving every
sqrt(2 x save time x time between failures) loses least (Young, Daly).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.plan.cluster import Cluster

CHECKPOINT_BYTES = 12  # per parameter: fp32 weights and two moments
FIXED_SAVE_SECONDS = 5.0
DAY = 86400.0


@dataclass(frozen=True)
class Goodput:
    mtbf_hours: float  # of the whole cluster
    save_seconds: float
    interval_seconds: float  # between saves
    share: float  # of the time that ends up in the model

    def text(self) -> str:
        return (
            f"one interruption every {_hours(self.mtbf_hours)}, a save takes "
            f"{self.save_seconds:.0f} s, saving every {self.interval_seconds / 60:.0f} min "
            f"loses least: {self.share:.1%} of the time is training"
        )


def goodput_of(parameters: int, cluster: Cluster) -> Goodput:
    mtbf = cluster.device_mtbf_hours * 3600 / cluster.world
    save = FIXED_SAVE_SECONDS + CHECKPOINT_BYTES * parameters / (
        cluster.nodes * cluster.disk_gbps * 1e9
    )
    interval = math.sqrt(2 * save * mtbf)
    lost = save / interval + (interval / 2 + 60 * cluster.restart_minutes) / mtbf
    return Goodput(mtbf / 3600, save, interval, 1 / (1 + lost))


@dataclass(frozen=True)
class Bill:
    """A whole run: how long, and for how much if a price is known."""

    tokens: float
    days: float  # interruptions included
    cost: float | None


def bill_of(
    tokens: float, tokens_per_second: float, goodput: Goodput, world: int, price: float | None
) -> Bill:
    days = tokens / (tokens_per_second * goodput.share) / DAY
    return Bill(tokens, days, None if price is None else 24 * days * world * price)


def devices_for(
    days: float, tokens: float, per_device: float, parameters: int, cluster: Cluster
) -> int:
    """Devices, in whole nodes, that read `tokens` in `days` at `per_device` tokens/s each."""
    needed = tokens / (per_device * days * DAY)
    for _ in range(20):  # more devices fail more often, so a little more is needed
        nodes = max(1, math.ceil(needed / cluster.devices_per_node))
        grown = cluster.model_copy(update={"nodes": min(nodes, 2**20)})
        more = tokens / (per_device * days * DAY * goodput_of(parameters, grown).share)
        if math.ceil(more / cluster.devices_per_node) <= nodes:
            break
        needed = more
    return nodes * cluster.devices_per_node


def _hours(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} h"
