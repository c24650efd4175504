"""The planner: from a configuration and a cluster to ranked layouts.

A plan holds one candidate for each way of cutting the ranks (mp, pp, dp, sharding): the fastest of
its variants that fits. Layouts that fit come first, by step time; then those that only just fit;
then those that cut layers over several nodes, which is a last resort, unless mp is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fourfold.config import Config
from fourfold.config.rules import divides_model, schedule_fits, stages_fit
from fourfold.cost.memory import fullest_stage
from fourfold.cost.terms import Breakdown
from fourfold.cost.workload import Spread, Workload, spread_of, workload_of
from fourfold.mesh import Layout
from fourfold.plan.cluster import GIB, Cluster, MemoryBand
from fourfold.plan.machine import Coefficients, load_coefficients
from fourfold.plan.search import Costs, Fixed, concerns, one_spread, search
from fourfold.plan.steptime import step_time_of

Fit = Literal["fits", "tight", "no"]
COMMUNICATION = ("tensor parallel", "pipeline sends", "data parallel")


@dataclass(frozen=True)
class Candidate:
    """One layout with everything that was computed about it."""

    spread: Spread
    memory: Breakdown  # of the pipeline stage that needs most
    fullest_stage: int
    time: Breakdown
    capacity: float  # bytes of one device
    band: float  # share by which the step may take longer
    band_below: float  # or be shorter
    memory_band: MemoryBand  # shares by which memory may be more, or less
    tokens_per_second: float  # of all ranks
    mfu: float

    @property
    def seconds(self) -> float:
        return float(self.time.total)

    @property
    def bytes_(self) -> float:
        return float(self.memory.total)

    @property
    def most_bytes(self) -> float:
        """With what memory was found to be more than predicted."""
        return self.bytes_ * (1 + float(self.memory_band.above))

    @property
    def least_bytes(self) -> float:
        return self.bytes_ * (1 - float(self.memory_band.below))

    @property
    def concern(self) -> float:
        return float(concerns(np.array(self.bytes_), self.capacity, self.memory_band.above))

    @property
    def fit(self) -> Fit:
        return fit_of(self.bytes_, self.capacity, self.memory_band)

    @property
    def memory_text(self) -> str:
        """With its band, as "57.6 (52-82)"."""
        low, high = self.least_bytes / GIB, self.most_bytes / GIB
        digits = 0 if low >= 10 else 1
        return f"{self.bytes_ / GIB:.1f} ({low:.{digits}f}-{high:.{digits}f})"

    @property
    def band_text(self) -> str:
        return off_by(self.band, self.band_below, lambda share: f"{share:.0%}")

    @property
    def seconds_text(self) -> str:
        """With its band, as "65.6 ±11"."""

        def shown(share: float) -> str:
            part = self.seconds * share
            return f"{part:.2g}" if part < 100 else f"{part:.0f}"

        return f"{self.seconds:.4g} {off_by(self.band, self.band_below, shown)}"

    @property
    def tokens_per_device(self) -> float:
        """TGS: tokens per second of one device."""
        return self.tokens_per_second / int(self.spread.world)

    @property
    def bubble(self) -> float:
        return float(self.time["bubble"]) / self.seconds

    @property
    def exposed(self) -> float:
        """Share of the step spent on communication that nothing hides."""
        return sum(float(self.time[name]) for name in COMMUNICATION) / self.seconds

    @property
    def layout(self) -> str:
        s = self.spread
        return str(Layout(s.dp, s.pp, s.sharding, s.mp, s.stage)).replace(" x ", " ")

    @property
    def details(self) -> str:
        """What is not a degree: micro-batches, schedule, recompute, sequence parallelism."""
        s = self.spread
        parts = [f"mbs {s.micro_batch} x {s.micro_batches}"]
        if s.pp > 1:
            parts.append(s.schedule + (f" v{s.virtual}" if s.virtual > 1 else ""))
        parts.append("no recompute" if s.recompute == "none" else f"recompute {s.recompute}")
        if s.sequence_parallel:
            parts.append("sp")
        return ", ".join(parts)

    def overrides(self) -> list[str]:
        """The same as `settings`, as `-o` assignments."""
        values = self.settings().items()
        return [f"{path}={'null' if value is None else value}" for path, value in values]

    def settings(self) -> dict[str, Any]:
        """The keys that make a configuration run this layout."""
        s = self.spread
        local = s.micro_batch * s.micro_batches
        recompute = s.recompute != "none"
        return {
            "Distributed.dp_degree": s.dp,
            "Distributed.mp_degree": s.mp,
            "Distributed.pp_degree": s.pp,
            "Distributed.pp_schedule": s.schedule,
            "Distributed.virtual_pp_degree": s.virtual,
            "Distributed.sharding.sharding_degree": s.sharding,
            "Distributed.sharding.sharding_stage": s.stage,
            "Data.batch_size.global_batch_size": local * s.dp * s.sharding,
            "Data.batch_size.local_batch_size": local,
            "Data.batch_size.micro_batch_size": s.micro_batch,
            "Engine.accumulate_steps": s.micro_batches,
            "Model.use_recompute": recompute,
            "Model.recompute_granularity": s.recompute if recompute else None,
            "Model.recompute_method": str(s.recompute_method),
            "Model.recompute_num_layers": int(s.recompute_layers),
            "Model.sequence_parallel": bool(s.sequence_parallel),
        }


@dataclass(frozen=True)
class Plan:
    workload: Workload
    cluster: Cluster
    coefficients: Coefficients
    candidates: list[Candidate]  # ranked; empty when nothing fits
    own: Candidate | None  # the file's own layout on this cluster
    own_problem: str | None  # why there is none
    costs: Costs | None  # every layout that was looked at; None when none is legal

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


def plan(
    config: Config,
    cluster: Cluster,
    *,
    fixed: Fixed | None = None,
    coefficients: Coefficients | None = None,
    own_problem: str | None = None,
) -> Plan:
    """Rank the layouts of `config`'s model and global batch on `cluster`.

    `fixed` names fields of `Spread` and the only value they may have. `own_problem` says why the
    layout of `config` is not the file's own, where the file's is none of this cluster.
    """
    coefficients = coefficients or load_coefficients()
    workload = workload_of(config, on_cpu=cluster.device.is_cpu)
    costs = search(workload, cluster, coefficients, fixed)
    chosen = [] if costs is None else _best_of_each_cut(costs, cluster)
    candidates = [
        candidate_of(workload, one_spread(costs.spread, index), cluster, coefficients)
        for index in chosen
        if costs is not None
    ]
    widest = None if fixed and "mp" in fixed else cluster.devices_per_node
    candidates.sort(
        key=lambda one: (widest is not None and one.spread.mp > widest, one.concern, one.seconds)
    )
    own, problem = _own(workload, cluster) if own_problem is None else (None, own_problem)
    return Plan(
        workload,
        cluster,
        coefficients,
        candidates,
        None if own is None else candidate_of(workload, own, cluster, coefficients),
        problem,
        costs,
    )


def candidate_of(
    workload: Workload, spread: Spread, cluster: Cluster, coefficients: Coefficients
) -> Candidate:
    machine = cluster.machine(workload.precision)
    memory, stage = fullest_stage(workload.network, spread, workload.software)
    time = step_time_of(workload.network, spread, workload.software, machine, coefficients)
    seconds = float(time.total)
    return Candidate(
        spread=spread,
        memory=memory,
        fullest_stage=int(stage),
        time=time,
        capacity=cluster.usable_bytes,
        band=cluster.device.band,
        band_below=cluster.device.band_below or cluster.device.band,
        memory_band=cluster.memory_band(spread.pp),
        tokens_per_second=workload.tokens_per_step / seconds,
        mfu=workload.model_flops / seconds / (float(machine.peak) * int(spread.world)),
    )


def fit_of(bytes_: float, capacity: float, band: MemoryBand) -> Fit:
    """ "fits" is what fits with the upper end of its band."""
    if bytes_ > capacity:
        return "no"
    return "tight" if bytes_ * (1 + float(band.above)) > capacity else "fits"


def off_by(above: float, below: float, shown: Callable[[float], str]) -> str:
    """ "±11", or "+11 -2" where what is measured is mostly on one side."""
    if above == below:
        return f"±{shown(above)}"
    return f"+{shown(above)} -{shown(below)}"


def _best_of_each_cut(costs: Costs, cluster: Cluster) -> list[int]:
    """For each (mp, pp, dp, sharding): the fastest that fits, else the fastest that just fits."""
    spread, capacity = costs.spread, cluster.usable_bytes
    usable = np.flatnonzero(costs.bytes_ <= capacity)
    band = cluster.memory_band(np.asarray(spread.pp)[usable])
    concern = concerns(costs.bytes_[usable], capacity, band.above)
    keys = np.stack([np.asarray(getattr(spread, name))[usable] for name in CUT], axis=1)
    order = np.lexsort((costs.seconds[usable], concern))
    _, first = np.unique(keys[order], axis=0, return_index=True)
    return [int(index) for index in usable[order[first]]]


CUT = ("mp", "pp", "dp", "sharding")


def _own(workload: Workload, cluster: Cluster) -> tuple[Spread | None, str | None]:
    """The file's layout with this cluster's data degree, or why there is none."""
    spread, network = spread_of(workload.config), workload.network
    others = spread.mp * spread.pp * spread.sharding
    if cluster.world % others:
        return None, (
            f"the file's mp{spread.mp} x pp{spread.pp} x sharding{spread.sharding} = {others} "
            f"ranks do not divide the {cluster.world} of {cluster}"
        )
    dp = cluster.world // others
    local = workload.global_batch // (dp * spread.sharding)
    if any(batch % (dp * spread.sharding * spread.micro_batch) for batch in workload.batches):
        return None, (
            f"the file's batch of {workload.global_batch} in micro-batches of {spread.micro_batch} "
            f"does not divide over {dp * spread.sharding} data ranks"
        )
    spread = replace(spread, dp=dp, micro_batches=local // spread.micro_batch)
    divides = divides_model(spread.mp, network.heads, network.ffn, network.shared_heads)
    legal = divides and (
        spread.pp == 1
        or (
            stages_fit(network.layers, spread.pp, spread.virtual)
            and schedule_fits(spread.schedule, spread.pp, spread.virtual, spread.micro_batches)
        )
    )
    if not legal:
        return None, (
            f"the file's layout has {spread.micro_batches} micro-batches on {cluster}, which its "
            f"{spread.schedule} over pp{spread.pp} cannot run"
        )
    return spread, None
