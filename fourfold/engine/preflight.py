"""Preflight: every rank, link and disk measured before the first step, and the slow one named.

What is measured takes turns, so that nothing is named for what the measuring itself did: ranks that
share processors compute one after the other, and of the links only those at once that have no
machine in common. Where several namespaces or containers are on one machine (they have its boot id)
they count as one here. The short form measures the links between neighbours on a ring of machines,
which is enough to tell a slow machine from its neighbours; the full one all of them.

Each figure is the best of several tries and is compared with the median of the others
(`outliers`). What seems slow is measured again, twice, and named only if it stays so: other work
on a machine passes, a fault does not.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fourfold import heartbeat
from fourfold.engine.findings import (
    Preflight,
    PreflightFinding,
    differences,
    finding_of,
    slow_compute,
    slow_disks,
    slow_links,
    wrong_clocks,
)
from fourfold.engine.probes import (
    ComputeRate,
    DiskRate,
    LinkRate,
    RankFacts,
    compute_rate,
    disk_rate,
    link_rate,
    rank_facts,
)
from fourfold.mesh import Mesh
from fourfold.metrics.machines import LinkWatch, find_machines, links_of

Form = Literal["short", "full"]
TRIES = 3
SEEN_SECONDS = 5.0


def preflight(
    mesh: Mesh,
    device: torch.device,
    directory: Path,
    form: Form = "short",
    one_by_one: bool = False,
) -> Preflight:
    """Measure and compare all ranks; a collective.

    `one_by_one` has each rank compute alone, wherever it is.
    """
    heartbeat.beat(0, "preflight")
    began = time.perf_counter()
    machines = find_machines(mesh)
    own = asdict(rank_facts(device))
    facts = [RankFacts(**json.loads(text)) for text in mesh.gather(json.dumps(own))]
    check = _Check(mesh, device, directory, form, one_by_one, Preflight(machines, facts))
    check.run()
    found = check.found
    found.findings = [*differences(found), *found.findings]
    found.seconds = time.perf_counter() - began
    return found


class _Check:
    """The measurements, in their order; every rank goes through the same ones."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        directory: Path,
        form: Form,
        one_by_one: bool,
        found: Preflight,
    ) -> None:
        self.mesh, self.device, self.directory = mesh, device, directory
        self.form, self.one_by_one, self.found = form, one_by_one, found
        self.machines = found.machines
        self.lead = {ranks[0]: machine for machine, ranks in enumerate(self.machines.ranks)}

    def run(self) -> None:
        # Processes of one machine have the same processors and disk: nothing to compare.
        compares = self.form == "full" or len(set(self.machines.kernels)) > 1
        if compares or self.device.type != "cpu":
            self._until_sure(self._measure_compute, partial(slow_compute, self.found))
        # Links of GPUs have been measured nowhere yet, so not before every run.
        if self.mesh.size > 1 and (self.form == "full" or self.device.type == "cpu"):
            self._until_sure(self._measure_links, partial(slow_links, self.found))
        if self.form == "full" or len(self.machines) > 1:
            self._until_sure(self._measure_disks, partial(slow_disks, self.found, self.directory))
        self.found.findings += self._unshared()
        self.found.findings += wrong_clocks(self.found)

    def _until_sure(
        self, measure: Callable[[], None], judge: Callable[[], list[PreflightFinding]]
    ) -> None:
        """Measure again what seems slow; figures are the best so far. All ranks judge alike."""
        for _ in range(TRIES):
            measure()
            if not (findings := judge()):
                return
        self.found.findings += findings

    def _told(self, own: dict[str, Any] | None) -> list[Any]:
        return [json.loads(text) for text in self.mesh.gather(json.dumps(own))]

    # -- computing --------------------------------------------------------------------------

    def _measure_compute(self) -> None:
        rounds = self._compute_rounds()
        budget = 0.8 if self.form == "short" else 4.0
        stretch = min(0.2 if self.form == "full" else 0.03, budget / (4 * len(rounds)))
        own = None
        for ranks in rounds:
            if self.mesh.rank in ranks:
                own = compute_rate(self.device, stretch)
            self._wait_for_all()
        assert own is not None
        rates = [ComputeRate(**told) for told in self._told(asdict(own))]
        before = self.found.compute or rates
        self.found.compute = [
            ComputeRate(max(a.flops, b.flops), max(a.cpu_flops, b.cpu_flops))
            for a, b in zip(rates, before)
        ]

    def _compute_rounds(self) -> list[set[int]]:
        """Which ranks compute at once: on a processor no more than it has cores for."""
        if self.one_by_one:
            return [{rank} for rank in range(self.mesh.size)]
        if self.device.type != "cpu":
            return [set(range(self.mesh.size))]
        # The fewest any rank may use, so that all make the same rounds.
        cores = min(facts.processors for facts in self.found.facts)
        rounds = defaultdict[int, set[int]](set)
        on_kernel: Counter[str] = Counter()
        for rank, facts in enumerate(self.found.facts):
            kernel = self.machines.kernels[self.machines.of_rank[rank]]
            at_once = max(1, int(cores) // facts.threads)
            rounds[on_kernel[kernel] // at_once].add(rank)
            on_kernel[kernel] += 1
        return [rounds[number] for number in sorted(rounds)]

    # -- links ------------------------------------------------------------------------------

    def _measure_links(self) -> None:
        watch = LinkWatch(self.machines) if len(self.machines) > 1 else None
        most = (16 << 20) if self.form == "full" else (4 << 20)
        own: dict[str, Any] = {}
        for pairs in self._link_rounds():
            for pair in pairs:
                if self.mesh.rank in pair:
                    leads = self.mesh.rank == pair[0]
                    rate = link_rate(pair[1] if leads else pair[0], leads, self.device, most)
                    if rate is not None:
                        own[f"{pair[0]} {pair[1]}"] = asdict(rate)
            self._wait_for_all()
        for told in self._told(own):
            for key, value in told.items():
                one, other = map(int, key.split())
                self._take_link((one, other), LinkRate(**value))
        if watch is not None:
            size, rows = len(self.machines), self.mesh.all_gather(*watch.look())
            for pair, share in links_of(
                [row[size : 2 * size] for row in rows], self.machines
            ).items():
                self.found.lost[pair] = min(share, self.found.lost.get(pair, math.inf))

    def _take_link(self, pair: tuple[int, int], new: LinkRate) -> None:
        old = self.found.links.get(pair, new)
        surer = min(old, new, key=lambda link: link.clock_error_seconds)
        self.found.links[pair] = LinkRate(
            min(old.latency_seconds, new.latency_seconds),
            max(old.sent_per_second, new.sent_per_second),
            max(old.received_per_second, new.received_per_second),
            surer.clock_offset_seconds,
            surer.clock_error_seconds,
        )

    def _link_rounds(self) -> list[list[tuple[int, int]]]:
        """Pairs of ranks that are measured at once; a machine is in one pair of a round."""
        machines = self.machines.ranks
        pairs: list[tuple[int, int]] = []
        between = ring(len(machines)) if self.form == "short" else tournament(len(machines))
        # Each GPU has a network card of its own in many machines.
        rails = 1
        if self.form == "full" and self.device.type != "cpu":
            rails = min(map(len, machines))
        for rail in range(rails):
            pairs += [(machines[one][rail], machines[other][rail]) for one, other in between]
        if self.form == "full" or (len(machines) == 1 and self.device.type != "cpu"):
            pairs += [(m[a], m[b]) for m in machines for a, b in ring(len(m))]
        kernels = [self.machines.kernels[machine] for machine in self.machines.of_rank]
        return disjoint_rounds(pairs, kernels)

    # -- the output directory -----------------------------------------------------------------

    def _measure_disks(self) -> None:
        """One rank of each machine writes; namespaces of one machine take turns."""
        size = (32 << 20) if self.form == "full" else (4 << 20)
        pairs = [(rank, rank) for rank in self.lead]
        kernels = [self.machines.kernels[machine] for machine in self.machines.of_rank]
        own: dict[str, Any] | None = None
        for leads in disjoint_rounds(pairs, kernels):
            if (self.mesh.rank, self.mesh.rank) in leads:
                own = self._write(size)
            self._wait_for_all()
        for rank, told in enumerate(self._told(own)):
            if told is None or "problem" in told:
                continue
            machine, new = self.lead[rank], DiskRate(**told)
            old = self.found.disks.get(machine, new)
            self.found.disks[machine] = DiskRate(
                max(old.bytes_per_second, new.bytes_per_second),
                min(old.sync_seconds, new.sync_seconds),
            )

    def _write(self, size: int) -> dict[str, Any]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return asdict(disk_rate(self.directory, size, tries=2 if len(self.lead) > 1 else 1))
        except OSError as error:
            return {"problem": error.strerror}

    def _unshared(self) -> list[PreflightFinding]:
        """Whether every machine sees what rank 0 writes, and rank 0 what they write."""
        if len(self.machines) == 1:
            return []
        name = self.mesh.broadcast_first(secrets.token_hex(8) if self.mesh.rank == 0 else None)
        tokens = {rank: self.directory / f".preflight-{name}-{rank}" for rank in self.lead}
        own = tokens.get(self.mesh.rank)
        try:
            if own is not None:
                with suppress(OSError):
                    own.write_text(str(self.mesh.rank))
            self._wait_for_all()
            unseen = []
            if own is not None:
                looked_for = tokens if self.mesh.rank == 0 else [0]
                unseen = [rank for rank in looked_for if not _is_seen(tokens[rank], str(rank))]
            told = self._told({"unseen": unseen})
        finally:
            if own is not None:
                with suppress(OSError):
                    own.unlink(missing_ok=True)
        return [
            self._not_seen(rank, other) for rank, row in enumerate(told) for other in row["unseen"]
        ]

    def _not_seen(self, rank: int, other: int) -> PreflightFinding:
        """`rank` does not see what `other` wrote; one of them is rank 0, which is not to blame."""
        names = {each: self.machines.named(each) if each else "rank 0" for each in (rank, other)}
        text = (
            f"{self.directory} is not one directory on all machines: {names[rank]} does not see "
            f"what {names[other]} wrote there"
        )
        return finding_of(self.machines, "directory", max(rank, other), text)

    def _wait_for_all(self) -> None:
        heartbeat.alive()
        self.mesh.all_gather(0.0)


def _is_seen(token: Path, content: str) -> bool:
    """A network file system may take a moment."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        with suppress(OSError):
            if token.read_text() == content:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


# -- who meets whom -------------------------------------------------------------------------------


def ring(size: int) -> list[tuple[int, int]]:
    """Neighbours; two have one link between them."""
    if size <= 2:
        return [(0, 1)] if size == 2 else []
    return [(one, (one + 1) % size) for one in range(size)]


def tournament(size: int) -> list[tuple[int, int]]:
    """Every pair once, in the order of a round-robin tournament (the circle method): of each round
    no two pairs have a member in common."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    pairs = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        for one, other in zip(seats[:half], reversed(seats[half:])):
            if one is not None and other is not None:
                pairs.append((min(one, other), max(one, other)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return pairs


def disjoint_rounds(
    pairs: Iterable[tuple[int, int]], places: Sequence[Hashable]
) -> list[list[tuple[int, int]]]:
    """The pairs in rounds, in each of which a place is used by one pair at most."""
    rounds: list[tuple[set[Hashable], list[tuple[int, int]]]] = []
    for pair in pairs:
        used = {places[pair[0]], places[pair[1]]}
        for busy, members in rounds:
            if not busy & used:
                busy |= used
                members.append(pair)
                break
        else:
            rounds.append((used, [pair]))
    return [members for _, members in rounds]
