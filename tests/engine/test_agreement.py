"""Ranks that would not train the same thing are told apart before they begin."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.tiny_run import Configure

from fourfold.engine import agreement
from fourfold.engine.agreement import check_agreement, compare_hardware, facts_of
from fourfold.errors import UserError
from fourfold.mesh import Layout, connect

CPU = torch.device("cpu")


def told(facts_of_rank: dict[int, dict[str, str]]) -> list[str]:
    def join(rank: int) -> str:
        mesh = connect(Layout(dp=3), CPU, timeout_seconds=60)
        try:
            check_agreement(
                mesh, {"torch": "2.13", "Model.hidden_size": "32"} | facts_of_rank.get(rank, {})
            )
        except UserError as error:
            return str(error)
        finally:
            mesh.close()
        return ""

    return on_ranks(3, join)


def test_the_first_that_differs_is_named_on_every_rank() -> None:
    said = told({2: {"Model.hidden_size": "64"}})
    assert len(set(said)) == 1 and "rank 2 on" in said[0]
    assert "Model.hidden_size is 64 there and 32 here;" in said[0]


def test_several_differences_are_counted_and_missing_keys_are_differences() -> None:
    said = told({1: {"torch": "2.12", "Model.new_key": "1"}})[0]
    assert (
        "rank 1 on" in said and "torch is 2.12 there and 2.13 here (and 1 more difference" in said
    )


def test_equal_ranks_agree() -> None:
    assert told({}) == ["", "", ""]


def test_what_is_compared(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code, versions and every key; not where a machine keeps its files."""
    facts = facts_of(configure("run"))
    assert facts["Optimizer.lr.max_lr"] == "0.01" and facts["torch"] == torch.__version__
    assert not [name for name in facts if name.endswith(("cache_dir", "input_dir"))]
    assert facts["Engine.save_load.output_dir"]
    before = agreement.source_hash()
    agreement.source_hash.cache_clear()
    monkeypatch.setattr(agreement, "PACKAGE", agreement.PACKAGE / "engine")
    assert agreement.source_hash() != before
    agreement.source_hash.cache_clear()


def test_other_hardware_is_a_notice() -> None:
    def join(rank: int) -> list[str]:
        mesh = connect(Layout(dp=2), CPU, timeout_seconds=60)
        if rank == 1:
            agreement.hardware_of = lambda device: "an older CPU"  # type: ignore[assignment]
        said = compare_hardware(mesh, CPU)
        mesh.close()
        return said

    first, second = on_ranks(2, join)
    assert first == second and "an older CPU on" in first[0]
