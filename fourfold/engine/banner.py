"""The banner: what a run derived from its configuration, and what every rank holds, before step 1.

Nothing here should surprise anyone later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fourfold.config import Config
from fourfold.cost.flops import flops_per_token
from fourfold.cost.rank_memory import RankMemory, rank_memory, recomputed_in_all
from fourfold.cost.workload import options_of
from fourfold.data import Mixture
from fourfold.data.mixture import shares_of
from fourfold.data.samples import PARTS
from fourfold.engine.run_data import RunData
from fourfold.mesh import Layout
from fourfold.model import ModelShape, count_parameters
from fourfold.model.init import untrained_loss
from fourfold.parallel import Runner
from fourfold.parallel.recompute import Recompute
from fourfold.terminal import in_bytes


def describe(
    config: Config, layout: Layout, runner: Runner, data: RunData, peak_source: str
) -> Iterator[str]:
    """The derived plan, one line a subject."""
    shape, batch = ModelShape.of(config.Model), config.Data.batch_size
    seq_len, steps = config.Data.dataset.max_seq_len, config.Engine.max_steps
    parameters = count_parameters(shape)
    tokens = batch.global_batch_size * seq_len
    recompute = Recompute.of(config.Model) or "off"
    fresh = untrained_loss(
        shape.vocab_size, shape.hidden_size, shape.initializer_range, shape.output_scale
    )
    yield f"layout: {layout} on {runner.device}, {runner.precision}, recompute {recompute}"
    yield from describe_ranks(rank_memory(config))
    yield (
        f"model: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads, vocabulary {shape.vocab_size}: "
        f"{parameters:,} parameters; untrained loss near {fresh:.2f}"
    )
    if options := options_of(shape):
        yield f"network: {options}"
    if shape.mup_base_width is not None:
        ratio = shape.width_ratio
        yield (
            f"muP: {ratio:g} times as wide as {shape.mup_base_width}: in matrices of the layers "
            f"initial deviation / {ratio**0.5:.3g}, learning rate / {ratio:g}; logits / {ratio:g}"
        )
    if (grows := config.batch_schedule).ramp is not None:
        whole = grows.phases[-1]
        yield (
            f"batch: grows from {grows.batch_of(0)} to {grows.batch} samples over the first "
            f"{whole.first_step:,} steps, {whole.first_sample:,} samples"
        )
    yield (
        f"batch: {batch.global_batch_size} samples x {seq_len} tokens = {tokens:,} tokens a step, "
        f"in {config.Engine.accumulate_steps} micro-batch(es) of {batch.micro_batch_size}"
    )
    yield f"compute: {_compute(config, shape, tokens)}; peak for MFU: {peak_source}"
    yield from _describe_data(data, config.batch_schedule.consumed(steps))


def _compute(config: Config, shape: ModelShape, tokens: int) -> str:
    seq_len = config.Data.dataset.max_seq_len
    model = flops_per_token(shape, seq_len) * tokens
    text = f"{model / 1e12:.3g} TFLOP a step (model FLOPs, full attention)"
    if config.Model.use_recompute:
        hardware = tokens * flops_per_token(
            shape,
            seq_len,
            recompute=config.Model.recompute_granularity,
            recomputed_layers=recomputed_in_all(config),
            keep=config.Model.recompute_keep,
        )
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
            "average of weights": share.ema_bytes,
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
