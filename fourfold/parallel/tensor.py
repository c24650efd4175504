"""Model parallelism: each rank holds a slice of every matrix, in torch's `parallelize_module`.

The styles below follow torch's `ParallelStyle`, but keep plain local tensors where torch's own
make DTensors of the activations: the same collectives at a quarter of the overhead, and
`fully_shard` then sees ordinary parameters.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from fourfold.model.gpt import GPT, CoreAttention, Head
from fourfold.model.loss import Vocabulary
from fourfold.model.params import split_range
from fourfold.model.seeds import mix_seed
from fourfold.parallel.collectives import enter, leave
from fourfold.waiting import communicating


def apply_model_parallel(model: GPT, mesh: DeviceMesh, by_sequence: bool) -> None:
    """Cut the model (or the part of it) over the ranks of `mesh`. Expects the meta device."""
    plan = {}
    for path, module in model.named_modules():
        if style := _style_of(model, path, module, by_sequence):
            plan[path] = style
    parallelize_module(model, mesh, plan)


def _style_of(model: GPT, path: str, module: nn.Module, by_sequence: bool) -> ParallelStyle | None:
    """What the table says of the module's weight, by the kind of the module."""
    if isinstance(module, CoreAttention):
        return Heads(by_sequence)
    if isinstance(module, Head):
        return Logits(by_sequence, model.shape.vocab_size) if model.is_last else None
    if not isinstance(module, nn.Linear | nn.Embedding):
        return None
    row = model.table[f"{path}.weight"]
    if row.split_dim is None:
        return Positions(by_sequence) if row.partial_gradient else None
    if isinstance(module, nn.Embedding):
        return Lookup(by_sequence)
    return Columns(by_sequence) if row.split_dim == 0 else Rows(by_sequence)


class _Style(ParallelStyle):
    def __init__(self, by_sequence: bool) -> None:
        super().__init__()
        self.by_sequence = by_sequence

    def cut(self, module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> tuple[int, int]:
        """Replace a parameter by this rank's slice of it; its range in the whole."""
        whole: Tensor = getattr(module, name)
        start, stop = split_range(whole.shape[dim], mesh.get_local_rank(), mesh.size())
        own = whole.data.narrow(dim, start, stop - start).clone()
        module.register_parameter(name, nn.Parameter(own))
        return start, stop


class Columns(_Style):
    """A linear layer whose outputs are cut: every rank computes some of the features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cut(module, "weight", 0, device_mesh)
        if module.bias is not None:
            self.cut(module, "bias", 0, device_mesh)
        group, by_sequence, whole_forward = (
            device_mesh.get_group(),
            self.by_sequence,
            module.forward,
        )
        module.forward = lambda x: whole_forward(enter(x, group, by_sequence))
        return module


class Rows(_Style):
    """A linear layer whose inputs are cut: every rank has a partial sum, the bias comes after."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cut(module, "weight", 1, device_mesh)
        group, by_sequence = device_mesh.get_group(), self.by_sequence

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            y = leave(F.linear(x, module.weight), group, by_sequence)
            return y if module.bias is None else y + module.bias.to(y.dtype)

        module.forward = MethodType(forward, module)
        return module


class Lookup(_Style):
    """The word embedding with its rows cut: ids of other ranks' rows give zero here."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        start, stop = self.cut(module, "weight", 0, device_mesh)
        group, by_sequence = device_mesh.get_group(), self.by_sequence

        def forward(module: nn.Embedding, tokens: Tensor) -> Tensor:
            foreign = (tokens < start) | (tokens >= stop)
            found = F.embedding((tokens - start).masked_fill(foreign, 0), module.weight)
            return leave(found.masked_fill(foreign.unsqueeze(-1), 0.0), group, by_sequence)

        module.forward = MethodType(forward, module)
        return module


class Positions(_Style):
    """The position embedding, whole; with sequence parallelism of the own positions only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, degree, whole_forward = (
            device_mesh.get_local_rank(),
            device_mesh.size(),
            module.forward,
        )
        if self.by_sequence:
            module.forward = lambda ids: whole_forward(ids.chunk(degree, dim=-1)[rank])
        return module


class Heads(_Style):
    """Attention over the own heads. Their dropout must differ from the other ranks'.

    Without sequence parallelism the dropout after the block must not differ, so the generator is
    set aside for the time of the attention.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, CoreAttention)
        if module.dropout == 0.0 or self.by_sequence:
            return module
        rank, whole_forward = device_mesh.get_local_rank(), module.forward

        def forward(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
        ) -> Tensor:
            if not module.training:
                return whole_forward(q, k, v, mask)
            # Drawn by all ranks alike, and again when the layer is recomputed.
            shared = int(torch.randint(2**62, ()))
            devices = [q.device] if q.device.type != "cpu" else []
            with torch.random.fork_rng(devices, device_type=q.device.type):
                torch.manual_seed(mix_seed(shared, rank))
                return whole_forward(q, k, v, mask)

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


class Logits(_Style):
    """The head over the own rows of the vocabulary."""

    def __init__(self, by_sequence: bool, vocab_size: int) -> None:
        super().__init__(by_sequence)
        self.vocab_size = vocab_size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head)
        if "weight" in module._parameters:
            self.cut(module, "weight", 0, device_mesh)
        degree, rank = device_mesh.size(), device_mesh.get_local_rank()
        ranges = [split_range(self.vocab_size, rank, degree) for rank in range(degree)]
        group, by_sequence, whole_forward = (
            device_mesh.get_group(),
            self.by_sequence,
            module.forward,
        )

        def forward(x: Tensor, weight: Tensor, labels: Tensor | None, *loss_terms: Any) -> Tensor:
            x = enter(x, group, by_sequence)
            given = whole_forward(x, weight, labels, *loss_terms)
            return given if labels is not None else _all_columns(given, ranges, group)

        module.vocabulary = VocabularyRows(ranges[rank][0], group)
        module.forward = forward  # type: ignore[assignment,method-assign]
        return module


def _all_columns(logits: Tensor, ranges: list[tuple[int, int]], group: ProcessGroup) -> Tensor:
    """(B, T, own V) of every rank -> (B, T, V). For generation: no gradient goes through it."""
    widths = [stop - start for start, stop in ranges]
    # Gathered pieces must be of one size, and the rows of a vocabulary need not divide.
    own = F.pad(logits.detach(), (0, max(widths) - logits.shape[-1])).contiguous()
    pieces = [torch.empty_like(own) for _ in ranges]
    dist.all_gather(pieces, own, group=group)
    return torch.cat([piece[..., :width] for piece, width in zip(pieces, widths)], dim=-1)


class VocabularyRows(Vocabulary):
    """Probabilities where each rank has the logits of its own rows of the vocabulary."""

    def __init__(self, first_row: int, group: ProcessGroup) -> None:
        self.first_row = first_row
        self.group = group

    def normalize(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        target = target - self.first_row
        foreign = (target < 0) | (target >= logits.shape[1])
        target = target.masked_fill(foreign, 0)
        largest = logits.amax(dim=1, keepdim=True)
        with communicating():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        logits.sub_(largest)
        target_logit = logits.gather(1, target).masked_fill_(foreign, 0.0)
        probabilities = logits.exp_()
        sums = torch.cat([probabilities.sum(dim=1, keepdim=True), target_logit], dim=1)  # (C, 2)
        with communicating():
            dist.all_reduce(sums, group=self.group)
        normaliser, target_logit = sums.split(1, dim=1)
        probabilities.div_(normaliser)
        return normaliser.log() - target_logit, target, (~foreign).to(logits.dtype)
