"""Ranks that were given different layouts find out before they wait for each other."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

from fourfold.errors import UserError
from fourfold.mesh import Layout, connect


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
