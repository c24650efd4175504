"""A network that exists only here is trained, saved, planned and merged like the one we have.

It has another block, other names, no biases, no table of positions and a head of its own. Its table
and its block are all that is written for it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.layout_table import Case
from helpers.rank_tensors import counted_ranks
from helpers.traces import SAVED_STEP, Workshop, deviation, relative, whole
from torch import Tensor, nn

from fourfold import checkpoint, model
from fourfold.config import Config
from fourfold.cost.memory import stage_parameters
from fourfold.cost.rank_memory import rank_memory
from fourfold.cost.workload import spread_of, workload_of
from fourfold.model import GPT, ModelShape, ParamTable, count_parameters
from fourfold.model.gpt import CoreAttention
from fourfold.model.layers import LayerNorm, Linear
from fourfold.model.params import Param, linear_rows, norm_rows
from fourfold.plan.dry_run import dry_run


@cache
def table(shape: ModelShape) -> ParamTable:
    width, wide, std = shape.hidden_size, shape.ffn_hidden_size, shape.initializer_range
    word = Param(
        "embeddings.word.weight",
        (shape.vocab_size, width),
        "embedding",
        "normal",
        std,
        split_dim=0,
        end="first",
    )
    head = Param(
        "head.weight",
        (shape.vocab_size, width),
        "linear",
        "normal",
        std,
        split_dim=0,
        end="last",
    )
    rows = [
        word,
        *norm_rows("layers.*.before.", width, bias=False),
        *linear_rows("layers.*.look.", 3 * width, width, std, 0, bias=False, rows_by_head=True),
        *linear_rows("layers.*.tell.", width, width, std, 1, bias=False),
        *linear_rows("layers.*.gate.", wide, width, std, 0, bias=False),
        *linear_rows("layers.*.think.", wide, width, std, 0, bias=False),
        *linear_rows("layers.*.write.", width, wide, std, 1, bias=False),
        *norm_rows("norm.", width, bias=False, end="last"),
        head,
    ]
    return ParamTable(rows, shape.num_layers)


class ParallelBlock(nn.Module):
    """Attention and a gated feed-forward network side by side, behind one norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, wide = shape.hidden_size, shape.ffn_hidden_size
        self.head_size = shape.head_size
        self.before = LayerNorm(width, eps=1e-5, bias=False)
        self.look = Linear(width, 3 * width, fused=True, bias=False)
        self.core = CoreAttention(0.0)
        self.tell = Linear(width, width, fused=True, bias=False)
        self.gate = Linear(width, wide, fused=True, bias=False)
        self.think = Linear(width, wide, fused=True, bias=False)
        self.write = Linear(wide, width, fused=True, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, turns: Tensor | None = None) -> Tensor:
        seen = self.before(x)
        qkv = self.look(seen)
        B, T, _ = qkv.shape
        q, k, v = qkv.view(B, T, -1, 3, self.head_size).transpose(1, 2).unbind(3)
        mixed = self.core(q, k, v, mask).transpose(1, 2).reshape(B, T, -1)
        return x + self.tell(mixed) + self.write(F.silu(self.gate(seen)) * self.think(seen))


class SecondNetwork(GPT):
    parameter_table = staticmethod(table)
    block = ParallelBlock
    final_norm = staticmethod(lambda shape: LayerNorm(shape.hidden_size, eps=1e-5, bias=False))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("second_network"))


@pytest.fixture(autouse=True)
def second_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.NETWORKS, "GPT", SecondNetwork)


slow = pytest.mark.slow
LAYOUTS = [
    "pp2 sh2 stage3 mp2 sp",
    pytest.param("mp2 sp", marks=slow),
    pytest.param("pp2", marks=slow),
    pytest.param("sh2 stage3", marks=slow),
    pytest.param("dp2", marks=slow),
    pytest.param("mp2", marks=slow),
    pytest.param("pp2 zbv", marks=slow),
    pytest.param("pp2 sh2 stage3 mp2", marks=slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_as_one_process_does(layout: str, workshop: Workshop) -> None:
    case = Case(layout)
    (reference,), traces = workshop.reference(case), workshop.trace(case)
    expected = whole([reference.initial])
    assert set(expected) == set(table(shape_of(workshop.config(1, "shape", []))).shapes)
    initial = whole(trace.initial for trace in traces)
    assert all(np.array_equal(initial[name], tensor) for name, tensor in expected.items())
    scalars, tensors = case.tolerances
    assert relative(traces[0].losses, reference.losses) < scalars
    assert relative(traces[0].norms, reference.norms) < scalars
    gradients = whole(trace.gradients for trace in traces)
    assert deviation(gradients, whole([reference.gradients])) < tensors
    weights = whole(trace.weights for trace in traces)
    assert deviation(weights, whole([reference.weights])) < tensors


def shape_of(config: Config) -> ModelShape:
    return ModelShape.of(config.Model)


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        ("pp2 sh2 stage3 mp2 sp", "sh2 stage3"),
        pytest.param("sh2 stage3", "pp2", marks=slow),
        pytest.param("pp2", "mp2 sp", marks=slow),
    ],
)
def test_resumes_under_another_layout(saved: str, layout: str, workshop: Workshop) -> None:
    case = Case(layout)
    (reference,), traces = workshop.reference(case), workshop.resumed(Case(saved), case)
    scalars, tensors = case.tolerances
    assert relative(traces[0].losses, reference.losses[SAVED_STEP:]) < scalars
    weights = whole(trace.weights for trace in traces)
    assert deviation(weights, whole([reference.weights])) < tensors


def test_a_checkpoint_is_merged(workshop: Workshop, tmp_path: Path) -> None:
    case = Case("pp2 sh2 stage3 mp2 sp")
    workshop.trace(case)
    saved = workshop.folder / workshop.place(case) / f"step_{SAVED_STEP}"
    checkpoint.merge(saved, tmp_path / "merged")
    names = checkpoint.tensor_names(tmp_path / "merged")
    shapes = table(shape_of(workshop.config(1, "shape", []))).shapes
    assert {f"model.{name}" for name in shapes} <= set(names)
    both = []
    for where in (saved, tmp_path / "merged"):
        found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
        checkpoint.load(where, found)
        both.append(found)
    assert all(torch.equal(both[0][name], both[1][name]) for name in names)


@pytest.mark.parametrize("layout", ["dp1", "mp2 sp", "pp2", "pp2 sh2 stage3 mp2 sp"])
def test_is_counted_and_priced(layout: str, workshop: Workshop) -> None:
    case = Case(layout)
    config = workshop.config(case.world, "planned", case.overrides())
    shape = shape_of(config)
    with torch.device("meta"):
        assert count_parameters(shape) == sum(p.numel() for p in SecondNetwork(shape).parameters())
    ranks = rank_memory(config)
    assert ranks == counted_ranks(config)
    assert sum(rank.counted for rank in ranks) == count_parameters(shape)
    workload, spread = workload_of(config), spread_of(config)
    assert workload.parameters == count_parameters(shape)
    for rank in range(case.world):
        ran = dry_run(config, rank)
        place = ran.layout.coordinates(rank)
        planned = stage_parameters(workload.network, spread, place["pp"], place["mp"])
        assert ran.parameters == int(planned)
