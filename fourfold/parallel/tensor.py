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

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from fourfold.model import kernels
from fourfold.model.gpt import GPT, CoreAttention, Head, HeadNorm
from fourfold.model.layers import Linear, Linears
from fourfold.model.loss import Vocabulary, compute_dtype
from fourfold.model.params import Param, split_range
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
    if isinstance(module, Linears):
        rows = {name: model.table[f"{path}.{name}.weight"] for name in module}
        return ColumnParallels(sequence_parallel, rows)
    if isinstance(module, HeadNorm):
        row = model.table[f"{path}.weight"]
        return None if row.split_dim is None else NormOfAllHeads(sequence_parallel, row)
    if not isinstance(module, nn.Linear | nn.Embedding):
        return None
    if isinstance(model.get_submodule(path.rpartition(".")[0]), Linears):
        return None  # cut together with its siblings
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

    def cut(
        self,
        module: nn.Module,
        name: str,
        dim: int,
        mesh: DeviceMesh,
        pieces: int | None = None,
    ) -> tuple[int, int]:
        """Replace a parameter by this rank's slice of it; its range in the whole.

        Of fewer `pieces` than ranks, neighbours have the same.
        """
        whole: Tensor = getattr(module, name)
        pieces = pieces or mesh.size()
        place = mesh.get_local_rank() * pieces // mesh.size()
        start, stop = split_range(whole.shape[dim], place, pieces)
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
            return gathered_linear([module], x, group)[0]

        if self.sequence_parallel:
            module.forward = MethodType(of_own_positions, module)  # type: ignore[method-assign]
        else:
            module.forward = lambda x: whole_forward(copy_to_tp(x, group, False))  # type: ignore[method-assign]
        return module


class ColumnParallels(_Style):
    """Several such layers of one input, which crosses over to them once."""

    def __init__(self, sequence_parallel: bool, rows: Mapping[str, Param]) -> None:
        super().__init__(sequence_parallel)
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Linears)
        for name, row in self.rows.items():
            layer, pieces = module[name], row.pieces(device_mesh.size())
            self.cut(layer, "weight", 0, device_mesh, pieces)
            if layer.bias is not None:
                self.cut(layer, "bias", 0, device_mesh, pieces)
        group, whole_forward = device_mesh.get_group(), module.forward

        def of_own_positions(module: Linears, x: Tensor) -> list[Tensor]:
            return gathered_linear([cast(Linear, one) for one in module.values()], x, group)

        if self.sequence_parallel:
            module.forward = MethodType(of_own_positions, module)  # type: ignore[method-assign]
        else:
            module.forward = lambda x: whole_forward(copy_to_tp(x, group, False))  # type: ignore[method-assign]
        return module


