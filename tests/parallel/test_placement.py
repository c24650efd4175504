"""Where ranks are: which machines, in which order, and how gloo reaches them."""

from __future__ import annotations

import os
import socket

import pytest
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import FileStore, Store

from fourfold import placement
from fourfold.errors import UserError
from fourfold.mesh import Layout
from fourfold.placement import (
    Placement,
    RankPlace,
    changes_machine_and_returns,
    place_ranks,
    spread_groups,
)


def test_groups_inside_machines_are_not_worth_a_word() -> None:
    groups = Layout(dp=2, mp=2).columns("mp")
    assert spread_groups(["a", "a", "b", "b"], groups) == []
    assert spread_groups(["a", "b"], Layout(dp=2).columns("mp")) == []


def test_ranks_dealt_out_in_turn_are_noticed() -> None:
    (said,) = spread_groups(["a", "b", "a", "b"], Layout(dp=2, mp=2).columns("mp"))
    assert "2 of 2 model-parallel groups span machines (ranks 0, 1 are on a and b)" in said
    assert "srun --distribution=block" in said


def test_groups_larger_than_a_machine_are_noticed() -> None:
    (said,) = spread_groups(["a", "a", "b", "b"], Layout(mp=4).columns("mp"))
    assert "1 of 1" in said and "groups of 4 ranks fit the 2 of a machine" in said


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_only_ranks_that_are_sorted_by_machine_are_in_order(hosts: list[str]) -> None:
    first = {host: hosts.index(host) for host in hosts}
    assert changes_machine_and_returns(hosts) == (hosts != sorted(hosts, key=first.__getitem__))


def outcome(
    rank: int, size: int, place: RankPlace, groups: list[list[int]]
) -> tuple[Placement | str, str | None]:
    """What a rank that believes to be at `place` learns."""
    placement._own_place = lambda gpu: place  # type: ignore[assignment]
    store: Store = FileStore(os.environ["FOURFOLD_STORE"], size)
    try:
        learned: Placement | str = place_ranks(store, rank, size, groups)
    except UserError as error:
        learned = str(error)
    return learned, os.environ.get(placement.INTERFACE)


def test_machines_are_named_with_their_ranks_and_addresses() -> None:
    def work(rank: int) -> tuple[Placement | str, str | None]:
        placement._is_loopback = lambda address: False  # type: ignore[assignment]
        host = rank // 2
        place = RankPlace(f"node{host}", "boot", f"127.0.0.{host + 2}", None, None, 0)
        return outcome(rank, 4, place, [[0, 1], [2, 3]])

    notice = "2 machines: node0 (ranks 0-1 at 127.0.0.2), node1 (ranks 2-3 at 127.0.0.3)"
    for learned, interface in on_ranks(4, work):
        assert isinstance(learned, Placement) and interface is None
        assert learned.notices == [notice] and learned.warnings == []


def test_one_machine_is_not_worth_a_word() -> None:
    def work(rank: int) -> tuple[Placement | str, str | None]:
        return outcome(
            rank, 2, RankPlace("localhost", "boot", "127.0.0.1", None, None, 0), [[0, 1]]
        )

    assert on_ranks(2, work)[1][0] == Placement(["localhost"] * 2, [], [])


def test_a_machine_that_cannot_be_reached_ends_every_rank_with_its_name() -> None:
    def work(rank: int) -> tuple[Placement | str, str | None]:
        placement._is_loopback = lambda address: False  # type: ignore[assignment]
        if rank == 2:  # the leader of node1 listens elsewhere
            placement._listen = lambda own: socket.create_server(("127.0.0.9", 0))
        host = rank // 2
        place = RankPlace(f"node{host}", "boot", f"127.0.0.{host + 2}", None, None, 0)
        return outcome(rank, 4, place, [])

    said = {learned for learned, _ in on_ranks(4, work)}
    assert len(said) == 1
    assert "node0 cannot reach node1 at 127.0.0.3" in str(said.pop())


@pytest.mark.parametrize(
    ("chosen", "addresses", "said"),
    [
        (None, {"lo": "127.0.0.1"}, "node0 has no address that other machines could reach"),
        ("eth9", {"eth0": "10.0.0.1"}, "GLOO_SOCKET_IFNAME=eth9 on node0"),
    ],
)
def test_a_machine_without_an_interface_says_what_to_set(
    chosen: str | None, addresses: dict[str, str], said: str
) -> None:
    def work(rank: int) -> tuple[Placement | str, str | None]:
        placement._addresses = lambda: addresses  # type: ignore[assignment]
        placement._is_loopback = lambda address: address == "127.0.1.1"  # type: ignore[assignment]
        name, address = (f"node{rank}", "127.0.0.5" if rank else "127.0.1.1")
        own = None if chosen and rank == 0 else address
        return outcome(rank, 2, RankPlace(name, "boot", own, None, None if rank else chosen, 0), [])

    for learned, _ in on_ranks(2, work):
        assert isinstance(learned, str) and said in learned


def test_the_interface_towards_the_others_is_chosen_where_a_name_is_the_loopbacks() -> None:
    """As on Debian, whose /etc/hosts gives a machine's own name the address 127.0.1.1."""

    def work(rank: int) -> tuple[Placement | str, str | None]:
        placement._is_loopback = lambda address: address == "127.0.1.1"  # type: ignore[assignment]
        place = RankPlace(f"node{rank}", "boot", "127.0.1.1", "127.0.0.1", None, 0)
        return outcome(rank, 2, place, [])

    for learned, interface in on_ranks(2, work):
        assert isinstance(learned, Placement), learned
        assert interface == "lo", "the one with the address on the way to the others"
        assert "node0: its own name resolves to 127.0.1.1" in learned.warnings[0]


def test_two_ranks_with_one_gpu_hear_of_it_before_nccl_does() -> None:
    def work(rank: int) -> tuple[Placement | str, str | None]:
        return outcome(rank, 3, RankPlace("a", "boot", None, None, None, 7 if rank else 9), [])

    for learned, _ in on_ranks(3, work):
        assert "ranks 1 and 2 have the same GPU" in str(learned)


def test_the_addresses_of_this_machine() -> None:
    assert placement._addresses()["lo"] == "127.0.0.1"
    assert placement._address_towards("127.0.0.1") == "127.0.0.1"
    assert placement._interface_with("127.0.0.1") == "lo"
    assert placement._address_towards("") is None
    assert placement._first_bindable("127.0.0.1") == "127.0.0.1"
