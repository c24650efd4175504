"""Ranks find each other: the groups they make, how long they wait, and what they refuse."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks

from fourfold import heartbeat, mesh
from fourfold.device import select_device
from fourfold.errors import RunError, UserError
from fourfold.mesh import Layout, connect

CPU = torch.device("cpu")


@pytest.mark.parametrize("other", [Layout(mp=4), Layout(dp=2, sharding=2, stage=3)])
def test_different_layouts_are_named_on_every_rank(other: Layout) -> None:
    usual = Layout(dp=2, sharding=2)

    def join(rank: int) -> str:
        try:
            connect(other if rank == 2 else usual, torch.device("cpu"), timeout_seconds=60)
        except UserError as error:
            return str(error)
        return "joined"

    said = on_ranks(4, join)
    assert all(f"rank 2 has the layout {other}" in text for text in said), said
    assert all("the same configuration" in text for text in said)


def test_equal_layouts_join() -> None:
    def join(rank: int) -> str:
        mesh = connect(Layout(dp=2), torch.device("cpu"), timeout_seconds=60)
        mesh.close()
        return str(mesh.layout)

    assert on_ranks(2, join) == [str(Layout(dp=2))] * 2


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Layout(dp=2), 1),
        (Layout(pp=2), 1),
        (Layout(dp=2, mp=2), 3),
        (Layout(dp=2, pp=2), 3),
        (Layout(pp=4), 2),
        (Layout(dp=2, sharding=2, mp=2), 4),
    ],
    ids=str,
)
def test_a_rank_makes_only_groups_of_its_own_and_all_have_the_timeout(
    layout: Layout, groups: int
) -> None:
    """The world, and one for each axis that is on and does not span it."""

    def join(rank: int) -> list[timedelta]:
        joined = connect(layout, CPU, timeout_seconds=77)
        for axis in layout.axes:
            group = joined.group(axis)
            assert dist.get_process_group_ranks(group) in layout.columns(axis)
            assert joined.axis(axis).get_group() is group
        if joined.tied_embedding_group is not None:
            ends = dist.get_process_group_ranks(joined.tied_embedding_group)
            assert [layout.coordinates(end)["pp"] for end in ends] == [0, layout.pp - 1]
        made = dist.distributed_c10d._world.pg_map
        timeouts = [group._get_backend(CPU).options._timeout for group in made]
        # Ranks in the middle are ready sooner; none leaves while others still make a group.
        joined.all_reduce(1.0)
        joined.close()
        return timeouts

    for rank, timeouts in enumerate(on_ranks(layout.world_size, join)):
        is_end = layout.coordinates(rank)["pp"] in (0, layout.pp - 1)
        assert set(timeouts) == {timedelta(seconds=77)}
        assert len(timeouts) == (groups if is_end else groups - 1)


def test_where_groups_are_split_off_there_is_one_call_for_an_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As nccl does it, in a single call that every rank takes part in."""
    asked: list[tuple[list[list[int]], timedelta]] = []

    class World:
        bound_device_id = torch.device("cuda", 0)

        def _get_backend(self, device: torch.device) -> World:
            return self

        supports_splitting = True

    def split_group(split_ranks: list[list[int]], timeout: timedelta) -> None:
        asked.append((split_ranks, timeout))

    monkeypatch.setattr(mesh, "_world", World)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(mesh.DeviceMesh, "from_group", lambda *given, **named: None)
    mesh.Mesh(Layout(dp=2, pp=3, mp=2), rank=3, timeout_seconds=9)
    data, pipeline, model, ends = asked
    assert data[0] == [[place, place + 6] for place in range(6)]
    assert pipeline[0] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert model[0] == [[rank, rank + 1] for rank in range(0, 12, 2)]
    assert ends[0] == [[0, 4], [1, 5], [6, 10], [7, 11]]
    assert {timeout for _, timeout in asked} == {timedelta(seconds=9)}


# -- waiting ------------------------------------------------------------------------------------


def be_busy(seconds: float) -> None:
    """Longer than any collective would wait, and with signs of life."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        heartbeat.alive()
        time.sleep(0.05)


# Long enough to meet on a machine that has much else to do.
PATIENCE_SECONDS = 3.0


def test_ranks_wait_for_one_that_makes_progress() -> None:
    """In turn, rank 0 does what takes long, and the others wait; then it waits for them."""

    def work(rank: int) -> str:
        joined = connect(Layout(dp=3), CPU, PATIENCE_SECONDS)
        joined.rank_0_first(lambda: be_busy(PATIENCE_SECONDS + 1.5) if rank < 2 else None)
        joined.close()
        return "done"

    assert on_ranks(3, work) == ["done"] * 3


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it() -> None:
    def work(rank: int) -> str:
        joined = connect(Layout(dp=3), CPU, PATIENCE_SECONDS)
        if rank == 1:
            be_busy(PATIENCE_SECONDS + 1)
            time.sleep(3 * PATIENCE_SECONDS)
            return ""
        try:
            joined.broadcast_first(None)
        except RunError as error:
            return str(error)
        raise AssertionError("rank 1 never came")

    first, _, last = on_ranks(3, work)
    assert first == "rank 0 timed out waiting for rank 1: no sign of life for 3 s"
    assert last == "rank 2 timed out waiting for rank 1: no sign of life for 3 s"


@pytest.mark.slow
def test_an_error_of_the_first_rank_reaches_those_that_wait() -> None:
    def work(rank: int) -> str:
        def open_data() -> None:
            be_busy(PATIENCE_SECONDS + 1.5)
            raise UserError("the data is damaged")

        joined = connect(Layout(dp=2), CPU, PATIENCE_SECONDS)
        with pytest.raises(UserError) as raised:
            joined.rank_0_first(open_data)
        return str(raised.value)

    assert on_ranks(2, work) == ["the data is damaged", "rank 0: the data is damaged"]


# -- GPUs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "visible", "index"),
    [
        ({}, 1, 0),
        ({"LOCAL_RANK": "2"}, 4, 2),
        ({"LOCAL_RANK": "3", "SLURM_PROCID": "3"}, 1, 0),
        ({"LOCAL_RANK": "3", "FOURFOLD_STORE": "/s"}, 1, None),
        ({"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "r"}, 1, None),
        ({"LOCAL_RANK": "3", "SLURM_PROCID": "3"}, 2, 1),
        ({"LOCAL_RANK": "4", "TORCHELASTIC_RUN_ID": "r"}, 4, None),
    ],
)
def test_the_gpu_of_a_process_is_among_those_it_sees(
    variables: dict[str, str], visible: int, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "FOURFOLD_STORE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    if index is not None:
        assert select_device("gpu") == torch.device("cuda", index)
        return
    with pytest.raises(UserError, match=rf"finds {visible} GPU\(s\), and each process needs one"):
        select_device("gpu")


def test_one_gpu_for_two_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(rank: int) -> str:
        mesh._gpu_identity = lambda device: 7 if rank else 9  # type: ignore[assignment]
        try:
            connect(Layout(dp=3), CPU, timeout_seconds=60)
        except UserError as error:
            return str(error)
        return "joined"

    assert all("ranks 1 and 2 have the same GPU" in said for said in on_ranks(3, join))
