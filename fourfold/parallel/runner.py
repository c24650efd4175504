"""Running batches with gradient accumulation: for every layout, `run` to train and `evaluate`.

`run` takes one rank's share of a global batch, cuts it into micro-batches and leaves the summed
gradients on the fp32 master weights. The loss is divided by the valid tokens of the *global*
batch inside, so the cut changes neither loss nor gradients.

Losses come as this rank's share: the sum of the shares over all ranks is the loss of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fourfold import heartbeat
from fourfold.data import Batch
from fourfold.mesh import Mesh
from fourfold.model import GPT
from fourfold.model.init import initialize_shards
from fourfold.model.seeds import mix_seed
from fourfold.parallel.data_parallel import (
    GradientSync,
    check_replicas,
    sum_across_model,
    sum_tied,
)
from fourfold.parallel.parameters import local_shards, named_parameters, tied_keys
from fourfold.parallel.precision import Precision
from fourfold.shards import Shard

if TYPE_CHECKING:
    from fourfold.parallel.fsdp import Sharding
    from fourfold.parallel.pipeline import Pipeline

Arguments = dict[str, Any]

# Elements whose squares are added up in fp32: the sum is then off by about 2e-7.
NORM_PIECE = 65536


# Micro-batches that are evaluated together: more are no faster, and no sign of life comes between.
MOST_AT_ONCE = 8


class Runner:
    """The parts of a model in their final form, with their precision and micro-batch size."""

    def __init__(
        self,
        parts: list[GPT],
        mesh: Mesh,
        *,
        precision: Precision,
        device: torch.device,
        micro_batch_size: int,
        seed: int,
        sequence_parallel: bool = False,
        sharding: Sharding | None = None,
        pipeline: Pipeline | None = None,
        trains: bool = True,
    ) -> None:
        self.parts = parts
        self.table = parts[0].table
        self.mesh = mesh
        self.precision = precision
        self.device = device
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.sequence_parallel = sequence_parallel
        self.pipeline = pipeline
        self.sharding = sharding
        self.parameters = dict(named_parameters(parts))
        self.masters: dict[str, nn.Parameter] = dict(self.parameters)
        self.trains = trains
        if sharding is None and trains:
            self.masters = precision.make_masters(self.parameters)
        self.shards = local_shards(self.table, self.masters, mesh)
        group = mesh.group("dp")
        self.replicas = (
            GradientSync(self.parameters, self.masters, self.table, group)
            if group is not None and sharding is None and trains
            else None
        )

    def initialize(self) -> None:
        """Initialise the weights; each rank draws only what it holds."""
        # The tied copy has the name of the embedding, so it comes by itself.
        tied = set(tied_keys(self.table)[1:])
        for keys in (self.shards.keys() - tied, self.shards.keys() & tied):
            shards = {shard.name: shard for key, shard in self.shards.items() if key in keys}
            initialize_shards(self.table, shards, self.seed)
        self.sync_weights_from_masters()

    # -- training ---------------------------------------------------------------------------

    def run(self, batch: Batch, step: int, loss_scale: float | Tensor = 1.0) -> Tensor:
        """Forward and backward over all micro-batches of `step`; this rank's share of the loss."""
        for part in self.parts:
            part.train()
        scale = loss_scale / max(batch.global_valid_tokens, 1.0)
        micro_batches = -(-len(batch.tokens) // self.micro_batch_size)
        seeds = self.dropout_seeds(step, micro_batches)
        if self.replicas is not None:
            self.replicas.micro_batches = len(seeds)
        if self.pipeline is not None:
            total = self._run_pipeline(self.pipeline, batch, scale, seeds)
        else:
            total = self._run_micro_batches(batch, scale, seeds)
        self.reduce_gradients()
        return self._share(total) / loss_scale

    def _run_micro_batches(self, batch: Batch, scale: float | Tensor, seeds: list[int]) -> Tensor:
        model, total = self.parts[0], torch.zeros((), device=self.device)
        given = self._micro_batches(batch, self.micro_batch_size)
        for micro, (tokens, arguments) in enumerate(given):
            if self.sharding is not None:
                self.sharding.before_backward(model, is_last=micro == len(seeds) - 1)
            loss = model(tokens, **arguments, loss_scale=scale, dropout_seed=seeds[micro])
            loss.backward()
            total = total + loss.detach()
            heartbeat.alive()
        return total

    def _run_pipeline(
        self, pipeline: Pipeline, batch: Batch, scale: float | Tensor, seeds: list[int]
    ) -> Tensor:
        tokens, arguments = self._arguments(batch)
        each = torch.ones(len(seeds), device=self.device)
        arguments["loss_scale"] = each * scale
        return pipeline.step(tokens, arguments, seeds)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce gradients over the ranks that share them, and move them to the fp32 masters."""
        if self.sharding is None:
            self.precision.collect(self.parameters, self.masters)
        if self.replicas is not None:
            self.replicas.finish()
        if self.mesh.layout.mp > 1:
            sum_across_model(self.table, self.masters, self.mesh, self.sequence_parallel)
        sum_tied(self.table, self.masters, self.mesh)

    def dropout_seeds(self, step: int, micro_batches: int) -> list[int]:
        """One per micro-batch, numbered over the global batch: dropout is the same in every layout.

        With sequence parallelism ranks hold different positions, which must not drop alike.
        """
        first = self.mesh.data_rank * micro_batches
        own: list[int | str] = [self.mesh.coordinates["mp"]] if self.sequence_parallel else []
        return [
            mix_seed(self.seed, "dropout", step, first + micro, *own)
            for micro in range(micro_batches)
        ]

    @torch.no_grad()
    def sync_weights_from_masters(self) -> None:
        """Copy the fp32 masters to the low-precision weights, after an update or a load."""
        lowered = [key for key, one in self.parameters.items() if one is not self.masters[key]]
        if lowered:
            torch._foreach_copy_(
                [self.parameters[key] for key in lowered], [self.masters[key] for key in lowered]
            )
        self.drop_gathered()

    def shards_to_load(self) -> dict[str, Shard]:
        """The tensors that a load fills, by key. Of two copies of the embedding on this rank, as at
        the ends of a V-shaped pipeline, the first is used for both: `after_load` copies it."""
        return {key: one for key, one in self.shards.items() if key not in self.tied_copies}

    @property
    def tied_copies(self) -> dict[str, str]:
        """The key of a tied copy -> that of what it copies, where this rank holds both."""
        keys = tied_keys(self.table)
        return {keys[1]: keys[0]} if keys and self.shards.keys() >= set(keys) else {}

    @torch.no_grad()
    def after_load(self) -> None:
        """After a load: update every copy of what was filled."""
        for copy, original in self.tied_copies.items():
            self.shards[copy].local.copy_(self.shards[original].local)
        if not self.trains and self.sharding is None:
            # Loaded in fp32, as they are saved, and kept as they are computed with.
            for parameter in self.precision.lowered(self.parameters).values():
                parameter.data = parameter.data.to(self.precision.dtype)
        self.sync_weights_from_masters()

    def drop_gathered(self) -> None:
        """Free the weights that sharding gathered for an evaluation."""
        if self.sharding is not None:
            for part in self.parts:
                self.sharding.drop_gathered(part)

    # -- evaluation -------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's share of the batch's mean loss, without dropout and without gradients."""
        for part in self.parts:
            part.eval()
        scale = torch.full((), 1.0 / max(batch.global_valid_tokens, 1.0), device=self.device)
        # Without gradients one layer's activations are held at a time, so a batch as many times
        # larger as there are layers fits. Stages agreed on a size of messages.
        size = self.micro_batch_size
        if self.pipeline is None:
            size *= min(len(self.parts[0].layers), MOST_AT_ONCE)
        micro_batches = [
            (tokens, arguments | {"loss_scale": scale})
            for tokens, arguments in self._micro_batches(batch, size)
        ]
        if self.pipeline is not None:
            losses = self.pipeline.forward(micro_batches)
        else:
            losses = []
            for tokens, given in micro_batches:
                losses.append(self.parts[0](tokens, **given))
                heartbeat.alive()
        self.drop_gathered()
        return self._share(torch.stack(losses).sum() if losses else torch.zeros(()))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """The logits (B, T, V) after each of the tokens (B, T), without dropout; None on ranks that
        do not have the last stage. The ranks of one data rank must give the same tokens, and all
        ranks call equally often. Weights that sharding gathers stay until `drop_gathered`."""
        for part in self.parts:
            part.eval()
        rows, length = tokens.shape
        cut = self.mesh.layout.mp if self.sequence_parallel else 1
        padded = nn.functional.pad(tokens.to(self.device), (0, -length % cut))
        last = self.parts[0].shape.max_position_embeddings - 1
        positions = torch.arange(padded.shape[1], device=self.device).clamp(max=last)
        given = {"position_ids": positions.expand(rows, -1)}
        if self.pipeline is None:
            outputs = [self.parts[0](padded, **given)]
        else:
            outputs = self.pipeline.forward([(padded, given)])
        heartbeat.alive()
        return outputs[0][:, :length].float() if outputs else None

    # -- shares of a batch ------------------------------------------------------------------

    def _share(self, loss: Tensor) -> Tensor:
        """Model-parallel ranks all know the same loss; it counts once."""
        return loss if self.mesh.coordinates["mp"] == 0 else torch.zeros_like(loss)

    def _arguments(self, batch: Batch) -> tuple[Tensor, Arguments]:
        """The tokens and what else the model is called with, on the device."""
        arguments = {
            "labels": batch.labels,
            "loss_mask": batch.loss_mask,
            "position_ids": batch.position_ids,
        }
        if batch.document_ids is not None:
            arguments["document_ids"] = batch.document_ids
        moved = {k: field.to(self.device, non_blocking=True) for k, field in arguments.items()}
        return batch.tokens.to(self.device, non_blocking=True), moved

    def _micro_batches(self, batch: Batch, size: int) -> Iterator[tuple[Tensor, Arguments]]:
        tokens, arguments = self._arguments(batch)
        for start in range(0, tokens.shape[0], size):
            rows = slice(start, start + size)
            yield tokens[rows], {key: field[rows] for key, field in arguments.items()}

    # -- what is held here ------------------------------------------------------------------

    def check_replicas(self, when: str) -> None:
        """Raise on every rank if ranks that hold the same parameter differ in it; a collective."""
        check_replicas(self.table, self.shards, self.mesh, self.sharding is not None, when)

    def decayed(self) -> set[str]:
        """The keys of the weights that weight decay applies to."""
        return {key for key, one in self.shards.items() if self.table[one.name].weight_decay}

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared norm of the gradients, each counted on one rank."""
        return self.squared_norms()[0]

    def squared_norms(self, groups: Mapping[str, str] | None = None) -> tuple[Tensor, Tensor]:
        """The same, and this rank's shares by group, in the order in which `groups` names
        them: it says of each parameter which it belongs to."""
        owned = [one for one in self.shards.values() if one.owns_norm]
        given = [(one.name, one.gradient) for one in owned if one.gradient is not None]
        squares, counts = _squares([gradient for _, gradient in given], self.device)
        if groups is None:
            return squares.sum(), squares.new_zeros(0)
        shares = {group: squares.new_zeros(()) for group in dict.fromkeys(groups.values())}
        # Neighbours are mostly of one group, so that there are few sums.
        rows, start = zip([groups[name] for name, _ in given], counts), 0
        for group, same in groupby(rows, key=lambda row: row[0]):
            stop = start + sum(count for _, count in same)
            shares[group] = shares[group] + squares[start:stop].sum()
            start = stop
        return squares.sum(), torch.stack([*shares.values()])


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """Of all elements, accurate to fp32 whatever the sizes."""
    return _squares(list(tensors), device)[0].sum()


def _squares(tensors: list[Tensor], device: torch.device | None) -> tuple[Tensor, list[int]]:
    """The squared norms of the pieces of these tensors, and how many pieces are of each.

    Torch's norm on a CPU adds squares one by one in fp32, and loses a thousandth of a tensor of
    forty million elements. So large tensors are taken in pieces, added up in fp64.
    """
    cut = [
        [] if not one.numel() else one.reshape(-1).split(NORM_PIECE) if one.is_cpu else [one]
        for one in tensors
    ]
    pieces = [piece for of_one in cut for piece in of_one]
    counts = [len(of_one) for of_one in cut]
    if not pieces:
        return torch.zeros(0, dtype=torch.float64, device=device), counts
    return torch.stack(torch._foreach_norm(pieces)).double().square(), counts
