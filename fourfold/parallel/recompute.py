"""Activations that are not kept on the device: recomputed (activation checkpointing), or offloaded.

| granularity | kept of a layer                                    | made again           |
|-------------|----------------------------------------------------|----------------------|
| full        | its input                                          | everything           |
| ops         | its input, products and what attention gave        | norms, GELU, dropout |
| full_attn   | all but what attention (qkv, core, out) keeps      | attention            |
| core_attn   | all but what softmax(q kᵀ) v keeps                 | softmax(q kᵀ) v      |

`uniform` runs so many layers together and keeps the input of the first only, which `full` alone can
do; `block` recomputes the first so many layers of a stage and leaves the rest as they are. The
numbers are those of a run that keeps everything, to the bit: the state of the generator is kept and
restored, so a repeated dropout drops the same numbers.

Offloading copies what layers keep to host memory, and back when the backward pass comes to it. Of
what is recomputed there is nothing to copy but where only attention is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fourfold.config.model_section import ModelSection
from fourfold.model.gpt import GPT, Attention, CoreAttention
from fourfold.model.kernels import Scratch
from fourfold.model.layers import GELU, Activation, Gate, LayerNorm, Linear, RMSNorm

aten = torch.ops.aten
KEPT_OPERATIONS = {
    "products": (aten.mm.default, aten.addmm.default),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.fourfold.attention.default,
    ),
}


@dataclass(frozen=True)
class Recompute:
    """What is recomputed, and of which layers of a stage."""

    granularity: str
    method: Literal["uniform", "block"] = "uniform"
    layers: int = 1  # run together, or the first so many
    keep: Sequence[str] = ("products", "attention")  # by `ops`

    @classmethod
    def of(cls, model: ModelSection) -> Recompute | None:
        if not model.use_recompute:
            return None
        assert model.recompute_granularity is not None, "filled in when resolved"
        return cls(
            model.recompute_granularity,
            model.recompute_method,
            model.recompute_num_layers,
            model.recompute_keep,
        )

    def __str__(self) -> str:
        if self.method == "block":
            return f"{self.granularity} of the first {self.layers} layer(s) of a stage"
        together = f", {self.layers} layers together" if self.layers > 1 else ""
        return self.granularity + together


def apply_recompute(model: GPT, recompute: Recompute, *, mp_degree: int = 1) -> None:
    """Replace the forward of what is recomputed; parameter names stay as they are."""
    numbers = list(model.layers)
    if recompute.method == "block":
        numbers = numbers[: recompute.layers]
    elif recompute.layers > 1:
        _run_together(model, numbers, recompute.layers)
        return
    layers = [model.layers[number] for number in numbers]
    if recompute.granularity == "full":
        _recompute(layers)
    elif recompute.granularity == "ops":
        for number in numbers:
            _keep_operations(model, number, recompute.keep, mp_degree)
    else:
        kind = {"full_attn": Attention, "core_attn": CoreAttention}[recompute.granularity]
        modules = [module for layer in layers for module in layer.modules()]
        _recompute(module for module in modules if isinstance(module, kind))


def _recompute(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.forward = _recomputed(module.forward)


def _recomputed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # A function and not a `partial`, of which the compiler would make a graph of its own for every
    # layer, and none after the eighth.
    def recomputed(*given: Any) -> Any:
        return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=True, **options)

    return recomputed


def _run_together(model: GPT, numbers: list[str], size: int) -> None:
    """Layers by the chunk: one input is kept of each, and one chunk at a time is made whole."""
    model.chunks = [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]
    model.run_layers = _recomputed(model.run_layers)  # type: ignore[method-assign]


def _keep_operations(model: GPT, number: str, keep: Sequence[str], mp_degree: int) -> None:
    """Of this layer keep what the operations named in `keep` give (torch's selective checkpoint).

    The last product of a layer is kept by nobody: no gradient needs it, and recomputing stops
    before it. Neither are partial sums over model-parallel ranks, each as large as if it were not
    divided; they are made again and added up again.
    """
    kept = {operation for name in keep for operation in KEPT_OPERATIONS[name]}
    layer, in_passing = model.layers[number], [0]

    def policy(_: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        if operation in kept and not in_passing[0]:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def not_kept(forward: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*given: Any) -> Any:
            in_passing[0] += 1
            try:
                return forward(*given)
            finally:
                in_passing[0] -= 1

        return passing

    writers = [
        module
        for path, module in layer.named_modules()
        if isinstance(module, Linear)
        and model.table[f"layers.{number}.{path}.weight"].split_dim == 1
    ]
    for module in writers if mp_degree > 1 else writers[-1:]:
        module.forward = not_kept(module.forward)  # type: ignore[method-assign]
    layer.forward = _recomputed(
        layer.forward, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )


# -- outputs that are cheap to make again ---------------------------------------------------------


def remake_cheap_outputs(model: GPT, *, norms: bool) -> None:
    """Keep neither what activations give nor, with `norms`, what norms give: the next product's
    backward pass makes it again from what these operations keep themselves.

    That is three eighths of a layer's activations for a hundredth of its time on a CPU. The numbers
    are the same to the bit. Not for norms whose weights may be gone by then, in sharding stage 3.
    """
    kinds: tuple[type[nn.Module], ...] = (GELU, Activation, Gate)
    if norms:
        kinds = (*kinds, LayerNorm, RMSNorm)
    scratch = Scratch()
    for layer in model.layers.values():
        outputs = _Outputs()
        for module in layer.modules():
            if isinstance(module, GELU | Gate):
                module.scratch = scratch
            if isinstance(module, kinds):
                module.forward = outputs.noting(module.forward)
        layer.forward = outputs.remade_in(layer.forward)


class _Outputs:
    """Of one layer while it runs: memory that need not be kept, and how to fill it again."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Tensor, _Remake]] = {}

    def noting(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(*inputs: Tensor) -> Tensor:
            y = forward(*inputs)
            if torch.is_grad_enabled():
                dtype, given = y.dtype, [x.detach() for x in inputs]
                # `y` is held until the layer is done: its memory must not become another's.
                remake = _Remake(lambda: forward(*given).to(dtype))
                self.made[_memory(y)] = y, remake
            return y

        return noted

    def remade_in(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def pack(tensor: Tensor) -> Tensor | _View:
            known = self.made.get(_memory(tensor))
            if known is None:
                return tensor
            known[1].readers += 1
            return _View(known[1], tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def remade(*given: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(*given)
            try:
                with saved_tensors_hooks(pack, _fill_again):
                    return forward(*given)
            finally:
                self.made = {}

        return remade


def _memory(tensor: Tensor) -> int:
    """Which block of memory it is in; unlike the address, tensors without memory have it too."""
    return tensor.untyped_storage()._cdata


@dataclass
class _Remake:
    """What several products read (q, k and v; gate and up) is made once for all of them."""

    make: Callable[[], Tensor]
    readers: int = 0  # yet to come
    made: Tensor | None = None  # while there are some

    def read(self) -> Tensor:
        made = self.make() if self.made is None else self.made
        self.readers -= 1
        self.made = made if self.readers > 0 else None
        return made


class _View(NamedTuple):
    """A tensor to be read, in the memory of what is made again."""

    of: _Remake
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _fill_again(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept.of.read().as_strided(kept.shape, kept.stride, kept.offset)


# -- host memory ----------------------------------------------------------------------------------

# Copying less takes longer to ask for than to do: statistics of norms, sums of attention.
SMALLEST_COPY_BYTES = 1 << 16


def apply_offload(model: GPT, copies: HostCopies) -> None:
    """Keep in host memory what the layers would keep for their backward pass."""
    for layer in model.layers.values():
        layer.forward = _offloaded(layer, layer.forward, copies)


def _offloaded(
    layer: nn.Module, forward: Callable[..., Any], copies: HostCopies
) -> Callable[..., Any]:
    def offloaded(x: Tensor, *given: Any) -> Any:
        # Weights stay, and so do masks and rotations, which all layers have in common.
        staying = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        shapes = {tuple(p.shape) for p in layer.parameters()}  # of casts of weights
        shapes |= {shape[::-1] for shape in shapes}
        common = (one for one in given if isinstance(one, Tensor))
        staying |= {one.untyped_storage().data_ptr() for one in common}

        def pack(tensor: Tensor) -> Tensor | HostCopy:
            size = tensor.numel() * tensor.itemsize
            stays = tensor.untyped_storage().data_ptr() in staying or tuple(tensor.shape) in shapes
            return tensor if stays or size < copies.smallest else copies.take(tensor)

        with saved_tensors_hooks(pack, _unpack):
            return forward(x, *given)

    return offloaded


def _unpack(kept: Tensor | HostCopy) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.back()


class HostCopies:
    """Copies to host memory and back, on a GPU by a stream of their own, beside the computing.

    The host's memory is pinned there, as copies that nobody waits for need it to be.
    """

    def __init__(self, device: torch.device, smallest: int = SMALLEST_COPY_BYTES) -> None:
        self.device = device
        self.smallest = smallest
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def take(self, tensor: Tensor) -> HostCopy:
        if not tensor.is_cuda:
            return HostCopy(tensor.clone(), self, tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        # Its memory is not given to another before the copy is made.
        tensor.record_stream(self.stream)
        return HostCopy(host, self, tensor.device)


@dataclass(frozen=True)
class HostCopy:
    """What was on `device`, in host memory."""

    host: Tensor
    copies: HostCopies
    device: torch.device

    def back(self) -> Tensor:
        if self.device.type != "cuda":
            return self.host
        stream, computing = self.copies.stream, torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream):
            tensor = self.host.to(self.device, non_blocking=True)
        computing.wait_stream(stream)
        tensor.record_stream(computing)
        return tensor


def needless_offload_notice(offloads: bool, device: torch.device) -> str | None:
    """On a CPU what a layer keeps is in host memory already."""
    if not offloads or device.type != "cpu":
        return None
    return "Model.offload_activations has no effect on a CPU, whose memory is the host's"
