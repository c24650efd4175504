"""From a model description to something that runs: the order of application, on one screen."""

from __future__ import annotations

import torch

from fourfold.config import Config
from fourfold.mesh import Layout
from fourfold.model import GPT, ModelShape, initialize
from fourfold.parallel.precision import Precision
from fourfold.parallel.recompute import apply_recompute
from fourfold.parallel.runner import Runner

__all__ = ["Precision", "Runner", "parallelize"]


def parallelize(config: Config, layout: Layout, device: torch.device) -> Runner:
    """Build the model of `config` for `layout` and make it ready to run batches.

    Nothing is allocated before the model is in its final shape, and weights come from
    (seed, parameter name) alone, so what is built does not depend on how it is cut.
    """
    assert layout.world_size == 1, "other layouts are refused by Layout.check"
    with torch.device("meta"):
        model = GPT(ModelShape.of(config.Model))
    if config.Model.use_recompute:
        assert config.Model.recompute_granularity is not None, "filled in when resolved"
        apply_recompute(model, config.Model.recompute_granularity)
    if config.Engine.graph_mode == "static":
        for layer in model.layers.values():
            layer.compile()
    model.to_empty(device=device)
    initialize(model, config.Global.seed)
    precision = Precision(config.Engine.mix_precision.dtype, config.Engine.mix_precision.level)
    return Runner(
        model,
        precision=precision,
        device=device,
        micro_batch_size=config.Data.batch_size.micro_batch_size,
        seed=config.Global.seed,
    )
