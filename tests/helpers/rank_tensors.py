"""What a rank holds, counted from its tensors: what the formulas of `fourfold/cost` must say."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fourfold.config import Config
from fourfold.cost.memory import memory_of
from fourfold.cost.rank_memory import RankMemory
from fourfold.cost.workload import Network, software_of, spread_of
from fourfold.device import is_cpu
from fourfold.mesh import fake_mesh
from fourfold.model import GPT, ModelShape
from fourfold.optim import build_optimizer
from fourfold.parallel import Runner, layout_of, parallelize
from fourfold.shards import local


def counted_ranks(config: Config) -> list[RankMemory]:
    """Every rank of the configured layout, built one after the other in this process, on the meta
    device and a process group that is not there."""
    layout, ranks = layout_of(config), []
    for rank in range(layout.world_size):
        with fake_mesh(layout, rank) as mesh:
            runner = parallelize(config, mesh, torch.device("meta"))
            ranks.append(counted_rank(config, runner))
    return ranks


def counted_rank(config: Config, runner: Runner) -> RankMemory:
    mesh, layout, shards = runner.mesh, runner.mesh.layout, runner.shards.values()
    # What a step computes with: gathered over the sharding ranks, all of it or a layer at a time.
    gathered = sum(_compute_bytes(name, p, runner) for name, p in runner.parameters.items())
    widest = max(_widest_layer(part, runner) for part in runner.parts)
    separate = [one for key, one in runner.masters.items() if one is not runner.parameters[key]]
    in_fp32 = _local_bytes(runner.masters.values())
    weights, masters, gradients = gathered, in_fp32, in_fp32
    if runner.sharding is None:
        weights, masters = _local_bytes(runner.parameters.values()), _local_bytes(separate)
    elif layout.stage == 3:
        weights, gradients = min(gathered, 2 * widest), in_fp32 + min(gathered, widest)
    elif layout.stage == 2:
        gradients = in_fp32 + widest
    else:
        gradients = in_fp32 + 4 * sum(p.numel() for p in runner.parameters.values())
    numbers = [int(number) for part in runner.parts for number in part.layers]
    network = Network.of(ModelShape.of(config.Model), config.Data.dataset.max_seq_len)
    software = software_of(config, on_cpu=is_cpu(config.Global.device))
    price = memory_of(network, spread_of(config), software, mesh.coordinates["pp"])
    optimizer = build_optimizer(config, runner)
    return RankMemory(
        rank=mesh.rank,
        first_layer=min(numbers),
        layers=len(numbers),
        parameters=sum(shard.local.numel() for shard in shards),
        counted=sum(shard.local.numel() for shard in shards if shard.owns_norm),
        weight_bytes=weights,
        master_bytes=masters,
        gradient_bytes=gradients,
        moment_bytes=_local_bytes(optimizer.named_moments().values()),
        activation_bytes=int(price["activations"] + price["logits"]),
        ema_bytes=0 if optimizer.ema is None else _local_bytes(optimizer.ema.values.values()),
    )


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.itemsize for tensor in tensors)


def _compute_bytes(name: str, parameter: Tensor, runner: Runner) -> int:
    """Of the whole tensor a step computes with; a DTensor's size is that of all its shards."""
    sharded = runner.sharding is not None
    return (
        parameter.numel()
        * runner.precision.weight_dtype(runner.table, name, sharded=sharded).itemsize
    )


def _widest_layer(part: GPT, runner: Runner) -> int:
    return max(
        sum(_compute_bytes(n, p, runner) for n, p in layer.named_parameters(f"layers.{number}"))
        for number, layer in part.layers.items()
    )
