"""Who is named a straggler, on synthetic timings of many ranks and machines."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.metrics.machines import Connection, RankMachines, links_of, machines_of, parse_info
from fourfold.metrics.stragglers import (
    BUSY,
    Bound,
    OwnTimes,
    Straggler,
    Stragglers,
    best_links,
    outliers,
)


def make_machines(hosts: int, ranks_each: int = 1) -> RankMachines:
    rows = [
        {"host": f"node{number}", "kernel": f"k{number}", "network": number, "addresses": []}
        for number in range(hosts)
        for _ in range(ranks_each)
    ]
    return machines_of(rows)


Draw = Callable[[int, int], OwnTimes]  # of a window and a rank


def looked(
    machines: RankMachines, draw: Draw, windows: int = 60, steps: int = 5, **given: object
) -> list[Straggler]:
    size = len(machines.of_rank)
    stages = given.pop("stages", [0] * size)
    watch = Stragglers(machines, stages, **given)  # type: ignore[arg-type]
    named = []
    for window in range(windows):
        named += watch.look([draw(window, rank) for rank in range(size)], steps)
    return named


def noisy(seed: int) -> Draw:
    """A step of 0.2 s, of which ranks are busy for about half: on shared cores this varies by tens
    of percent from window to window, and now and then by much more."""
    dice = random.Random(seed)

    def draw(window: int, rank: int) -> OwnTimes:
        busy = 0.1 * dice.lognormvariate(0, 0.2) * (3 if dice.random() < 0.05 else 1)
        return OwnTimes(0.2 + busy, 0.2, reader_seconds=0.001 * dice.lognormvariate(0, 0.5))

    return draw


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_noise_names_nobody(ranks: int) -> None:
    for seed in range(20):
        assert looked(make_machines(ranks), noisy(seed)) == [], seed


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(3, 12),
    factor=st.floats(4, 50),
    data=st.data(),
)
def test_a_slow_rank_is_named_and_no_other(
    seed: int, ranks: int, factor: float, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, ranks - 1))
    clean = noisy(seed)

    def draw(window: int, rank: int) -> OwnTimes:
        own = clean(window, rank)
        if rank != slow:
            return own
        busy = factor * own.busy_seconds
        return replace(own, batch_seconds=busy, communication_seconds=0.0)

    named = looked(make_machines(ranks), draw, windows=120)
    assert [(one.phase, one.rank, one.host) for one in named] == [("compute", slow, f"node{slow}")]
    assert named[0].text.startswith(f"rank {slow} on node{slow} holds the others up")


def test_a_rank_that_waits_for_a_processor_is_told_so() -> None:
    def draw(window: int, rank: int) -> OwnTimes:
        return OwnTimes(0.5, 0.4 if rank else 0.0, queued_seconds=0.0 if rank else 0.4)

    (named,) = looked(make_machines(4), draw)
    assert named.rank == 0 and "waits for a processor" in named.text


def test_one_bad_window_is_forgotten() -> None:
    def draw(window: int, rank: int) -> OwnTimes:
        bad = rank == 1 and window % 3 == 0
        return OwnTimes(1.0, 0.0 if bad else 0.9)

    assert looked(make_machines(4), draw) == []


def test_stages_are_compared_with_their_own() -> None:
    """The last stage has the head, and is busier; within it rank 3 is slow."""

    def draw(window: int, rank: int) -> OwnTimes:
        busy = {0: 0.1, 1: 0.1, 2: 0.19, 3: 0.6}[rank]
        return OwnTimes(0.7, 0.7 - busy)

    named = looked(make_machines(4), draw, stages=[0, 0, 1, 1])
    assert [one.rank for one in named] == [3]
    alone = looked(make_machines(2), draw, stages=[0, 1])
    assert alone == [], "twice the work is not a fault"


def test_a_stage_alone_that_becomes_slow_is_named() -> None:
    def draw(window: int, rank: int) -> OwnTimes:
        busy = 0.1 if rank == 0 or window < 10 else 0.5
        return OwnTimes(0.7, 0.7 - busy)

    assert [one.rank for one in looked(make_machines(2), draw, stages=[0, 1])] == [1]


def test_slow_samples_and_a_slow_disk_are_told_from_slow_computing() -> None:
    def draw(window: int, rank: int) -> OwnTimes:
        reader = 0.3 if rank == 2 else 0.001
        writing = 0.0 if window % 10 else (8.0 if rank == 1 else 0.2)
        return OwnTimes(0.5, 0.39 - reader, reader_seconds=reader, writing_seconds=writing)

    named = looked(make_machines(4), draw)
    assert {(one.phase, one.rank) for one in named} == {("data", 2), ("disk", 1)}


def test_a_gpu_that_lost_its_clock_is_named() -> None:
    def draw(window: int, rank: int) -> OwnTimes:
        return OwnTimes(0.5, product_seconds=1e-3 * (1.4 if rank == 5 else 1 + 0.01 * rank))

    named = looked(make_machines(2, 4), draw, on_gpu=True)
    assert [(one.phase, one.rank, one.host) for one in named] == [("compute", 5, "node1")]


# -- links ----------------------------------------------------------------------------------------


def linked(
    hosts: int,
    trip: Callable[[int, int, int], float],
    lost: Callable[[int, int, int], float],
    slowness: Callable[[int, int, int], float] = lambda *_: 1e-9,
) -> Draw:
    """Ranks on a ring, one a host: each sends to the next, and sees no other round trip."""

    def draw(window: int, rank: int) -> OwnTimes:
        trips, losses, rates = ([math.nan] * hosts for _ in range(3))
        after, before = (rank + 1) % hosts, (rank - 1) % hosts
        trips[after] = trip(window, rank, after)
        rates[after] = slowness(window, rank, after)
        for other in (after, before):
            losses[other] = lost(window, rank, other)
        return OwnTimes(0.5, 0.4, links=(*trips, *losses, *rates))

    return draw


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_the_machine_behind_a_slow_link_is_named(hosts: int) -> None:
    def trip(window: int, one: int, other: int) -> float:
        return 0.1 if 2 in (one, other) else 2e-4

    named = looked(make_machines(hosts), linked(hosts, trip, lambda *_: 0.0))
    assert [(one.phase, one.host, one.rank) for one in named] == [("link", "node2", None)]


def test_the_machine_that_loses_segments_is_named() -> None:
    def lost(window: int, one: int, other: int) -> float:
        return 0.04 if 1 in (one, other) else 0.0002

    named = looked(make_machines(4), linked(4, lambda *_: 2e-4, lost))
    assert [(one.phase, one.host) for one in named] == [("link", "node1")]


def test_the_machine_that_sends_and_receives_slowly_is_named() -> None:
    def slowness(window: int, one: int, other: int) -> float:
        return 5e-7 if 3 in (one, other) else 2e-9 * (1 + one)

    named = looked(make_machines(4), linked(4, lambda *_: 2e-4, lambda *_: 0.0, slowness))
    assert [(one.phase, one.host) for one in named] == [("link", "node3")]
    assert "sends 2.0 MB/s" in named[0].text


def test_a_machine_held_up_by_the_slow_one_before_it_is_not_named() -> None:
    """As measured on a ring of four in which every packet of node2 was late."""

    def slowness(window: int, one: int, other: int) -> float:
        return 2e-7 if 2 in (one, other) else 4e-8 if 3 in (one, other) else 3.6e-9

    named = looked(make_machines(4), linked(4, lambda *_: 2e-4, lambda *_: 0.0, slowness))
    assert [(one.phase, one.host) for one in named] == [("link", "node2")]


def test_one_link_between_two_machines_is_compared_with_itself() -> None:
    def trip(window: int, one: int, other: int) -> float:
        return 2e-4 if window < 20 else 0.2

    named = looked(make_machines(2), linked(2, trip, lambda *_: 0.0))
    assert [one.host for one in named] == ["node0 and node1"]


def test_late_acknowledgements_now_and_then_name_no_link() -> None:
    for seed in range(20):
        dice = random.Random(seed)

        def trip(window: int, one: int, other: int, dice: random.Random = dice) -> float:
            return 0.04 if dice.random() < 0.3 else 3e-4 * dice.lognormvariate(0, 0.5)

        named = looked(make_machines(4), linked(4, trip, lambda *_: 0.0), steps=1)
        assert named == [], seed


def test_links_have_the_worse_of_their_ends_and_machines_the_best_of_their_links() -> None:
    nan = math.nan
    links = links_of([[nan, 1.0, nan], [nan, nan, 5.0], [nan, 3.0, nan]], make_machines(3))
    assert links == {(0, 1): 1.0, (1, 2): 5.0}
    assert best_links(links) == {0: 1.0, 1: 1.0, 2: 5.0}


# -- parts ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=20), st.floats(1.1, 5))
def test_at_most_half_are_outliers_and_all_are_above_the_factor(
    values: list[float], factor: float
) -> None:
    found = outliers(dict(enumerate(values)), Bound(factor, 0.0))
    assert len(found) <= len(values) / 2
    assert all(values[key] > factor * middle for key, middle in found.items())


def test_equal_figures_and_a_single_one_have_no_outlier() -> None:
    assert outliers({0: 1.0, 1: 1.0}, BUSY) == {} == outliers({0: 9.0}, BUSY)


def test_rows_come_back_as_they_were_sent() -> None:
    own = OwnTimes(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, (8.0, 9.0))
    assert OwnTimes.of(own.values()) == own


def test_hosts_with_one_name_are_told_apart() -> None:
    rows = [
        {"host": "localhost", "kernel": kernel, "network": 1, "addresses": [address]}
        for kernel, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("a", "10.0.0.3"))
    ]
    machines = machines_of(rows)
    assert machines.hosts == ("localhost#0", "localhost#1") and machines.of_rank == (0, 1, 0)
    assert machines.by_address == {"10.0.0.1": 0, "10.0.0.3": 0, "10.0.0.2": 1}


@given(st.binary(max_size=300))
def test_any_bytes_of_a_kernel_are_read(info: bytes) -> None:
    found = parse_info(info)
    assert isinstance(found, Connection) and found.round_trip_seconds >= 0


def test_the_fields_of_tcp_info() -> None:
    info = bytearray(232)
    for place, value in ((68, 1500), (100, 3), (136, 70), (140, 30), (156, 60), (224, 2)):
        struct.pack_into("=I", info, place, value)
    for place, value in ((120, 10**10), (168, 9_000_000), (176, 2_000_000), (184, 1_000_000)):
        struct.pack_into("=Q", info, place, value)
    read = parse_info(bytes(info), 7, "a", "b")
    assert read == Connection(7, "a", "b", 0.0015, 100, 60, 5, 10**10, 6.0)
