"""From a model description to something that runs: the order of application, on one screen."""

from __future__ import annotations

import torch

from fourfold.config import Config
from fourfold.mesh import Layout, Mesh
from fourfold.model import GPT, ModelShape
from fourfold.parallel.pipeline import Pipeline, build_pipeline
from fourfold.parallel.precision import Precision
from fourfold.parallel.recompute import apply_recompute
from fourfold.parallel.runner import Runner
from fourfold.parallel.shard import apply_sharding
from fourfold.parallel.stages import stages_here
from fourfold.parallel.tensor import apply_model_parallel

__all__ = ["Pipeline", "Precision", "Runner", "layout_of", "parallelize"]


def parallelize(config: Config, mesh: Mesh, device: torch.device) -> Runner:
    """Build this rank's part of the model of `config` and make it ready to run batches.

    Nothing is allocated before the model is in its final shape, and weights come from
    (seed, parameter name) alone, so what is built does not depend on how it is cut.
    """
    layout, model, shape = mesh.layout, config.Model, ModelShape.of(config.Model)
    precision = Precision(config.Engine.mix_precision.dtype, config.Engine.mix_precision.level)
    parts: dict[int, GPT] = {}
    for stage, layers in stages_here(config, mesh.place["pp"]).items():
        with torch.device("meta"):
            part = parts[stage] = GPT(shape, layers)
        if layout.mp > 1:
            assert mesh.device_mesh is not None
            apply_model_parallel(part, mesh.device_mesh["mp"], model.sequence_parallel)
        if model.use_recompute:
            assert model.recompute_granularity is not None, "filled in when resolved"
            apply_recompute(part, model.recompute_granularity)
        if config.Engine.graph_mode == "static":
            for layer in part.layers.values():
                layer.compile()
        precision.apply_autocast(part, device)
        if layout.sharding > 1:
            offload = config.Distributed.sharding.sharding_offload
            apply_sharding(part, mesh.sharding_mesh, layout.stage, precision, offload)
        part.to_empty(device=device)
    runner = Runner(
        list(parts.values()),
        mesh,
        precision=precision,
        device=device,
        micro_batch_size=config.Data.batch_size.micro_batch_size,
        micro_batches=config.Engine.accumulate_steps,
        seed=config.Global.seed,
        by_sequence=model.sequence_parallel,
        pipeline=build_pipeline(config, mesh, parts, precision, device),
    )
    if device.type != "meta":
        runner.initialize()
    return runner


def layout_of(config: Config) -> Layout:
    distributed = config.Distributed
    return Layout(
        dp=distributed.dp_degree,
        pp=distributed.pp_degree,
        sharding=distributed.sharding.sharding_degree,
        mp=distributed.mp_degree,
        stage=distributed.sharding.sharding_stage,
    )
