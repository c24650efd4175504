"""Tensor parallelism (model parallelism): each rank holds a slice of every matrix.

Torch's `parallelize_module` applies the styles below, which follow its `ParallelStyle` but keep
plain local tensors where torch's own make DTensors of the activations: the same collectives at a
quarter of the overhead, and `fully_shard` then sees ordinary parameters.

Between the blocks each rank has either all of the activations or, with sequence parallelism, its
share of the positions. A block computes on all positions with a slice of the weights, and what
comes out of it is a partial sum.

| crossing       | forward                     | backward         | Megatron's |
|----------------|-----------------------------|------------------|------------|
| copy_to_tp     | nothing / gather positions  | sum / scatter    | f          |
| reduce_from_tp | sum / scatter               | nothing / gather | g          |

left of the slash without, right of it with sequence parallelism; scatter means sum, then keep this
rank's positions. What was gathered is not kept: a layer behind such a crossing keeps its own
positions and gathers again in the backward pass, when its weights' gradient needs all of them.
Letters: B batch, T positions of one rank, D hidden, O outputs.
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

from fourfold.model import kernels
from fourfold.model.gpt import GPT, CoreAttention, Head, Linear
from fourfold.model.loss import Vocabulary, compute_dtype
from fourfold.model.params import split_range
from fourfold.model.seeds import seed_dropout
from fourfold.parallel.shared_memory import all_gather, all_reduce, reduce_scatter, summed


def apply_model_parallel(model: GPT, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut the model (or the part of it) over the ranks of `mesh`. Expects the meta device."""
    plan = {}
    for path, module in model.named_modules():
        if style := _style_of(model, path, module, sequence_parallel):
            plan[path] = style
    parallelize_module(model, mesh, plan)


def _style_of(
    model: GPT, path: str, module: nn.Module, sequence_parallel: bool
) -> ParallelStyle | None:
    """What the table says about the module's weight, by the kind of the module."""
    if isinstance(module, CoreAttention):
        return ParallelHeads(sequence_parallel, model.shape.num_attention_heads)
    if isinstance(module, Head):
        return (
            VocabParallelHead(sequence_parallel, model.shape.vocab_size) if model.is_last else None
        )
    if not isinstance(module, nn.Linear | nn.Embedding):
        return None
    row = model.table[f"{path}.weight"]
    if row.split_dim is None:
        return PositionEmbedding(sequence_parallel) if row.partial_gradient else None
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding(sequence_parallel)
    return (
        ColumnParallel(sequence_parallel) if row.split_dim == 0 else RowParallel(sequence_parallel)
    )


class _Style(ParallelStyle):
    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def cut(self, module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> tuple[int, int]:
        """Replace a parameter by this rank's slice of it; its range in the whole."""
        whole: Tensor = getattr(module, name)
        start, stop = split_range(whole.shape[dim], mesh.get_local_rank(), mesh.size())
        own = whole.data.narrow(dim, start, stop - start).clone()
        module.register_parameter(name, nn.Parameter(own))
        return start, stop


class ColumnParallel(_Style):
    """A linear layer whose outputs are cut: every rank computes some of the features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Linear)
        self.cut(module, "weight", 0, device_mesh)
        if module.bias is not None:
            self.cut(module, "bias", 0, device_mesh)
        group, whole_forward = device_mesh.get_group(), module.forward

        def of_own_positions(module: Linear, x: Tensor) -> Tensor:
            y = gathered_linear(x, module.weight, module.bias if module.fused else None, group)
            return y if module.fused or module.bias is None else y + module.bias.to(y.dtype)

        if self.sequence_parallel:
            module.forward = MethodType(of_own_positions, module)  # type: ignore[method-assign]
        else:
            module.forward = lambda x: whole_forward(copy_to_tp(x, group, False))  # type: ignore[method-assign]
        return module


class RowParallel(_Style):
    """A linear layer whose inputs are cut: every rank has a partial sum, the bias comes after."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cut(module, "weight", 1, device_mesh)
        group, sequence_parallel = device_mesh.get_group(), self.sequence_parallel

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            y = reduce_from_tp(F.linear(x, module.weight), group, sequence_parallel)
            return y if module.bias is None else y + module.bias.to(y.dtype)

        module.forward = MethodType(forward, module)
        return module


class VocabParallelEmbedding(_Style):
    """The word embedding with its rows cut: ids of other ranks' rows are zero here."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        start, stop = self.cut(module, "weight", 0, device_mesh)
        group, sequence_parallel = device_mesh.get_group(), self.sequence_parallel

        def forward(module: nn.Embedding, tokens: Tensor) -> Tensor:
            foreign = (tokens < start) | (tokens >= stop)
            found = F.embedding((tokens - start).masked_fill(foreign, 0), module.weight)
            return reduce_from_tp(
                found.masked_fill(foreign.unsqueeze(-1), 0.0), group, sequence_parallel
            )

        module.forward = MethodType(forward, module)
        return module


class PositionEmbedding(_Style):
    """The position embedding, whole; with sequence parallelism for this rank's positions only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, degree, whole_forward = (
            device_mesh.get_local_rank(),
            device_mesh.size(),
            module.forward,
        )
        if self.sequence_parallel:
            module.forward = lambda ids: whole_forward(ids.chunk(degree, dim=-1)[rank])
        return module


