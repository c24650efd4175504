"""Generation with a model spread over ranks: tensor, pipeline and sharding parallelism.

Every rank makes the same calls and gets the same logits up to their last bits, in which unlike
machines may differ; rank 0 chooses the tokens for all, so every rank writes the same text. Only one
of them prints it. Data-parallel ranks would only repeat each other and are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold import checkpoint, storage
from fourfold.checkpoint import RankGroup
from fourfold.config import Config
from fourfold.device import select_device
from fourfold.errors import UserError
from fourfold.generate.decoder import Decoder
from fourfold.generate.loading import (
    Notice,
    check_made_with,
    model_sizes,
    open_foreign,
    other_sizes,
    tokenizer_of_foreign,
    tokenizer_of_run,
)
from fourfold.mesh import Mesh
from fourfold.model.gpt import Attend
from fourfold.parallel import Runner, parallelize
from fourfold.tokenizer import Tokenizer


class DistributedDecoder(Decoder):
    """A decoder over the parts of a model on this rank."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        for part in runner.parts:
            part.eval().requires_grad_(False)
        parts, layout = runner.parts, runner.mesh.layout
        # With fewer heads of keys and values than ranks, several ranks have the same one.
        heads = max(parts[0].shape.key_value_heads // layout.mp, 1)
        like = torch.empty((), dtype=runner.precision.dtype, device=runner.device)
        self._begin(parts, like, heads)

    def _run(
        self, tokens: Tensor, positions: Tensor, attends: Mapping[str, Attend], ends: Tensor
    ) -> Tensor:
        given = {"position_ids": positions, "attends": attends, "ends": ends}
        pipeline = self.runner.pipeline
        if pipeline is None:
            logits: Tensor = self.runner.parts[0](tokens, **given)
            return logits.float()
        outputs = pipeline.forward([(tokens, given)])
        size = (tokens.shape[0], self.runner.parts[0].shape.vocab_size)
        logits = outputs[0].float() if outputs else torch.empty(size, device=self.device)
        dist.broadcast(logits, group=pipeline.group, group_src=pipeline.rank_of_stage[-1])
        return logits

    def broadcast_choices(self, choices: list[float]) -> list[float]:
        """Rank 0's choice; different choices would leave ranks waiting for each other."""
        message = torch.tensor(choices, dtype=torch.float64)
        dist.broadcast(message, src=0)
        return message.tolist()


def load_distributed(
    config: Config, mesh: Mesh, on_notice: Notice
) -> tuple[Runner, Tokenizer, Path]:
    """The model of `Engine.save_load.ckpt_dir` on all ranks of the mesh, and its tokenizer."""
    section = config.Engine.save_load
    where = checkpoint.named(section.ckpt_dir or "latest", storage.local_path(section.output_dir))
    if checkpoint.candidates(where) or not where.exists():
        return _load_own(config, where, mesh, on_notice)
    return _load_foreign(config, where, mesh, on_notice)


def _load_own(
    config: Config, where: Path, mesh: Mesh, on_notice: Notice
) -> tuple[Runner, Tokenizer, Path]:
    """Each rank reads what it holds."""
    tokenizer = tokenizer_of_run(config, on_notice)
    assert tokenizer is not None
    runner = _build(config, mesh)
    shards = {f"model.{shard.name}": shard for shard in runner.shards_to_load().values()}
    ranks = RankGroup.of(mesh, config.Distributed.timeout_seconds)
    path, state = checkpoint.resume(
        where, shards, on_notice, "model.", ranks, config.Engine.save_load.verify_hashes
    )
    check_made_with(config, tokenizer, state.get("tokenizer"), path, on_notice)
    runner.after_load()
    return runner, tokenizer, path


@torch.no_grad()
def _load_foreign(
    config: Config, where: Path, mesh: Mesh, on_notice: Notice
) -> tuple[Runner, Tokenizer, Path]:
    """Each rank reads all, one tensor at a time, and keeps what it holds."""
    with open_foreign(config, where) as foreign:
        tokenizer = tokenizer_of_foreign(config, foreign, on_notice)
        assert tokenizer is not None
        for note in [*foreign.notes, *other_sizes(config, foreign.shape)]:
            on_notice(note)
        for name in model_sizes():
            setattr(config.Model, name, getattr(foreign.shape, name))
        runner = _build(config, mesh)
        wanted = {shard.name: shard for shard in runner.shards_to_load().values()}
        for name, tensor in foreign.tensors():
            if shard := wanted.get(name):
                shard.copy_from(tensor)
    runner.after_load()
    return runner, tokenizer, where


def free_of_training(config: Config) -> None:
    """Turn off what only training needs: nothing is recomputed or compiled, positions are not
    cut, and the numbers are those of `Inference.weights`."""
    distributed, weights = config.Distributed, config.Inference.weights
    if distributed.dp_degree > 1:
        raise UserError(
            f"Distributed.dp_degree={distributed.dp_degree}: data-parallel ranks would all write "
            "the same text; start fewer processes, or raise mp_degree, pp_degree or "
            "sharding_degree"
        )
    if weights == "int8" or weights == "int4":
        raise UserError(
            f"Inference.weights={weights} runs in one process only; choose bfloat16 or float16 for "
            "a model that several processes share, or leave --nproc out"
        )
    config.Model.sequence_parallel = config.Model.use_recompute = False
    config.Engine.graph_mode = "dynamic"
    precision = config.Engine.mix_precision
    precision.dtype, precision.level = weights, None if weights == "float32" else "O2"


def _build(config: Config, mesh: Mesh) -> Runner:
    free_of_training(config)
    return parallelize(config, mesh, select_device(config.Global.device), trains=False)