class NormOfAllHeads(_Style):
    """A norm over all heads of a token, of which each rank has some."""

    def __init__(self, sequence_parallel: bool, row: Param) -> None:
        super().__init__(sequence_parallel)
        self.row = row

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, HeadNorm)
        degree, group = device_mesh.size(), device_mesh.get_group()
        pieces = self.row.pieces(degree)
        self.cut(module, "weight", 0, device_mesh, pieces)

        def mean_square(x: Tensor) -> Tensor:
            # Every head counts as often as there are ranks that have it, and the gradient of what
            # a rank adds is the sum of all ranks' uses of the mean.
            own = x.square().mean(dim=(1, 3), keepdim=True) / degree
            return _SumBothWays.apply(own, group)

        module.mean_square = mean_square  # type: ignore[method-assign]
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

        def forward(module: nn.Module, q: Tensor, *given: Any) -> Tensor:
            if not module.training or kernels.usable(q.device, q.dtype):
                return whole_forward(q, *given)
            # Drawn by all ranks alike, and again when the layer is recomputed.
            shared = int(torch.randint(2**62, ()))
            devices = [q.device] if q.device.type != "cpu" else []
            with torch.random.fork_rng(devices, device_type=q.device.type):
                seed_dropout(q.device, shared, rank)
                return whole_forward(q, *given)

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

        module.vocabulary = VocabularyRows(module.vocabulary, ranges[rank][0], group)
        module.tied = None
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

    def __init__(self, whole: Vocabulary, first_row: int, group: ProcessGroup) -> None:
        super().__init__(whole.softcap, whole.z_loss)
        self.first_row = first_row
        self.group = group

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, weights: Tensor, trains: bool
    ) -> tuple[Tensor, Tensor]:
        return self._by_passes(logits, labels, weights.unsqueeze(1), trains)

    def normalize(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        target = target - self.first_row
        foreign = (target < 0) | (target >= logits.shape[1])
        target = target.masked_fill(foreign, 0)
        largest = logits.amax(dim=1, keepdim=True)
        all_reduce(largest, self.group, dist.ReduceOp.MAX)
        target_logit = logits.gather(1, target).masked_fill_(foreign, 0.0)
        logits.sub_(largest)
        probabilities = logits.exp_()
        sums = torch.cat([probabilities.sum(dim=1, keepdim=True), target_logit], dim=1)  # (C, 2)
        all_reduce(sums, self.group)
        normaliser, target_logit = sums.split(1, dim=1)
        probabilities.div_(normaliser)
        return normaliser.log() + largest, target_logit, target, (~foreign).to(logits.dtype)


# -- collectives that autograd goes through -------------------------------------------------------


def copy_to_tp(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Into a block whose weights are cut."""
    return _Gather.apply(x, group) if sequence_parallel else _SumGradient.apply(x, group)


def reduce_from_tp(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Out of such a block, with its partial sums added up."""
    return _Scatter.apply(x, group) if sequence_parallel else _Sum.apply(x, group)


def gathered_linear(layers: Sequence[Linear], x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Outputs of the layers at all positions, of which x (B, T, D) are this rank's: each
    (B, T * ranks, O).

    The same numbers as a gather and linear layers after it, under autocast too.
    """
    dtype = compute_dtype(x.device, x.dtype)
    weights = [_not_a_leaf(layer.weight, dtype) for layer in layers]
    biases = [
        _not_a_leaf(layer.bias, dtype) if layer.fused and layer.bias is not None else None
        for layer in layers
    ]
    made = _GatheredLinear.apply(x.view_as(x), dtype, group, *weights, *biases)
    return [
        y if layer.fused or layer.bias is None else y + layer.bias.to(y.dtype)
        for y, layer in zip(made, layers)
    ]


def _not_a_leaf(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter in `dtype`, with a node of its own in the graph.

    Autograd tells whether it will go on to a node, but not whether to a leaf.
    """
    return parameter.view_as(parameter) if parameter.dtype == dtype else parameter.to(dtype)


class _GatheredLinear(torch.autograd.Function):
    """Of `given`, the first half are weights and the second their biases or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, group: ProcessGroup, *given: Tensor
    ) -> tuple[Tensor, ...]:
        own, count = x.to(dtype), len(given) // 2
        weights, biases = given[:count], given[count:]
        ctx.save_for_backward(own, *weights)
        ctx.group, ctx.dtype = group, x.dtype
        ctx.has_bias = [bias is not None for bias in biases]
        whole = _gathered(own, group)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A pipeline schedule that splits the backward pass comes here once for the gradient of x
        # and once for those of the weights, and only then are all positions needed.
        wanted = [
            node is not None and torch._C._will_engine_execute_node(node)
            for node, _ in ctx.next_functions
        ]
        own, *weights = ctx.saved_tensors
        rows = [gradient.flatten(0, 1) for gradient in gradients]  # (B * all T, O) each
        grad_x: Tensor | None = None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if wanted[0]:
            whole = rows[0].mm(weights[0])
            for row, weight in zip(rows[1:], weights[1:]):
                whole.addmm_(row, weight)
            whole = whole.view(*gradients[0].shape[:2], -1)
            grad_x = _scattered(whole.to(ctx.dtype), ctx.group)
        if any(wanted[1 : 1 + len(weights)]):
            inputs = _gathered(own, ctx.group).flatten(0, 1)
            grad_weights = [row.t().mm(inputs) for row in rows]
        asked = iter(wanted[1 + len(weights) :])  # biases that are not None
        grad_biases = [
            row.sum(0) if has_bias and next(asked) else None
            for row, has_bias in zip(rows, ctx.has_bias)
        ]
        return grad_x, None, None, *grad_weights, *grad_biases


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


class _SumBothWays(torch.autograd.Function):
    """A sum that every rank then uses in its own way, so that gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


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
