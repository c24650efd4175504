"""Findings: what is wrong with a run's ranks, links and disks, judged from what was measured.

A figure is compared with the median of the others by the rule of `outliers`: it must be off by a
factor, by a difference that matters, and by several times the spread of the others. A rank's
network is slow if even its best link is, since a link is as slow as the slower of its two ends.
The factors are wide where other work on a machine blurs a figure, and narrow where nothing does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fourfold.engine.probes import ComputeRate, DiskRate, LinkRate, RankFacts
from fourfold.metrics.machines import RankMachines
from fourfold.metrics.stragglers import Bound, best_links, outliers

# A processor is shared with whatever else runs; GPUs of one kind differ by a few percent.
CPU_RATE, GPU_RATE = Bound(2.0, 0.0), Bound(1.2, 0.0)
# Latencies in seconds, rates as seconds a byte.
LATENCY, RATE, LOSS = Bound(3.0, 5e-4), Bound(2.0, 0.0), Bound(3.0, 0.02)
# Between containers of one machine its processors carry every byte, as fast as they find time.
SHARED_LATENCY, SHARED_RATE = Bound(5.0, 3e-3), Bound(4.0, 2e-8)
DISK, SYNC = Bound(4.0, 0.0), Bound(5.0, 0.05)
MEMORY = Bound(3.0, 0.0)
# Where there is nothing to compare with: no network or disk to train on.
SLOWEST_LATENCY_SECONDS, SLOWEST_LINK, MOST_LOSS, SLOWEST_DISK = 5e-3, 10e6, 0.03, 5e6
MOST_CLOCK_SECONDS = 1.0
DOCKER_SHM = 64 << 20  # what a container has unless it is told otherwise


@dataclass(frozen=True)
class PreflightFinding:
    """One thing that is wrong, with whom; `rank` is None where it is a machine."""

    what: str
    host: str
    rank: int | None
    text: str
    value: float | None = None
    median: float | None = None  # of the others


@dataclass
class Preflight:
    """Everything measured and what is wrong with it, the same on every rank."""

    machines: RankMachines
    facts: list[RankFacts]
    compute: list[ComputeRate] = field(default_factory=list)
    links: dict[tuple[int, int], LinkRate] = field(default_factory=dict)  # by ranks
    lost: dict[tuple[int, int], float] = field(default_factory=dict)  # share, by machines
    disks: dict[int, DiskRate] = field(default_factory=dict)  # by machine
    findings: list[PreflightFinding] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        machines, hosts = self.machines, self.machines.hosts
        return {
            "seconds": self.seconds,
            "ranks": [
                {
                    "rank": rank,
                    "host": hosts[machines.of_rank[rank]],
                    **asdict(facts),
                    **asdict(rate),
                }
                for rank, (facts, rate) in enumerate(zip(self.facts, self.compute))
            ],
            "links": [
                {
                    "ranks": list(pair),
                    "hosts": [hosts[machines.of_rank[r]] for r in pair],
                    **asdict(rate),
                }
                for pair, rate in self.links.items()
            ],
            "lost": [
                {"hosts": [hosts[machine] for machine in pair], "share": share}
                for pair, share in self.lost.items()
            ],
            "disks": [{"host": hosts[m], **asdict(disk)} for m, disk in self.disks.items()],
            "findings": [asdict(finding) for finding in self.findings],
        }

    def lines(self) -> Iterator[str]:
        """Tables of ranks, links and disks, then a line for each finding."""
        machines = self.machines
        yield f"{'rank':>4}  {'host':<16} {'GFLOP/s':>9}  {'nice':>4}  {'cores':>5}  device"
        for rank, (facts, rate) in enumerate(zip(self.facts, self.compute)):
            yield (
                f"{rank:>4}  {machines.host_of(rank):<16} {rate.flops / 1e9:>9.1f}  "
                f"{facts.nice:>4}  {facts.processors:>5g}  {facts.device}"
            )
        if self.links:
            yield f"{'link between ranks':<36} {'latency':>10}  {'GB/s there':>10}  {'and back':>8}"
        for (one, other), link in sorted(self.links.items()):
            ends = f"{machines.named(one)[5:]} - {machines.named(other)[5:]}"
            yield (
                f"{ends:<36} {1e6 * link.latency_seconds:>7.0f} us  "
                f"{link.sent_per_second / 1e9:>10.3f}"
                f"  {link.received_per_second / 1e9:>8.3f}"
            )
        yield f"{'host':<16} {'disk GB/s':>9}  {'sync ms':>8}  {'free GB':>8}  {'shm GB':>7}"
        for machine, ranks in enumerate(machines.ranks):
            facts, disk = self.facts[ranks[0]], self.disks.get(machine)
            figures = (
                f"{disk.bytes_per_second / 1e9:>9.3f}  {1e3 * disk.sync_seconds:>8.1f}"
                if disk
                else f"{'-':>9}  {'-':>8}"
            )
            yield (
                f"{machines.hosts[machine]:<16} {figures}  {facts.memory_bytes / 1e9:>8.1f}  "
                f"{facts.shm_bytes / 1e9:>7.2f}"
            )
        for finding in self.findings:
            yield f"found: {finding.text}"
        if not self.findings:
            yield f"nothing found wrong with {len(self.facts)} ranks on {len(machines)} machine(s)"


# -- measured -------------------------------------------------------------------------------------


def finding_of(
    machines: RankMachines,
    what: str,
    rank: int,
    text: str,
    value: float | None = None,
    middle: float | None = None,
) -> PreflightFinding:
    return PreflightFinding(what, machines.host_of(rank), rank, text, value, middle)


def slow_compute(found: Preflight) -> list[PreflightFinding]:
    """On processors, whoever works less in the time it was given one; on GPUs, in any time."""
    by_device = defaultdict[str, dict[int, float]](dict)
    for rank, (facts, rate) in enumerate(zip(found.facts, found.compute)):
        by_device[facts.device][rank] = 1 / (rate.cpu_flops or rate.flops)
    named = []
    for device, figures in by_device.items():
        for rank, middle in outliers(figures, CPU_RATE if device == "CPU" else GPU_RATE).items():
            own, usual = 1 / figures[rank], 1 / middle
            text = (
                f"{found.machines.named(rank)} computes {usual / own:.1f} times as slowly as the "
                f"others: {own / 1e9:.1f} GFLOP/s, median {usual / 1e9:.1f}"
            )
            named.append(finding_of(found.machines, "compute", rank, text, own, usual))
    return [*named, *_shared_processors(found)]


def _shared_processors(found: Preflight) -> list[PreflightFinding]:
    """RankMachines whose processors something else uses too. Ranks that share a machine share that
    with each other, so that machines are compared, each by the best of its ranks."""
    kernels = {rank: found.machines.kernels[m] for rank, m in enumerate(found.machines.of_rank)}
    best: dict[str, int] = {}
    for rank, rate in enumerate(found.compute):
        held = best.setdefault(kernels[rank], rank)
        if rate.cpu_flops and rate.flops > found.compute[held].flops:
            best[kernels[rank]] = rank
    figures = {rank: 1 / found.compute[rank].flops for rank in best.values()}
    if not all(found.compute[rank].cpu_flops for rank in figures):
        return []
    named = []
    for rank, middle in outliers(figures, CPU_RATE).items():
        rate, usual = found.compute[rank], 1 / middle
        share = rate.flops / rate.cpu_flops
        if share > 0.7:
            continue  # it is slow, not shared, and named for that
        text = (
            f"something else uses the processors of {found.machines.host_of(rank)}: "
            f"rank {rank} gets {share:.0%} of one and computes {rate.flops / 1e9:.1f} GFLOP/s, "
            f"the others {usual / 1e9:.1f} (median)"
        )
        named.append(finding_of(found.machines, "compute", rank, text, rate.flops, usual))
    return named


def slow_links(found: Preflight) -> list[PreflightFinding]:
    machines = found.machines
    of_rank = machines.of_rank
    far = {p: v for p, v in found.links.items() if of_rank[p[0]] != of_rank[p[1]]}
    near = {p: v for p, v in found.links.items() if p not in far}
    named = []
    # What processes of one machine send each other depends on what else its processors do.
    on_cpu = found.facts[0].device == "CPU"
    shares = len(set(machines.kernels)) < len(machines)
    bounds = (SHARED_RATE, SHARED_LATENCY) if shares else (RATE, LATENCY)
    for links in (far,) if on_cpu else (far, near):
        slowness = {p: 1 / v.bytes_per_second for p, v in links.items()}
        latency = {p: v.latency_seconds for p, v in links.items()}
        named += _judge(machines, slowness, bounds[0], 1 / SLOWEST_LINK, "rate", _said_rate)
        named += _judge(
            machines, latency, bounds[1], SLOWEST_LATENCY_SECONDS, "latency", _said_time
        )
    leads = [ranks[0] for ranks in machines.ranks]
    lost = {(leads[a], leads[b]): share for (a, b), share in found.lost.items()}
    named += _judge(machines, lost, LOSS, MOST_LOSS, "loss", lambda share: f"{share:.1%}")
    # What is wrong with a machine shows in its links one by one, too.
    bad = {finding.host for finding in named if finding.rank is not None}
    return [one for one in named if one.rank is not None or not bad & {*one.host.split(" - ")}]


def _judge(
    machines: RankMachines,
    links: Mapping[tuple[int, int], float],
    bound: Bound,
    worst: float,
    what: str,
    said: Callable[[float], str],
) -> list[PreflightFinding]:
    """A rank is named if even its best link is slow; else a link that is slow alone."""
    named = {"rate": "carries", "latency": "takes one way", "loss": "loses"}[what]
    slow = outliers(best_links(links), bound)
    best, found = best_links(links), []
    for rank, middle in slow.items():
        text = (
            f"the network of {machines.named(rank)} is slow: its best link {named} "
            f"{said(best[rank])}, those of the others {said(middle)} (median)"
        )
        found.append(finding_of(machines, f"link {what}", rank, text, best[rank], middle))
    rest = {pair: value for pair, value in links.items() if not set(pair) & slow.keys()}
    alone: dict[tuple[int, int], float | None] = {
        pair: None for pair, value in rest.items() if value > worst
    }
    alone |= outliers(rest, bound) if len(rest) > 2 else {}
    for pair, usual in alone.items():
        against = "" if usual is None else f", the others {said(usual)} (median)"
        ends = " and ".join(machines.named(rank) for rank in pair)
        text = f"the link between {ends} is slow: it {named} {said(rest[pair])}{against}"
        hosts = " - ".join(machines.host_of(rank) for rank in pair)
        found.append(PreflightFinding(f"link {what}", hosts, None, text, rest[pair], usual))
    return found


def slow_disks(found: Preflight, directory: Path) -> list[PreflightFinding]:
    machines, disks = found.machines, found.disks
    named: list[PreflightFinding] = []
    slow = outliers({m: 1 / disk.bytes_per_second for m, disk in disks.items()}, DISK)
    syncs = outliers({m: disk.sync_seconds for m, disk in disks.items()}, SYNC)
    for machine, disk in disks.items():
        host, rank = machines.hosts[machine], machines.ranks[machine][0]
        rate, place = disk.bytes_per_second, f"writing to {directory}"
        if machine in slow or rate < SLOWEST_DISK:
            usual = 1 / slow[machine] if machine in slow else None
            against = f", the others {usual / 1e6:.1f} (median)" if usual else ""
            text = (
                f"the disk of {host} (rank {rank}) is slow: {place} at {rate / 1e6:.1f} MB/s"
                f"{against}"
            )
            named.append(PreflightFinding("disk", host, rank, text, rate, usual))
        elif machine in syncs:
            text = (
                f"the disk of {host} (rank {rank}) is slow: {place}, a small file takes "
                f"{1e3 * disk.sync_seconds:.0f} ms to reach the disk, the others "
                f"{1e3 * syncs[machine]:.0f} (median)"
            )
            named.append(
                PreflightFinding("disk", host, rank, text, disk.sync_seconds, syncs[machine])
            )
    for machine in range(len(machines)):
        if machine not in disks:
            host, rank = machines.hosts[machine], machines.ranks[machine][0]
            text = f"{machines.named(rank)} cannot write to {directory}"
            named.append(PreflightFinding("directory", host, rank, text))
    return named


# -- what needs no measuring ----------------------------------------------------------------------


def differences(found: Preflight) -> Iterator[PreflightFinding]:
    machines, facts = found.machines, found.facts
    for name in facts[0].versions:
        values = [each.versions.get(name, "none") for each in facts]
        common = Counter(values).most_common(1)[0][0]
        # On a tie the side of rank 0 is taken for the right one.
        common = values[0] if values.count(values[0]) == values.count(common) else common
        for machine, ranks in enumerate(machines.ranks):
            odd = [rank for rank in ranks if values[rank] != common]
            if odd:
                host = machines.hosts[machine]
                text = (
                    f"{machines.named(odd[0])} has another version of {name} than the others: "
                    f"{values[odd[0]]}, theirs is {common}"
                )
                if name not in (
                    "Python",
                    "torch",
                    "numpy",
                    "safetensors",
                    "CUDA",
                    "NCCL",
                    "Fourfold",
                ):
                    text = (
                        f"{name} is not the same on {machines.named(odd[0])} as on the others: "
                        f"{values[odd[0]]}, theirs is {common}"
                    )
                yield PreflightFinding("version", host, odd[0], text)
    usual = median(each.nice for each in facts)
    for rank, each in enumerate(facts):
        host = machines.host_of(rank)
        if each.nice > usual:
            text = (
                f"{machines.named(rank)} runs with low priority: nice {each.nice}, the others "
                f"{usual:g}"
            )
            yield PreflightFinding("priority", host, rank, text, each.nice, usual)
    # Fewer cores than the others, by affinity or quota.
    few = outliers({rank: 1 / each.processors for rank, each in enumerate(facts)}, Bound(1.5, 0.0))
    for rank, middle in few.items():
        host, cores = machines.host_of(rank), facts[rank].processors
        text = f"{machines.named(rank)} may use {cores:g} processors, the others {1 / middle:g}"
        yield PreflightFinding("processors", host, rank, text, cores, 1 / middle)
    most = Counter(each.device for each in facts).most_common(1)[0][0]
    for rank, each in enumerate(facts):
        if each.device != most:
            host = machines.host_of(rank)
            text = f"{machines.named(rank)} computes on {each.device}, most on {most}"
            yield PreflightFinding("device", host, rank, text)
    yield from _short_of_memory(found)


def _short_of_memory(found: Preflight) -> Iterator[PreflightFinding]:
    machines = found.machines
    free = {m: found.facts[ranks[0]].memory_bytes for m, ranks in enumerate(machines.ranks)}
    told = {m: 1 / size for m, size in free.items() if size > 0}
    for machine, middle in outliers(told, MEMORY).items():
        host, rank = machines.hosts[machine], machines.ranks[machine][0]
        text = (
            f"{host} has {free[machine] / 1e9:.1f} GB of memory free, the others "
            f"{1 / middle / 1e9:.1f} (median)"
        )
        yield PreflightFinding("memory", host, rank, text, free[machine], 1 / middle)
    for machine, ranks in enumerate(machines.ranks):
        size = found.facts[ranks[0]].shm_bytes
        if 0 < size <= DOCKER_SHM and len(ranks) > 1:
            host = machines.hosts[machine]
            text = (
                f"/dev/shm of {host} has {size / 1e6:.0f} MB for {len(ranks)} ranks; give the "
                "container more (docker run --shm-size, a memory volume in Kubernetes)"
            )
            yield PreflightFinding("shm", host, ranks[0], text, size)


def wrong_clocks(found: Preflight) -> Iterator[PreflightFinding]:
    """Offsets from the clock most machines have, summed along links from machine to machine."""
    machines = found.machines
    ahead: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    links = {
        (machines.of_rank[a], machines.of_rank[b]): link for (a, b), link in found.links.items()
    }
    for _ in range(len(machines)):
        for (one, other), link in links.items():
            offset, error = link.clock_offset_seconds, link.clock_error_seconds
            if one in ahead and other not in ahead:
                ahead[other] = (ahead[one][0] + offset, ahead[one][1] + error)
            elif other in ahead and one not in ahead:
                ahead[one] = (ahead[other][0] - offset, ahead[other][1] + error)
    middle = sorted(offset for offset, _ in ahead.values())[(len(ahead) - 1) // 2]
    for machine, (offset, error) in ahead.items():
        if abs(offset - middle) > MOST_CLOCK_SECONDS + error:
            host, rank = machines.hosts[machine], machines.ranks[machine][0]
            way = "ahead of" if offset > middle else "behind"
            text = f"the clock of {host} is {abs(offset - middle):.1f} s {way} the others'"
            yield PreflightFinding("clock", host, rank, text, offset, middle)


def _said_rate(slowness: float) -> str:
    return f"{1e-6 / slowness:.1f} MB/s"


def _said_time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
