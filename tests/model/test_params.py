"""The table of parameters says what the network has."""

from __future__ import annotations

import pytest
import torch

from fourfold.model import ModelShape, count_parameters, network_of, table_of
from fourfold.model.params import split_range

SHAPES = [
    ModelShape(96, 32, 2, 4, 64, 24),
    ModelShape(101, 24, 3, 2, 96, 16, depth_scaled_init=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["two layers", "three layers"])
def test_the_table_has_the_parameters_of_the_network(shape: ModelShape) -> None:
    with torch.device("meta"):
        network = network_of(shape)(shape)
    parameters = {name: tuple(p.shape) for name, p in network.named_parameters()}
    assert list(table_of(shape).shapes.items()) == list(parameters.items())
    assert count_parameters(shape) == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2, 3)], ids=str)
def test_a_part_has_what_the_table_gives_its_place(layers: range) -> None:
    shape = SHAPES[1]
    with torch.device("meta"):
        part = network_of(shape)(shape, layers)
    table = table_of(shape)
    expected = {row.of_layer(number) for row in table.layer() for number in layers}
    expected |= {row.name for row in table.at("first") if part.is_first}
    expected |= {row.name for row in table.at("last") if part.is_last}
    assert {name for name, _ in part.named_parameters()} == expected


def test_biases_and_norms_do_not_decay() -> None:
    table = table_of(SHAPES[0])
    spared = {name for name, row in table if not row.weight_decay}
    assert spared == {name for name in table.shapes if name.endswith(".bias") or "norm" in name}


def test_a_table_is_read_by_the_name_in_any_layer() -> None:
    table = table_of(SHAPES[0])
    assert table["layers.7.attn.qkv.weight"] is table["layers.*.attn.qkv.weight"]
    assert "layers.0.attn.qkv.weight" in table and "layers.0.attn.qkv.weights" not in table
    with pytest.raises(KeyError):
        table["attn.qkv.weight"]


@pytest.mark.parametrize(("size", "degree"), [(8, 2), (7, 3), (2, 4), (101, 8)])
def test_slices_make_up_the_whole_and_the_first_are_the_longer(size: int, degree: int) -> None:
    slices = [split_range(size, rank, degree) for rank in range(degree)]
    assert [start for start, _ in slices[1:]] == [stop for _, stop in slices[:-1]]
    assert (slices[0][0], slices[-1][1]) == (0, size)
    lengths = [stop - start for start, stop in slices]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
