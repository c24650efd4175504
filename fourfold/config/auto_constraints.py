"""Constraints on an automatic layout: what a configuration fixes before one is chosen for it.

With `Distributed.auto` the layout is free except for what the user fixed: a degree (or the sharding
stage, the schedule, the stages per rank) that the file sets to something other than its default,
and anything that `-o` sets. Micro-batches, recomputation and sequence parallelism in the file
belong to a layout that is about to be replaced, so only `-o` counts for them. Layers listed for
each stage (`pp_layers`) stay with the pp_degree they are written for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.config.load import ConfigSource, validate
from fourfold.config.resolve import DEFAULT_MICRO_BATCH
from fourfold.config.schema import Config
from fourfold.config.yaml_nodes import Tree, find
from fourfold.errors import ConfigError

# Key -> its name in a plan; the value of a degree that is off.
DEGREES = {
    "Distributed.dp_degree": ("dp", 1),
    "Distributed.mp_degree": ("mp", 1),
    "Distributed.pp_degree": ("pp", 1),
    "Distributed.sharding.sharding_degree": ("sharding", 1),
    "Distributed.sharding.sharding_stage": ("stage", 1),
    "Distributed.pp_schedule": ("schedule", "1F1B"),
    "Distributed.virtual_pp_degree": ("virtual", 1),
}
DETAILS = {
    "Data.batch_size.micro_batch_size": "micro_batch",
    "Model.sequence_parallel": "sequence_parallel",
}
GLOBAL_BATCH = "Data.batch_size.global_batch_size"
LOCAL_BATCH = "Data.batch_size.local_batch_size"
RECOMPUTE = ("Model.use_recompute", "Model.recompute_granularity")
# One rank, one sample at a time: legal for every model, so only other problems are reported.
NEUTRAL = {
    **{path: None if name == "dp" else off for path, (name, off) in DEGREES.items()},
    "Distributed.auto": False,
    "Distributed.pp_layers": None,
    "Model.sequence_parallel": False,
    LOCAL_BATCH: None,
    "Data.batch_size.micro_batch_size": 1,
}


@dataclass(frozen=True)
class LayoutConstraints:
    """What the user fixed of the layout, and the batch it must serve."""

    fixed: dict[str, Any]  # by their names in a plan
    keeps_pp_layers: bool
    global_batch: int | None
    local_batch: int | None
    others: int  # ranks that read the same samples in the layout as written: mp * pp
    fewest_ranks: int  # of the layout as written, with one copy of the model

    def global_batch_of(self, world: int) -> int:
        """Samples of a step: as given, or a local batch for each data rank of the file's layout."""
        if self.global_batch is not None:
            return self.global_batch
        return (self.local_batch or DEFAULT_MICRO_BATCH) * max(1, world // self.others)


def is_auto_requested(source: ConfigSource) -> bool:
    """Whether the layout is to be chosen, even if the file is wrong in every other way."""
    return validate(*source.translated())[0].Distributed.auto


def read_constraints(source: ConfigSource) -> LayoutConstraints:
    """Only names and types are checked: whether it all goes together is not known yet."""
    tree, report = source.translated()
    config, _ = validate(tree, report)
    report.raise_problems()
    sizes, layout = config.Data.batch_size, config.Distributed
    if sizes.global_batch_size is not None and _overridden(tree, LOCAL_BATCH):
        raise ConfigError(
            [
                f"-o {LOCAL_BATCH}={sizes.local_batch_size}: with a layout that is chosen and "
                f"global_batch_size={sizes.global_batch_size} the local batch follows from the "
                "layout; leave it out, or fix dp_degree and sharding_degree"
            ]
        )
    keeps = layout.pp_layers is not None and (
        layout.pp_degree > 1 or _overridden(tree, "Distributed.pp_layers")
    )
    return LayoutConstraints(
        _fixed(config, tree) | (_stages_of(config) if keeps else {}),
        keeps,
        sizes.global_batch_size,
        sizes.local_batch_size or sizes.micro_batch_size,
        layout.mp_degree * layout.pp_degree,
        layout.mp_degree * layout.pp_degree * layout.sharding.sharding_degree,
    )


def without_layout(source: ConfigSource, batch: int) -> Config:
    """The configuration on one rank with a global batch of `batch`: all of it but the layout."""
    return source.with_values({**NEUTRAL, GLOBAL_BATCH: batch}).load()


def as_laid_out(source: ConfigSource, world: int) -> tuple[Config, str | None]:
    """The configuration as `world` ranks would run it, and None; where its layout is not one of
    `world` ranks, what is left of it without one, and why."""
    constraints = read_constraints(source)
    batch, fewest = constraints.global_batch_of(world), constraints.fewest_ranks
    free = without_layout(source, batch)
    if world % fewest:
        return free, f"it needs {fewest} ranks or a multiple of {fewest}, and there are {world}"
    # The local batch follows: on another number of ranks than the file was written for, the
    # global one stays.
    sized = source.with_values({GLOBAL_BATCH: batch, LOCAL_BATCH: None})
    try:
        return sized.load(world), None
    except ConfigError as error:
        # Without the places these were written at: some are the two sizes above.
        return free, "; ".join(problem.text() for problem in error.problems)


def _fixed(config: Config, tree: Tree) -> dict[str, Any]:
    fixed = {
        name: value
        for path, (name, off) in DEGREES.items()
        if (value := config.setting(path).value) is not None
        and (_overridden(tree, path) or value != off)
    }
    for path, name in DETAILS.items():
        if _overridden(tree, path) and config.setting(path).value is not None:
            fixed[name] = config.setting(path).value
    if any(_overridden(tree, path) for path in RECOMPUTE):
        model = config.Model
        fixed["recompute"] = (
            model.recompute_granularity or "full" if model.use_recompute else "none"
        )
    return fixed


def _stages_of(config: Config) -> dict[str, Any]:
    """What a list of layers says of the pipeline: it has a number for each stage."""
    layout = config.Distributed
    stages, per_rank = len(layout.pp_layers or ()), layout.virtual_pp_degree
    return {"pp": max(1, stages // per_rank), "virtual": per_rank}


def _overridden(tree: Tree, path: str) -> bool:
    """Whether an override gave it; files are in layer 0 and below."""
    entry = find(tree, path)
    return entry is not None and entry.value is not None and entry.layer > 0
