"""`Engine.layer_norms`: the norm of the gradient by group of layers, the same on every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.layout_runs import Runs
from helpers.layout_table import NETWORKS

from fourfold.engine import Engine
from fourfold.metrics import read_jsonl
from fourfold.metrics.prometheus import NewestNumbers
from fourfold.metrics.trackers import scalars
from fourfold.model import ModelShape
from fourfold.model.gpt_table import gpt_parameters
from fourfold.trace import gradient_norms
from fourfold.trace.step_report import by_layer

ON = ("Engine.layer_norms=True", "Engine.max_steps=3", "Engine.logging_freq=1")


def measure(engine: Engine) -> None:
    engine.fit(save=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layer_norms"))


def records(runs: Runs, layout: str, name: str, *overrides: str) -> list[dict[str, Any]]:
    if not (runs.folder / name).exists():
        runs.on_ranks(layout, name, measure, *ON, *overrides)
    file = runs.folder / name / "metrics.jsonl"
    return [record for record in read_jsonl(file) if record["kind"] == "train"]


# -- against one process --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dp2", "mp2", "pp2", "sh2 stage2", "sh2 stage3"])
def test_every_layout_has_the_norms_of_one_process(runs: Runs, layout: str) -> None:
    alone, shared = records(runs, "dp1", "one"), records(runs, layout, layout)
    assert [record["step"] for record in shared] == [1, 2, 3]
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours["layer_norms"] == pytest.approx(theirs["layer_norms"], rel=1e-5)
        assert [*ours["layer_norms"]] == ["embeddings", *(f"layers.{n}" for n in range(4)), "norm"]


def test_a_head_of_its_own_is_a_group(runs: Runs) -> None:
    """At the ends of a V-shaped pipeline, in mixed precision with a loss scale."""
    llama, half = NETWORKS["llama"], "Engine.mix_precision.dtype=float16"
    alone = records(runs, "dp1", "llama", *llama)
    shared = records(runs, "pp2 zbv", "llama_pp2", *llama, half, "Engine.logging_freq=2")
    assert [record["step"] for record in shared] == [2]  # nothing between records
    for ours, theirs in zip(shared, alone[1:]):
        assert [*ours["layer_norms"]][-2:] == ["norm", "head"]
        assert ours["layer_norms"] == pytest.approx(theirs["layer_norms"], rel=2e-2)


def test_they_are_the_norms_of_the_parameters_and_add_up(runs: Runs) -> None:
    (norms,) = runs.on_ranks("dp1", "by_hand", first_norms)
    first = records(runs, "dp1", "one")[0]
    assert first["layer_norms"] == pytest.approx(norms, rel=1e-6)
    squares = sum(value * value for value in first["layer_norms"].values())
    assert math.sqrt(squares) == pytest.approx(first["grad_norm"], rel=1e-9)


def first_norms(engine: Engine) -> dict[str, float]:
    engine.runner.run(engine.data.loaders["train"].batch(0), 1)
    return by_layer(gradient_norms(engine.runner))


@pytest.mark.slow
def test_they_change_no_number_of_the_run(runs: Runs) -> None:
    """Four ranks, whose sums depend on the order in which they are added up."""
    names = ("loss", "grad_norm")
    on = records(runs, "dp2 mp2", "four")
    off = records(runs, "dp2 mp2", "four_off", "Engine.layer_norms=False")
    assert [[r[n] for n in names] for r in on] == [[r[n] for n in names] for r in off]
    assert all(record["layer_norms"] is None for record in off)


# -- groups ---------------------------------------------------------------------------------------


def test_many_layers_share_groups() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 4, "num_attention_heads": 1, "ffn_hidden_size": 8}
    shape = ModelShape(**sizes, num_layers=97, max_position_embeddings=4)
    table = gpt_parameters(shape)
    groups = table.layer_groups(16)
    assert [*groups] == [name for name, _ in table]
    names = [*dict.fromkeys(groups.values())]
    assert names[:3] == ["embeddings", "layers.0-6", "layers.7-13"]
    assert names[-2:] == ["layers.91-96", "norm"] and len(names) == 14 + 2
    assert groups["layers.13.mlp.up.weight"] == "layers.7-13"


# -- where they are shown -------------------------------------------------------------------------


def test_trackers_and_prometheus_have_them(runs: Runs) -> None:
    record = records(runs, "dp1", "one")[-1]
    norms = record["layer_norms"]
    shown = scalars(record)
    assert {f"grad_norm/{name}": value for name, value in norms.items()}.items() <= shown.items()
    numbers = NewestNumbers(None, 0)
    numbers.take(record)
    (family,) = (m for m in numbers.collect() if m.name == "fourfold_layer_gradient_norm")
    assert {sample.labels["layers"]: sample.value for sample in family.samples} == norms
