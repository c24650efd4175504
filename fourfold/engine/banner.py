"""The banner: what a run derived from its configuration, and what every rank holds, before step 1.

Nothing here should surprise anyone later. `rank_memory` asks the ranks that run;
`fake_rank_memory` builds every rank of a layout one after the other in this process, on the meta
device and a process group that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import torch

from fourfold.config import Config
from fourfold.cost.flops import flops_per_token
from fourfold.cost.memory import memory_of
from fourfold.cost.workload import Network, software_of, spread_of
from fourfold.data import Mixture
from fourfold.data.mixture import shares_of
from fourfold.data.samples import PARTS
from fourfold.engine.run_data import RunData
from fourfold.mesh import Layout, fake_mesh, is_cpu
from fourfold.model import GPT, ModelShape, count_parameters
from fourfold.model.init import untrained_loss
from fourfold.parallel import Runner, layout_of, parallelize
from fourfold.terminal import in_bytes


def describe(
    config: Config, layout: Layout, runner: Runner, data: RunData, peak_reason: str
) -> Iterator[str]:
    """The derived plan, one line a subject."""
    shape, batch = ModelShape.of(config.Model), config.Data.batch_size
    seq_len, steps = config.Data.dataset.max_seq_len, config.Engine.max_steps
    parameters = count_parameters(shape)
    tokens = batch.global_batch_size * seq_len
    recompute = config.Model.recompute_granularity if config.Model.use_recompute else "off"
    yield f"layout: {layout} on {runner.device}, {runner.precision}, recompute {recompute}"
    yield from describe_ranks(rank_memory(config, runner))
    yield (
        f"model: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads, vocabulary {shape.vocab_size}: "
        f"{parameters:,} parameters; untrained loss near "
        f"{untrained_loss(shape.vocab_size, shape.hidden_size, shape.initializer_range):.2f}"
    )
    if (grows := config.pace).ramp is not None:
        whole = grows.phases[-1]
        yield (
            f"batch: grows from {grows.batch_of(0)} to {grows.batch} samples over the first "
            f"{whole.first_step:,} steps, {whole.first_sample:,} samples"
        )
    yield (
        f"batch: {batch.global_batch_size} samples x {seq_len} tokens = {tokens:,} tokens a step, "
        f"in {config.Engine.accumulate_steps} micro-batch(es) of {batch.micro_batch_size}"
    )
    yield f"compute: {_compute(config, shape, tokens)}; peak for MFU: {peak_reason}"
    yield from _describe_data(data, config.pace.consumed(steps))


def _compute(config: Config, shape: ModelShape, tokens: int) -> str:
    seq_len = config.Data.dataset.max_seq_len
    model = flops_per_token(shape, seq_len) * tokens
    text = f"{model / 1e12:.3g} TFLOP a step (model FLOPs, full attention)"
    if config.Model.use_recompute:
        granularity = config.Model.recompute_granularity
        hardware = flops_per_token(shape, seq_len, recompute=granularity) * tokens
        text += f", {hardware / 1e12:.3g} with what is recomputed"
    return text


def _describe_data(data: RunData, train_samples: int) -> Iterator[str]:
    documents = sum(len(source.sizes) for source in data.sources)
    tokens = sum(source.num_tokens for source in data.sources)
    yield f"data: {len(data.sources)} dataset(s), {documents:,} documents, {tokens:,} tokens"
    train = data.samples["train"]
    if not len(train):
        return
    sizes = {name: samples.tokens_per_epoch for name, samples in data.samples.items()}
    parts = ", ".join(f"{name} {sizes.get(name, 0):,}" for name in PARTS)
    if isinstance(train, Mixture) and len(train.sources) > 1:
        yield f"split: {parts} tokens"
        yield from describe_mixture(train, train_samples)
    else:
        per_epoch = max(train.tokens_per_epoch // max(train.seq_len, 1), 1)
        yield (
            f"split: {parts} tokens; the run reads {train_samples / per_epoch:.2f} epochs of train"
        )


def describe_mixture(mixture: Mixture, num_samples: int) -> Iterator[str]:
    """What the whole run takes from each source, and where that is more than there is."""
    for share in shares_of(mixture, num_samples):
        text = (
            f"mixture: {share.weight:.4f} {share.name}: {share.samples:,} samples, "
            f"{share.epochs:.2f} epochs of {share.tokens_per_epoch:,} tokens"
        )
        yield text + (" (repeats)" if share.epochs > 1 else "")


# -- memory of each rank --------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """One rank's; the bytes are those of a step under way, before anything is freed."""

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

    @property
    def state_bytes(self) -> int:
        return self.weight_bytes + self.master_bytes + self.gradient_bytes + self.moment_bytes


