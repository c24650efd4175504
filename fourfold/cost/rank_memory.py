"""Memory of every rank of a run's layout: parameters exactly, state and activations in bytes.

What the banner of a run and `fourfold layout` print. Counted from the network's table of
parameters by the rules by which ranks are built: stages by layer, slices by model parallelism, rows
by sharding. No rank has to run for it; tests compare it with the tensors of ranks that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.config import Config
from fourfold.cost.memory import memory_of
from fourfold.cost.workload import (
    MOMENT_BYTES,
    MUON_MOMENT_BYTES,
    Network,
    is_muons,
    software_of,
    spread_of,
)
from fourfold.device import is_cpu
from fourfold.mesh import Layout
from fourfold.model import ModelShape, table_of
from fourfold.model.params import Param
from fourfold.parallel import layout_of
from fourfold.parallel.precision import Precision
from fourfold.parallel.stages import count_stages, stages_here

FP32_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """One rank's; the bytes are those in the middle of a step, before anything is freed."""

    rank: int
    first_layer: int
    layers: int
    parameters: int  # that it holds
    counted: int  # of these, those no other rank counts: they add up to the model's
    weight_bytes: int
    master_bytes: int
    gradient_bytes: int
    moment_bytes: int
    activation_bytes: int
    ema_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        weights = self.weight_bytes + self.master_bytes + self.ema_bytes
        return weights + self.gradient_bytes + self.moment_bytes


def rank_memory(config: Config) -> list[RankMemory]:
    """Of all ranks of the configured layout, in their order."""
    rules = _Rules(config)
    return [rules.memory_of(rank) for rank in range(rules.layout.world_size)]


def memory_of_rank(config: Config, rank: int) -> RankMemory:
    return _Rules(config).memory_of(rank)


def recomputed_in_all(config: Config) -> int:
    """Layers of the whole network that are recomputed, where any are."""
    layout, model = layout_of(config), config.Model
    if model.recompute_method == "uniform":
        return model.num_layers
    stages = [stages_here(config, pp_rank).values() for pp_rank in range(layout.pp)]
    return sum(min(len(own), model.recompute_num_layers) for here in stages for own in here)


@dataclass(frozen=True)
class _Part:
    """One rank's part of a parameter."""

    numel: int  # of the slice that model parallelism leaves it, which a step computes with
    kept: int  # of the rows of that slice that sharding leaves it
    itemsize: int  # of a number as it is computed with
    moment_bytes: int  # that the optimizer keeps of a number
    is_counted: bool  # here, and not on another rank with the same


class _Rules:
    """How ranks are built, for all ranks of one configuration."""

    def __init__(self, config: Config) -> None:
        shape, precision = ModelShape.of(config.Model), Precision.of(config)
        self.layout = layout_of(config)
        sharded = self.layout.sharding > 1
        self.table = table_of(shape)
        self.itemsizes = {
            row.name: precision.weight_dtype(self.table, row.name, sharded=sharded).itemsize
            for row in self.table.rows
        }
        self.muon = config.Optimizer.name == "Muon"
        self.ema_itemsize = 0 if config.Optimizer.ema_decay is None else FP32_BYTES
        pipeline = range(self.layout.pp)
        self.stages = [stages_here(config, pp_rank) for pp_rank in pipeline]
        self.last_stage = count_stages(config) - 1
        self.activation_bytes = [_activation_bytes(config, shape, pp_rank) for pp_rank in pipeline]

    def memory_of(self, rank: int) -> RankMemory:
        layout, place = self.layout, self.layout.coordinates(rank)
        numbers = [number for own in self.stages[place["pp"]].values() for number in own]
        layer = [self._part(row, place) for row in self.table.layer()]
        parts = len(numbers) * layer + list(self._ends(place))
        kept = sum(part.kept for part in parts)
        weights, gradients = _weights_and_gradients(layout, parts, layer)
        # Unsharded, what is in fp32 anyway is its own master.
        masters = [part for part in parts if layout.sharding > 1 or part.itemsize < FP32_BYTES]
        return RankMemory(
            rank=rank,
            first_layer=min(numbers),
            layers=len(numbers),
            parameters=kept,
            counted=sum(part.kept for part in parts if part.is_counted),
            weight_bytes=weights,
            master_bytes=FP32_BYTES * sum(part.kept for part in masters),
            gradient_bytes=gradients,
            moment_bytes=sum(part.kept * part.moment_bytes for part in parts),
            ema_bytes=self.ema_itemsize * kept,
            activation_bytes=self.activation_bytes[place["pp"]],
        )

    def _part(self, row: Param, place: dict[str, int], *, is_copy: bool = False) -> _Part:
        shape, is_counted = list(row.shape), place["dp"] == 0 and not is_copy
        if row.split_dim is not None:
            start, stop = row.cut(place["mp"], self.layout.mp)
            shape[row.split_dim] = stop - start
        is_counted = (
            is_counted and place["mp"] % (self.layout.mp // row.pieces(self.layout.mp)) == 0
        )
        # Sharding cuts rows as torch.chunk does: the last ranks may have fewer, or none.
        rows, chunk = shape[0], -(-shape[0] // self.layout.sharding)
        own_rows = min(max(rows - place["sharding"] * chunk, 0), chunk)
        row_numel = math.prod(shape[1:])
        itemsize = self.itemsizes[row.name]
        moments = MUON_MOMENT_BYTES if self.muon and is_muons(row) else MOMENT_BYTES
        return _Part(rows * row_numel, own_rows * row_numel, itemsize, moments, is_counted)

    def _ends(self, place: dict[str, int]) -> Iterator[_Part]:
        """Embeddings, last norm and head, where this pipeline rank has an end of the network."""
        stages = self.stages[place["pp"]]
        if 0 in stages:
            yield from (self._part(row, place) for row in self.table.at("first"))
        if self.last_stage in stages:
            for row in self.table.at("last"):
                if not row.tied_to_head:
                    yield self._part(row, place)
                elif self.last_stage > 0:  # in one stage alone the head is the embedding itself
                    yield self._part(row, place, is_copy=True)


def _weights_and_gradients(
    layout: Layout, parts: list[_Part], layer: list[_Part]
) -> tuple[int, int]:
    """Bytes in the middle of a step; sharded weights are gathered, all or a layer at a time."""
    gathered, widest = _compute_bytes(parts), _compute_bytes(layer)
    kept = FP32_BYTES * sum(part.kept for part in parts)
    if layout.sharding == 1:
        return gathered, kept
    if layout.stage == 3:
        # The current layer and the next in flight, weights and gradients of each.
        return min(gathered, 2 * widest), kept + min(gathered, widest)
    whole = FP32_BYTES * sum(part.numel for part in parts)
    return gathered, kept + (whole if layout.stage == 1 else widest)


def _compute_bytes(parts: list[_Part]) -> int:
    return sum(part.numel * part.itemsize for part in parts)


def _activation_bytes(config: Config, shape: ModelShape, pp_rank: int) -> int:
    """What the forward pass keeps, and the logits: the price that `fourfold plan` names too."""
    network = Network.of(shape, config.Data.dataset.max_seq_len)
    software = software_of(config, on_cpu=is_cpu(config.Global.device))
    price = memory_of(network, spread_of(config), software, pp_rank)
    return int(price["activations"] + price["logits"])
