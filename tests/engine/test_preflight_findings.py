"""What a preflight finds wrong, judged from synthetic figures, and who measures at once."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from helpers.ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.engine.findings import (
    Preflight,
    PreflightFinding,
    differences,
    slow_compute,
    slow_disks,
    slow_links,
    wrong_clocks,
)
from fourfold.engine.preflight import (
    disjoint_rounds,
    preflight,
    ring,
    tournament,
)
from fourfold.engine.probes import ComputeRate, DiskRate, LinkRate, RankFacts
from fourfold.mesh import Layout, connect
from fourfold.metrics.machines import machines_of

FACTS = RankFacts(0, 8.0, 1, "CPU", {"torch": "2.13", "the code of Fourfold": "aa"}, 10**10, 10**9)


def clean(hosts: int, seed: int = 0, links: str = "ring") -> Preflight:
    """One rank a host, everything about equal, as measuring on shared machines scatters it."""
    dice = random.Random(seed)

    def about(value: float) -> float:
        return value * dice.lognormvariate(0, 0.1)

    rows = [
        {"host": f"node{number}", "kernel": str(number), "network": number, "addresses": []}
        for number in range(hosts)
    ]
    pairs = ring(hosts) if links == "ring" else tournament(hosts)
    return Preflight(
        machines_of(rows),
        [FACTS] * hosts,
        [ComputeRate(about(3e10), about(3.5e10)) for _ in range(hosts)],
        {p: LinkRate(about(1e-4), about(1e9), about(1e9), about(1e-4), 2e-4) for p in pairs},
        {(min(p), max(p)): 0.0 for p in pairs},
        {machine: DiskRate(about(1e9), about(1e-3)) for machine in range(hosts)},
    )


def judged(found: Preflight) -> list[PreflightFinding]:
    return [
        *differences(found),
        *slow_compute(found),
        *slow_links(found),
        *slow_disks(found, Path("run")),
        *wrong_clocks(found),
    ]


def named(found: Preflight) -> set[tuple[str, str]]:
    return {(finding.what, finding.host) for finding in judged(found)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 16), st.sampled_from(["ring", "all"]))
def test_clean_machines_have_no_findings(seed: int, hosts: int, links: str) -> None:
    assert judged(clean(hosts, seed, links)) == []


@pytest.mark.parametrize("links", ["ring", "all"])
@pytest.mark.parametrize("hosts", [3, 4, 9])
@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("link rate", {"sent_per_second": 2e7}),
        ("link rate", {"received_per_second": 2e7}),
        ("link latency", {"latency_seconds": 0.004}),
    ],
)
def test_the_machine_with_a_bad_link_is_named(
    what: str, change: dict[str, float], hosts: int, links: str
) -> None:
    found = clean(hosts, links=links)
    for pair, link in found.links.items():
        if 1 in pair:
            found.links[pair] = replace(link, **change)  # type: ignore[arg-type]
    assert named(found) == {(what, "node1")}


def test_one_link_that_is_slow_alone_is_named_as_such() -> None:
    found = clean(4, links="all")
    found.links[1, 2] = replace(found.links[1, 2], latency_seconds=0.004)
    assert named(found) == {("link latency", "node1 - node2")}
    two = clean(2)
    two.links[0, 1] = replace(two.links[0, 1], sent_per_second=1e6)
    assert named(two) == {("link rate", "node0 - node1")}


def test_loss_disk_priority_processors_memory_and_clock() -> None:
    found = clean(4)
    found.lost |= {pair: 0.06 for pair in found.lost if 3 in pair}
    found.disks[2] = replace(found.disks[2], bytes_per_second=2e7)
    found.disks[1] = replace(found.disks[1], sync_seconds=0.3)
    found.facts = [
        replace(FACTS, nice=19),
        replace(FACTS, processors=2.0),
        replace(FACTS, memory_bytes=10**9),
        FACTS,
    ]
    for pair, link in found.links.items():
        if 0 in pair:
            ahead = 5.0 if pair[1] == 0 else -5.0
            found.links[pair] = replace(link, clock_offset_seconds=ahead)
    assert named(found) == {
        ("link loss", "node3"),
        ("disk", "node2"),
        ("disk", "node1"),
        ("priority", "node0"),
        ("processors", "node1"),
        ("memory", "node2"),
        ("clock", "node0"),
    }


def test_a_slow_processor_is_told_from_a_shared_one() -> None:
    found = clean(4)
    found.compute[1] = ComputeRate(1e10, 1.1e10)
    found.compute[2] = ComputeRate(1e10, 3.5e10)
    texts = {finding.host: finding.text for finding in slow_compute(found)}
    assert "times as slowly as the others" in texts["node1"]
    assert texts["node2"].startswith("something else uses the processors of node2")


def test_processes_that_share_a_machine_do_not_accuse_each_other() -> None:
    found = clean(4)
    found.machines = replace(found.machines, kernels=("same",) * 4)
    found.compute[1] = ComputeRate(5e9, 3.5e10)
    assert slow_compute(found) == []


def test_other_versions_are_named() -> None:
    found = clean(3)
    found.facts[2] = replace(FACTS, versions={"torch": "2.12", "the code of Fourfold": "bb"})
    assert [finding.text for finding in differences(found)] == [
        "rank 2 on node2 has another version of torch than the others: 2.12, theirs is 2.13",
        "the code of Fourfold is not the same on rank 2 on node2 as on the others: bb, theirs "
        "is aa",
    ]


# -- who measures at once -------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 12))
def test_in_a_tournament_everyone_meets_everyone_once(size: int) -> None:
    assert sorted(tournament(size)) == list(combinations(range(size), 2))
    rounds = disjoint_rounds(tournament(size), range(size))
    assert len(rounds) == (0 if size == 1 else size - 1 + size % 2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.data())
def test_a_machine_is_in_one_pair_of_a_round(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, 4), min_size=10, max_size=10))
    rounds = disjoint_rounds(pairs, places)
    assert sorted(pair for members in rounds for pair in members) == sorted(pairs)
    for members in rounds:
        used = [place for a, b in members for place in {places[a], places[b]}]
        assert len(used) == len(set(used))


# -- real ranks -----------------------------------------------------------------------------------


def test_every_rank_has_the_same_result(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[dict[str, object], list[str]]:
        import torch

        mesh = connect(Layout(dp=2), torch.device("cpu"))
        found = preflight(mesh, torch.device("cpu"), tmp_path, "full")
        mesh.close()
        return found.to_dict() | {"seconds": 0}, list(found.lines())

    (first, lines), (second, _) = on_ranks(2, work)
    assert first == second
    assert len(first["ranks"]) == 2 and len(first["links"]) == 1 and len(first["disks"]) == 1
    link = first["links"][0]  # type: ignore[index]
    assert 0 < link["latency_seconds"] < 10 and link["sent_per_second"] > 0
    assert math.isfinite(link["clock_offset_seconds"])
    assert lines[0].split()[:3] == ["rank", "host", "GFLOP/s"]
    assert not list(tmp_path.iterdir()), "what was written to time the disk is gone"


def test_links_of_a_machine_that_is_named_are_not_named_again() -> None:
    found = clean(4)
    found.lost |= {pair: 0.06 for pair in found.lost if 2 in pair}
    found.links[1, 2] = replace(found.links[1, 2], sent_per_second=1e6)
    assert named(found) == {("link loss", "node2")}
