"""Reports of processes to each other, through a store anyone on the network can write to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from fourfold import meeting
from fourfold.launch.diagnosis import Frame
from fourfold.launch.peers import (
    PeerExchange,
    PeerReport,
    RankState,
    RoundEnd,
    read_end,
    read_report,
)
from fourfold.meeting import MEETING, STORE_FILE, open_store

STATE = RankState(12, "forward_backward", 0.5, "S", True, (Frame("/a/b.py", 3, "wait"),))
REPORT = PeerReport("node1", 7, "token", "", {2: STATE, 3: RankState()}, True)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
)


def test_a_report_survives_the_way() -> None:
    assert read_report(REPORT.encode().encode()) == REPORT


@given(st.binary(max_size=200))
def test_any_bytes_are_read(data: bytes) -> None:
    read_report(data)
    assert read_end(data).lines


@given(st.sampled_from(sorted(json.loads(REPORT.encode()))), JSON)
def test_any_value_in_place_of_one_is_read(name: str, value: object) -> None:
    damaged = json.dumps(json.loads(REPORT.encode()) | {name: value}).encode()
    report = read_report(damaged)
    assert report is None or isinstance(report.ranks, dict)


def test_who_is_silent_is_whose_number_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.launch.peers.PULSE_SECONDS", 0.02)
    store = HashStore()
    one, two = PeerExchange(store, "a"), PeerExchange(store, "b")
    for exchange in (one, two):
        exchange.enter("round", lambda: {0: STATE})
    assert one.refresh() and two.refresh() and one.refresh()
    assert [report.host for report in one.present()] == ["a", "b"]
    assert one.silent([two.index], 0.5) == []
    two.close()
    time.sleep(0.4)
    one.refresh()
    assert one.silent([two.index], 0.2) == [two.index]
    assert one.seen[two.index].report.ranks[0].step == 12, "where it was is still known"
    one.close()


def test_the_first_to_say_why_a_round_ended_is_believed() -> None:
    store = HashStore()
    one, two = PeerExchange(store, "a"), PeerExchange(store, "b")
    for exchange in (one, two):
        exchange.enter("round", dict)
    assert one.post_end(RoundEnd(["first"], 2, 1, (7,))) == RoundEnd(["first"], 2, 1, (7,))
    assert two.post_end(RoundEnd(["second"])) == RoundEnd(["first"], 2, 1, (7,))
    two.enter("next", dict)
    assert two.refresh() and two.end is None
    for exchange in (one, two):
        exchange.close()


@pytest.fixture
def agent_store() -> TCPStore:
    """A store that outlives the ranks, as torchrun's does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_ranks_meet_whatever_their_launchers_have_counted(agent_store: TCPStore) -> None:
    """Also where ranks of an earlier start, which are gone, have left their words."""

    def join(counts: tuple[int, int], rank: int) -> str:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(agent_store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(counts[rank]),
        }
        os.environ.pop(STORE_FILE)
        store = open_store(rank, 2, 30.0)
        assert not store.check(["met"]), "nothing of an earlier start"
        store.set(f"here/{rank}", "")
        store.wait(["here/0", "here/1"])
        if rank == 0:
            store.set("met", "")
        return os.environ[MEETING]

    agent_store.set("fourfold/rounds/join/1", "a word of a rank that is gone")
    first = on_ranks(2, lambda rank: join((0, 0), rank))
    second = on_ranks(2, lambda rank: join((3, 1), rank))
    assert first[0] == first[1] != second[0] == second[1]


def test_a_rank_that_waits_says_for_whom(
    agent_store: TCPStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "FIRST_WORD_SECONDS", 0.1)

    def join(rank: int) -> None:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(agent_store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        os.environ.pop(STORE_FILE)
        time.sleep(0.6 * rank)
        open_store(rank, 2, 30.0)

    on_ranks(2, join)
    assert "waiting for 1 of 2 ranks at 127.0.0.1:" in capfd.readouterr().err


class Interrupted:
    """A store in which something happens after a note was found, before it is read."""

    def __init__(self, store: HashStore) -> None:
        self.store = store
        self.then: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        found: bool = self.store.check(keys)
        if found and keys[0].endswith("regroup") and self.then is not None:
            then, self.then = self.then, None
            then()
        return found


def test_a_round_that_ends_while_its_notes_are_read() -> None:
    """It neither waits for a note of no round, nor takes one into the next."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    interrupted = Interrupted(store)
    exchange = PeerExchange(interrupted, "node0")  # type: ignore[arg-type]
    exchange.enter("one", dict)
    exchange.mark("regroup", "now")
    assert exchange.marks == {"regroup": "now"}
    interrupted.then = partial(exchange.enter, "two", dict)
    assert exchange.refresh() and exchange.refresh()
    assert not exchange.broken and exchange.marks == {}
    report = read_report(store.get(f"fourfold/report/{exchange.index}"))
    assert report is not None and report.round == "two"
    exchange.close()
