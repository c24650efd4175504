"""`Distributed: auto`: a layout for the ranks present, chosen by the planner, and why.

Every rank that a launcher started chooses for itself, from the same file, the same overrides and
the same description of the machine, so all choose alike; nothing is measured here. The description
is what `--cluster` names, else the `cluster.yaml` in the working directory that `fourfold doctor`
writes, else typical figures of the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fourfold.config import Config, ConfigSource
from fourfold.config.auto_constraints import LayoutConstraints, read_constraints, without_layout
from fourfold.engine.monitoring import Prediction
from fourfold.errors import UserError
from fourfold.plan.cluster import GIB, PRESETS, Cluster, Device, load_cluster, parse_cluster
from fourfold.plan.doctor import crowded, hardware, plain_cpu
from fourfold.plan.planner import Candidate, Plan, plan
from fourfold.plan.suggestions import impossible
from fourfold.processors import num_processors

CLUSTER_FILE = Path("cluster.yaml")
GPU_MODELS = Path("/proc/driver/nvidia/gpus")
# Of one core: what processors of the last ten years reach, within a factor of two.
CORE_GFLOPS, CORE_GBPS = 60.0, 8.0


@dataclass(frozen=True)
class Choice:
    config: Config  # with the layout in it; its notices begin with what was chosen and why
    expected: Prediction


def choose(source: ConfigSource, world: int, cluster: str | None = None) -> Choice:
    """Plan for `world` ranks and resolve the configuration for the best layout."""
    constraints = read_constraints(source)
    batch = constraints.global_batch_of(world)
    free = without_layout(source, batch)
    described, origin = describe_cluster(world, cluster, free.Global.device)
    made = plan(free, described, fixed=constraints.fixed)
    best = made.best
    if best is None:
        raise UserError(_nothing_fits(made, constraints, world))
    layout = {**best.settings(), "Distributed.auto": False}
    if not constraints.keeps_pp_layers:
        layout["Distributed.pp_layers"] = None
    chosen = source.with_values(layout).load(world)
    expected = Prediction(best.seconds, best.bytes_, best.band, batch)
    chosen.notices[:0] = _lines(made, best, constraints, origin)
    return Choice(chosen, expected)


def describe_cluster(world: int, asked: str | None, device: str) -> tuple[Cluster, str]:
    """The machine as `world` ranks find it, and where its figures are from."""
    if asked is not None and asked.upper().endswith("CPU"):
        raise UserError(
            f"--cluster {asked}: a run cannot measure its processor on the way; measure it once "
            f"with `fourfold doctor --nproc {world}` and leave --cluster out"
        )
    if asked is not None:
        given = parse_cluster(asked)
        return _with_ranks(given, world), f"--cluster {asked}{_filling(given, world)}"
    on_gpu = device != "cpu" and GPU_MODELS.is_dir()
    if CLUSTER_FILE.is_file():
        measured = load_cluster(CLUSTER_FILE)
        if measured.device.is_cpu is not on_gpu:
            return _with_ranks(measured, world), _origin_of(measured) + _filling(measured, world)
    if on_gpu:
        found, per_node = _gpus()
        machine = Cluster(nodes=1, devices_per_node=per_node, device=found)
        origin = f"figures of {found.name}{_filling(machine, world)}"
        return machine.with_world(world), origin
    cpu = _typical_cpu(world)
    origin = f"typical figures; `fourfold doctor --nproc {world}` measures this machine"
    return Cluster(nodes=1, devices_per_node=world, device=cpu), origin


def _origin_of(measured: Cluster) -> str:
    """Which file, and of which machine: it may have come here from another one."""
    origin = f"{CLUSTER_FILE.resolve()}, measured on {measured.measured_on or 'an unnamed machine'}"
    here = hardware() if measured.device.is_cpu else None
    if measured.measured_on and here is not None and not measured.measured_on.endswith(here):
        origin += f", while this machine is {here}; `fourfold doctor --force` measures it"
    return origin


def _filling(cluster: Cluster, world: int) -> str:
    """A remark, where the ranks do not fill the nodes described."""
    if cluster.device.is_cpu or world < cluster.devices_per_node:
        return ""
    per_node = cluster.with_world(world).devices_per_node
    if per_node == cluster.devices_per_node:
        return ""
    return (
        f"; {world} ranks do not fill nodes of {cluster.devices_per_node}, nodes of {per_node} do"
    )


def _with_ranks(cluster: Cluster, world: int) -> Cluster:
    """The ranks on the cluster. A processor takes as many as one likes, and they share it."""
    if cluster.nodes > 1 or not cluster.device.is_cpu or world <= cluster.devices_per_node:
        return cluster.with_world(world)
    share = cluster.devices_per_node / world
    device = cluster.device.model_copy(
        update={
            "memory_gib": share * cluster.device.memory_gib,
            "peak_tflops": share * cluster.device.peak_tflops,
            "peak_tflops_fp32": share * cluster.device.peak_tflops_fp32,
            "memory_gbps": share * cluster.device.memory_gbps,
        }
    )
    return cluster.model_copy(update={"devices_per_node": world, "device": device})


def _typical_cpu(world: int) -> Device:
    threads = max(1, num_processors() // world)
    rate = 1e-3 * CORE_GFLOPS * threads
    device = plain_cpu(world).model_copy(
        update={
            "peak_tflops": rate,
            "peak_tflops_fp32": rate,
            "memory_gbps": CORE_GBPS * threads,
            "units": 1,
            "launch_us": 10.0,
        }
    )
    return crowded(device, world)


def _gpus() -> tuple[Device, int]:
    """The preset of the first GPU and how many there are, by the driver's own list: asking CUDA
    would start it here."""
    models = [
        line.partition(":")[2].strip()
        for file in sorted(GPU_MODELS.glob("*/information"))
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Model:")
    ]
    model = models[0] if models else "unknown"
    sizes = re.findall(r"(\d+) ?GB?\b", model)
    named = [name for name in PRESETS if re.search(rf"\b{name.partition('-')[0]}\b", model)]
    fitting = [name for name in named if sizes and name.endswith(f"-{sizes[0]}G")] or named
    if not fitting:
        raise UserError(
            f"--auto: the GPU {model!r} is not among {', '.join(PRESETS)}; measure it with "
            "`fourfold doctor`, or describe it with --cluster"
        )
    return PRESETS[fitting[0]], len(models)


def _nothing_fits(made: Plan, constraints: LayoutConstraints, world: int) -> str:
    if made.costs is not None:
        return "\n".join(impossible(made))
    network, kept = made.workload.network, _kept(constraints)
    shared = int(network.shared_heads)
    with_groups = f", a divisor or a multiple of {shared} key-value heads"
    return (
        f"no layout of {world} process(es) {f'with {kept} ' if kept else ''}is legal: dp * pp * "
        f"sharding * mp must be {world}, with mp a divisor of {network.heads} heads and of "
        f"{network.ffn} ffn columns{with_groups if shared < network.heads else ''}, pp at most "
        f"{network.layers} layers, and dp * sharding * "
        f"micro-batch a divisor of the global batch of {made.workload.global_batch}; "
        f"{'free a degree' if kept else 'change the batch'}, or start another number of processes"
    )


def _kept(constraints: LayoutConstraints) -> str:
    return ", ".join(f"{name}={value}" for name, value in constraints.fixed.items())


def _lines(
    made: Plan, best: Candidate, constraints: LayoutConstraints, origin: str
) -> Iterator[str]:
    looked = 0 if made.costs is None else len(made.costs)
    kept = _kept(constraints)
    yield (
        f"auto: {looked:,} legal layouts of {made.cluster.world} process(es)"
        + (f" with {kept} as given" if kept else "")
        + f", on {made.cluster} ({origin})"
    )
    yield f"auto: chosen {best.layout}, {best.details}: {_figures(best)}"
    others = made.candidates[1:]
    if others:
        yield f"auto: next {others[0].layout}, {others[0].details}: {_reason(others[0], best)}"
    elif made.cluster.world > 1:
        yield "auto: no other way of cutting the ranks is legal and fits"


def _figures(candidate: Candidate) -> str:
    return (
        f"{candidate.seconds:.3g} s a step ({candidate.band_text}), {candidate.bytes_ / GIB:.2f} "
        f"GiB a process (at most {candidate.most_bytes / GIB:.2f}: {candidate.fit})"
    )


def _reason(other: Candidate, best: Candidate) -> str:
    """Why the runner-up is not the choice: memory, or the term of its time that grew most."""
    if other.fit != "fits" and best.fit == "fits":
        return f"{other.bytes_ / GIB:.2f} GiB a process is too near to what there is"
    theirs, ours = other.time.values_at(), best.time.values_at()
    grown = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
    return (
        f"{other.seconds:.3g} s, {other.seconds / best.seconds - 1:.1%} more, most of it {grown} "
        f"({theirs[grown]:.3g} s instead of {ours.get(grown, 0.0):.3g})"
    )