class ParallelHeads(_Style):
    """Attention over this rank's heads. Their dropout must differ from the other ranks'.

    Our own kernel drops by the head's number. For torch's, without sequence parallelism, the
    generator is saved and restored around the attention: dropout after the block must not differ.
    """

    def __init__(self, sequence_parallel: bool, heads: int) -> None:
        super().__init__(sequence_parallel)
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, CoreAttention)
        module.first_head = device_mesh.get_local_rank() * self.heads // device_mesh.size()
        if module.dropout == 0.0 or self.sequence_parallel:
            return module
        rank, whole_forward = device_mesh.get_local_rank(), module.forward

        def forward(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
        ) -> Tensor:
            if not module.training or kernels.usable(q.device, q.dtype):
                return whole_forward(q, k, v, mask)
            # Drawn by all ranks alike, and again when the layer is recomputed.
            shared = int(torch.randint(2**62, ()))
            devices = [q.device] if q.device.type != "cpu" else []
            with torch.random.fork_rng(devices, device_type=q.device.type):
                seed_dropout(q.device, shared, rank)
                return whole_forward(q, k, v, mask)

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


class VocabParallelHead(_Style):
    """The head over this rank's rows of the vocabulary."""

    def __init__(self, sequence_parallel: bool, vocab_size: int) -> None:
        super().__init__(sequence_parallel)
        self.vocab_size = vocab_size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head)
        if "weight" in module._parameters:
            self.cut(module, "weight", 0, device_mesh)
        degree, rank = device_mesh.size(), device_mesh.get_local_rank()
        ranges = [split_range(self.vocab_size, rank, degree) for rank in range(degree)]
        group, sequence_parallel, whole_forward = (
            device_mesh.get_group(),
            self.sequence_parallel,
            module.forward,
        )

        def forward(x: Tensor, weight: Tensor, labels: Tensor | None, *loss_terms: Any) -> Tensor:
            x = copy_to_tp(x, group, sequence_parallel)
            given = whole_forward(x, weight, labels, *loss_terms)
            return given if labels is not None else _all_columns(given, ranges, group)

        module.vocabulary, module.tied = VocabularyRows(ranges[rank][0], group), None
        module.forward = forward  # type: ignore[assignment,method-assign]
        return module


def _all_columns(logits: Tensor, ranges: list[tuple[int, int]], group: ProcessGroup) -> Tensor:
    """(B, T, this rank's V) of every rank -> (B, T, V). For generation: no gradient goes through
    it."""
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

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, weights: Tensor, trains: bool
    ) -> tuple[Tensor, Tensor]:
        return self._by_passes(logits, labels, weights.unsqueeze(1), trains)

    def normalize(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        target = target - self.first_row
        foreign = (target < 0) | (target >= logits.shape[1])
        target = target.masked_fill(foreign, 0)
        largest = logits.amax(dim=1, keepdim=True)
        all_reduce(largest, self.group, dist.ReduceOp.MAX)
        logits.sub_(largest)
        target_logit = logits.gather(1, target).masked_fill_(foreign, 0.0)
        probabilities = logits.exp_()
        sums = torch.cat([probabilities.sum(dim=1, keepdim=True), target_logit], dim=1)  # (C, 2)
        all_reduce(sums, self.group)
        normaliser, target_logit = sums.split(1, dim=1)
        probabilities.div_(normaliser)
        return normaliser.log() - target_logit, target, (~foreign).to(logits.dtype)


# -- collectives that autograd goes through -------------------------------------------------------


def copy_to_tp(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Into a block whose weights are cut."""
    return _Gather.apply(x, group) if sequence_parallel else _SumGradient.apply(x, group)


def reduce_from_tp(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Out of such a block, with its partial sums added up."""
    return _Scatter.apply(x, group) if sequence_parallel else _Sum.apply(x, group)


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
    """`F.linear` of all positions, of which x (B, T, D) are this rank's: (B, T * ranks, O).

    The same numbers as a gather and a linear layer after it, under autocast too.
    """
    dtype = compute_dtype(x.device, x.dtype)
    given = (one if one is None else _not_a_leaf(one, dtype) for one in (weight, bias))
    return _GatheredLinear.apply(x.view_as(x), *given, dtype, group)


def _not_a_leaf(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter in `dtype`, with a node of its own in the graph.

    Autograd tells whether it will go on to a node, but not whether to a leaf.
    """
    return parameter.view_as(parameter) if parameter.dtype == dtype else parameter.to(dtype)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        group: ProcessGroup,
    ) -> Tensor:
        own = x.to(dtype)
        ctx.save_for_backward(own, weight)
        ctx.group, ctx.dtype = group, x.dtype
        return F.linear(_gathered(own, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # A pipeline schedule that splits the backward pass comes here once for the gradient of x
        # and once for those of the weights, and only then are all positions needed.
        wanted = [
            node is not None and torch._C._will_engine_execute_node(node)
            for node, _ in ctx.next_functions
        ]
        own, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)  # (B * all T, O)
        grad_x = grad_weight = grad_bias = None
        if wanted[0]:
            whole = rows.mm(weight).view(*gradient.shape[:2], -1)
            grad_x = _scattered(whole.to(ctx.dtype), ctx.group)
        if wanted[1]:
            grad_weight = rows.t().mm(_gathered(own, ctx.group).flatten(0, 1))
        if len(wanted) > 2 and wanted[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, T, D) of every rank -> (B, T * ranks, D)."""
    first = x.transpose(0, 1).contiguous()  # (T, B, D): positions outermost, as they are gathered
    whole = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
    all_gather(whole, first, group)
    return whole.transpose(0, 1).contiguous()


def _scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    """(B, T * ranks, D) -> the sum over the ranks, of this rank's positions (B, T, D)."""
    whole = x.transpose(0, 1).contiguous()
    own = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    reduce_scatter(own, whole, group)
    return own.transpose(0, 1).contiguous()
