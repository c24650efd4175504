"""What the run derived, shown before step 1: nothing here should surprise anyone later."""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.config import Config
from fourfold.cost.flops import flops_per_token
from fourfold.data import Mixture
from fourfold.data.mixture import shares_of
from fourfold.data.samples import PARTS
from fourfold.engine.census import census, describe_ranks
from fourfold.engine.feeds import Feeds
from fourfold.mesh import Layout
from fourfold.model import ModelShape, count_parameters
from fourfold.model.init import untrained_loss
from fourfold.parallel import Runner


def describe(
    config: Config, layout: Layout, runner: Runner, feeds: Feeds, peak_reason: str
) -> Iterator[str]:
    """The derived plan, one line a subject."""
    shape, batch = ModelShape.of(config.Model), config.Data.batch_size
    seq_len, steps = config.Data.dataset.max_seq_len, config.Engine.max_steps
    parameters = count_parameters(shape)
    tokens = batch.global_batch_size * seq_len
    recompute = config.Model.recompute_granularity if config.Model.use_recompute else "off"
    yield f"layout: {layout} on {runner.device}, {runner.precision}, recompute {recompute}"
    yield from describe_ranks(census(config, runner))
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
    yield from _describe_data(feeds, config.pace.consumed(steps))


def _compute(config: Config, shape: ModelShape, tokens: int) -> str:
    seq_len = config.Data.dataset.max_seq_len
    model = flops_per_token(shape, seq_len) * tokens
    text = f"{model / 1e12:.3g} TFLOP a step (model FLOPs, full attention)"
    if config.Model.use_recompute:
        granularity = config.Model.recompute_granularity
        hardware = flops_per_token(shape, seq_len, recompute=granularity) * tokens
        text += f", {hardware / 1e12:.3g} with what is recomputed"
    return text


def _describe_data(feeds: Feeds, train_samples: int) -> Iterator[str]:
    documents = sum(len(source.sizes) for source in feeds.sources)
    tokens = sum(source.num_tokens for source in feeds.sources)
    yield f"data: {len(feeds.sources)} dataset(s), {documents:,} documents, {tokens:,} tokens"
    train = feeds.samples["train"]
    if not len(train):
        return
    sizes = {name: samples.tokens_per_epoch for name, samples in feeds.samples.items()}
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
