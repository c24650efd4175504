"""From a model description to something that runs: the order of application, on one screen.

Torch's sharding, pipelining and DTensor take a second to import, so the modules that use them are
imported only if the layout has such an axis.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fourfold.config import Config
from fourfold.mesh import Layout, Mesh
from fourfold.model import GPT, ModelShape, network_of
from fourfold.model.gpt import CoreAttention
from fourfold.parallel.precision import Precision
from fourfold.parallel.recompute import (
    HostCopies,
    Recompute,
    apply_offload,
    apply_recompute,
    remake_cheap_outputs,
)
from fourfold.parallel.runner import Runner
from fourfold.parallel.stages import stages_here

if TYPE_CHECKING:
    from fourfold.parallel.fsdp import Sharding


@dataclass(frozen=True)
class MetaParts:
    """This rank's parts of the model in their final shape, by stage, with no memory yet."""

    parts: dict[int, GPT]
    precision: Precision
    sharding: Sharding | None
    home: torch.device  # of the parameters

    def materialize(self) -> None:
        """Give the parts memory, with nothing in it yet."""
        for part in self.parts.values():
            part.to_empty(device=self.home)


def parallelize(config: Config, mesh: Mesh, device: torch.device, *, trains: bool = True) -> Runner:
    """Build this rank's part of the model of `config` and make it ready to run batches.

    Nothing is allocated before the model is in its final shape, and weights come from (seed,
    parameter name) alone, so what is built does not depend on how it is cut. A model that never
    `trains` gets its weights from a checkpoint, and has no master weights beside them.
    """
    meta = build_on_meta(config, mesh, device)
    meta.materialize()
    runner = build_runner(config, mesh, device, meta, trains=trains)
    if trains and device.type != "meta":
        runner.initialize()
    return runner


def build_on_meta(config: Config, mesh: Mesh, device: torch.device) -> MetaParts:
    layout, model, shape = mesh.layout, config.Model, ModelShape.of(config.Model)
    precision, sharding, home = Precision.of(config), None, device
    if layout.sharding > 1:
        from fourfold.parallel.fsdp import Sharding

        offload = config.Distributed.sharding.sharding_offload
        sharding = Sharding(mesh.sharding_mesh, layout.stage, precision, offload)
        home = torch.device("cpu") if offload and device.type != "meta" else device
    parts: dict[int, GPT] = {}
    for stage, layers in stages_here(config, mesh.coordinates["pp"]).items():
        with torch.device("meta"):
            part = parts[stage] = network_of(shape)(shape, layers)
        if layout.mp > 1:
            from fourfold.parallel.tensor import apply_model_parallel

            apply_model_parallel(part, mesh.axis("mp"), model.sequence_parallel)
        if config.Engine.graph_mode == "static":
            compile_layers(part)
        if recompute := Recompute.of(model):
            apply_recompute(part, recompute, mp_degree=layout.mp)
        elif device.type == "cpu" and config.Engine.graph_mode == "dynamic":
            remake_cheap_outputs(part, norms=layout.sharding == 1 or layout.stage < 3)
        if model.offload_activations and device.type == "cuda":
            apply_offload(part, HostCopies(device))
        precision.apply_autocast(part, device)
        if sharding is not None:
            sharding.apply(part)
    return MetaParts(parts, precision, sharding, home)


def build_runner(
    config: Config, mesh: Mesh, device: torch.device, meta: MetaParts, *, trains: bool = True
) -> Runner:
    """Join parts that have memory to what runs batches."""
    pipeline = None
    if mesh.layout.pp > 1:
        from fourfold.parallel.pipeline import build_pipeline

        pipeline = build_pipeline(config, mesh, meta.parts, meta.precision, meta.sharding, device)
    return Runner(
        list(meta.parts.values()),
        mesh,
        precision=meta.precision,
        device=device,
        micro_batch_size=config.Data.batch_size.micro_batch_size,
        seed=config.Global.seed,
        sequence_parallel=config.Model.sequence_parallel,
        sharding=meta.sharding,
        pipeline=pipeline,
        trains=trains,
    )


def layout_of(config: Config) -> Layout:
    distributed = config.Distributed
    return Layout(
        dp=distributed.dp_degree,
        pp=distributed.pp_degree,
        sharding=distributed.sharding.sharding_degree,
        mp=distributed.mp_degree,
        stage=distributed.sharding.sharding_stage,
    )


def preload(layout: Layout) -> None:
    """Import what `parallelize` will need, before processes are forked that would all do it."""
    if layout.sharding > 1:
        import torch._dynamo  # noqa: F401  imported by torch's sharding at its first use

        import fourfold.parallel.fsdp
    if layout.mp > 1:
        import fourfold.parallel.tensor
    if layout.pp > 1:
        import fourfold.parallel.pipeline  # noqa: F401


# -- the static graph: each layer compiled by itself, so that layers share one ---------------------


def compile_layers(model: GPT) -> None:
    """Before recomputation is applied, which would hide a whole layer from the compiler."""
    for module in model.modules():
        # Dropout asks for the generator's seed, which a graph would hold on to.
        if isinstance(module, CoreAttention) and module.dropout > 0:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    # Messages between ranks are timed, so a graph ends before each and another begins after it.
    warnings.filterwarnings("ignore", message="Dynamo does not know how to trace the builtin")
    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward)