def own_memory(config: Config, runner: Runner) -> RankMemory:
    mesh, layout = runner.mesh, runner.mesh.layout
    shards = runner.shards.values()
    elements = sum(shard.local.numel() for shard in shards)
    # What a step computes with: gathered over the sharding ranks, all of it or a layer at a time.
    gathered = sum(_compute_bytes(name, p, runner) for name, p in runner.parameters.items())
    widest = max(_layer_bytes(part, runner) for part in runner.parts)
    separate = runner.sharding is not None or runner.precision.level == "O2"
    in_fp32 = 4 * elements
    if runner.sharding is None:
        weights, gradients = gathered, in_fp32
    elif layout.stage == 3:
        # One layer at work and the next on its way, weights and gradients of each.
        weights, gradients = min(gathered, 2 * widest), in_fp32 + min(gathered, widest)
    else:
        whole = sum(p.numel() for p in runner.parameters.values()) * 4
        weights, gradients = gathered, in_fp32 + (whole if layout.stage == 1 else widest)
    numbers = [int(number) for part in runner.parts for number in part.layers]
    return RankMemory(
        rank=mesh.rank,
        first_layer=min(numbers),
        layers=len(numbers),
        parameters=elements,
        counted=sum(shard.local.numel() for shard in shards if shard.owns_norm),
        weight_bytes=weights,
        master_bytes=in_fp32 if separate else 0,
        gradient_bytes=gradients,
        moment_bytes=2 * in_fp32,
        activation_bytes=int(_activation_bytes(config, mesh.coordinates["pp"])),
    )


def _compute_bytes(name: str, parameter: torch.Tensor, runner: Runner) -> int:
    """Of the whole tensor a step computes with; a DTensor's size is that of all its shards."""
    return parameter.numel() * runner.precision.weight_dtype(runner.table, name).itemsize


def _layer_bytes(part: GPT, runner: Runner) -> int:
    """Of its widest layer."""
    return max(
        sum(_compute_bytes(n, p, runner) for n, p in layer.named_parameters(f"layers.{number}"))
        for number, layer in part.layers.items()
    )


def _activation_bytes(config: Config, pp_rank: int) -> float:
    """What the forward pass keeps, and the logits: the price that `fourfold plan` names too."""
    network = Network.of(ModelShape.of(config.Model), config.Data.dataset.max_seq_len)
    software = software_of(config, on_cpu=is_cpu(config.Global.device))
    price = memory_of(network, spread_of(config), software, pp_rank)
    return float(price["activations"] + price["logits"])


def rank_memory(config: Config, runner: Runner) -> list[RankMemory]:
    """The shares of all ranks of the run; a collective."""
    rows = runner.mesh.all_gather(*astuple(own_memory(config, runner)))
    return [RankMemory(*(int(value) for value in row)) for row in rows]


def fake_rank_memory(config: Config) -> list[RankMemory]:
    """The shares of every rank of the configured layout, without any of them running."""
    layout, shares = layout_of(config), []
    for rank in range(layout.world_size):
        with fake_mesh(layout, rank) as mesh:
            shares.append(own_memory(config, parallelize(config, mesh, torch.device("meta"))))
    return shares


def describe_ranks(shares: list[RankMemory]) -> Iterator[str]:
    """A line for ranks that hold alike, in the order of their first rank."""
    alike: dict[RankMemory, list[int]] = {}
    for share in shares:
        alike.setdefault(replace(share, rank=0, counted=0), []).append(share.rank)
    for share, ranks in alike.items():
        parts = {
            "weights": share.weight_bytes,
            "master weights": share.master_bytes,
            "gradients": share.gradient_bytes,
            "moments": share.moment_bytes,
        }
        listed = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if size)
        whose = f"rank {_ranges(ranks)}: " if len(shares) > 1 else ""
        yield (
            f"state: {whose}{share.layers} layer(s) from {share.first_layer}, "
            f"{share.parameters:,} parameters; {listed}: {in_bytes(share.state_bytes)}, "
            f"activations about {in_bytes(share.activation_bytes)}"
        )


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
