"""Weights packed for the kernels of fourfold/native, and the GPT network in one call of them.

    pack_model(model, "int4")     every linear layer becomes a `PackedLinear`; returns the head
    FusedGPT(model, head)         embeddings, layers and head in one call, where the network is ours

A packed matrix stands in the order in which products read it, for one row and for thousands alike,
so there is one copy of the weights. The products of a row are the same to the bit whatever else is
in the batch, and the same for a prompt as for one token at a time (fourfold/native/matrix.h).

`PackedLinear` serves any network. `FusedGPT` knows the block of fourfold/model/gpt.py alone, with
all its options; other networks run through torch, with packed products.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fourfold import native
from fourfold.errors import UserError
from fourfold.generate.sharing import RowPart
from fourfold.model.gpt import GPT, MLP, Attention, Block, Embedding, Embeddings, Head
from fourfold.model.layers import LayerNorm, Linear, RMSNorm
from fourfold.model.positions import rotation

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
LARGEST_HALF = 65504.0
PANEL, BLOCK = 16, 64
# Rows of one call: more would only need more memory, since the result is the same.
ROWS_AT_ONCE = 512

NORMS = ("norm1", "norm2", "q_norm", "k_norm")
# As fourfold/native/matrix.h numbers them; of a gated block, that of the gate.
ACTIVATIONS = {"gelu_tanh": 1, "geglu": 1, "gelu": 2, "relu_squared": 3, "swiglu": 4}

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("kind", _int64),
        ("outputs", _int64),
        ("inputs", _int64),
        ("weights", _pointer),
        ("scales", _pointer),
        ("sums", _pointer),
        ("bias", _pointer),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("keys", "values")),
        *((name, _int64) for name in ("heads", "size", "positions", "half")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((f"{norm}_{part}", _pointer) for norm in NORMS for part in ("weight", "bias")),
        *((name, _Matrix) for name in ("q", "k", "v", "out", "gate", "up", "down")),
        ("cache", _Cache),
        ("window", _int64),
    ]


class _Network(ctypes.Structure):
    _fields_ = [
        *((name, _int64) for name in ("layers", "hidden", "heads", "ffn", "vocabulary")),
        *((name, _int64) for name in ("activation", "rms_norm", "post_norm", "parallel_residual")),
        *((name, _int64) for name in ("norm_all_heads", "rotary_pairs")),
        *((name, _pointer) for name in ("layer", "norm_weight", "norm_bias", "head")),
        *((name, _pointer) for name in ("half_words", "words", "places", "cosines", "sines")),
        *((name, ctypes.c_float) for name in ("epsilon", "attention_scale", "embedding_scale")),
        *((name, ctypes.c_float) for name in ("logit_scale", "logit_softcap")),
    ]


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None."""
    library = native.library("decode")
    if library is not None and library.scratch_bytes.restype is not _int64:
        for name in ("scratch_bytes", "linear_scratch_bytes"):
            getattr(library, name).restype = _int64
    return library


def _needed() -> Any:
    library = kernels()
    assert library is not None, native.why_not("decode")
    return library


class Memory:
    """Bytes for many matrices in one block, on large pages where the system gives them: weights
    are read from end to end for every token, and small pages cost a tenth of that."""

    def __init__(self, size: int) -> None:
        self._block = mmap.mmap(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._block.madvise(mmap.MADV_HUGEPAGE)
        self._whole = torch.frombuffer(self._block, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        part = self._whole[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        assert self._used <= len(self._whole), (self._used, len(self._whole))
        return part


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return Memory(size).take(size).view(dtype).view(shape)


class PackedMatrix:
    """Weights (outputs, inputs) in one of the formats, and a bias in float32."""

    def __init__(
        self, kind: str, weight: Tensor, bias: Tensor | None = None, memory: Memory | None = None
    ) -> None:
        outputs, inputs = weight.shape
        if kind == "float16" and not float(weight.abs().max()) <= LARGEST_HALF:
            raise UserError(
                f"a weight of {float(weight.abs().max()):g} does not fit into float16, which ends "
                f"at {LARGEST_HALF:g}; use Inference.weights=float32"
            )
        self.kind, self.outputs, self.inputs = kind, outputs, inputs
        weight = weight.detach().float().contiguous()
        memory = memory or Memory(packed_bytes(kind, outputs, inputs))
        parts = [memory.take(size) for size in _sizes(kind, outputs, inputs)]
        places = [part.data_ptr() if len(part) else None for part in parts]
        _needed().pack(
            *map(_int64, (KINDS[kind], outputs, inputs)),
            *map(_pointer, (weight.data_ptr(), *places)),
            _int64(torch.get_num_threads()),
        )
        if bias is not None:
            self.bias = torch.zeros(-(-outputs // BLOCK) * BLOCK)
            self.bias[:outputs] = bias
        self._parts, self._memory = parts, memory  # what the pointers below point to
        self.struct = _Matrix(
            KINDS[kind],
            outputs,
            -(-inputs // 32) * 32,
            *places,
            None if bias is None else self.bias.data_ptr(),
        )

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self._parts)

    def linear(self, x: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs), with the bias."""
        library, rows = _needed(), x.reshape(-1, x.shape[-1]).float().contiguous()
        y = torch.empty(rows.shape[0], self.outputs)
        matrix, count = ctypes.byref(self.struct), _int64(rows.shape[0])
        scratch = torch.empty(library.linear_scratch_bytes(matrix, count), dtype=torch.uint8)
        library.linear(
            matrix,
            _pointer(rows.data_ptr()),
            _int64(self.inputs),
            count,
            *map(_pointer, (y.data_ptr(), scratch.data_ptr())),
            _int64(torch.get_num_threads()),
        )
        return y.view(*x.shape[:-1], self.outputs)

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of these outputs (...,), as they are after rounding: (..., inputs)."""
        numbers = outputs.reshape(-1).long().contiguous()
        found = torch.empty(len(numbers), self.inputs)
        _needed().rows_of(
            ctypes.byref(self.struct),
            _pointer(numbers.data_ptr()),
            *map(_int64, (len(numbers), self.inputs)),
            _pointer(found.data_ptr()),
        )
        return found.view(*outputs.shape, self.inputs)


def _sizes(kind: str, outputs: int, inputs: int) -> list[int]:
    sizes = (_int64 * 3)()
    _needed().packed_bytes(*map(_int64, (KINDS[kind], outputs, inputs)), sizes)
    return list(sizes)


def packed_bytes(kind: str, outputs: int, inputs: int) -> int:
    return sum(-(-size // 64) * 64 for size in _sizes(kind, outputs, inputs))


class PackedLinear(nn.Module):
    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x)


class PackedEmbedding(nn.Module):
    """The rows of a packed head that is tied to the word embedding."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    @property
    def weight(self) -> Tensor:
        """The whole table, unpacked; for who calls the model itself."""
        return self.matrix.rows(torch.arange(self.matrix.outputs))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.matrix.rows(tokens)


class HalfEmbedding(Embedding):
    """A float16 table that is only looked up; rows are widened as they are read."""

    @classmethod
    def of(cls, table: Tensor) -> HalfEmbedding:
        rows, width = table.shape
        return cls(rows, width, _weight=table.half(), _freeze=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def pack_model(model: GPT, kind: str) -> PackedLinear:
    """Replace every linear layer and the word embedding in place; returns the head.

    A tied embedding is the rows of the head. Whole numbers are too coarse for one, which is looked
    up and not read as a whole: with them it keeps a table in half precision. So does one that is
    not tied, except with float32.
    """
    table = model.embeddings.word.weight.data
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    shapes = [tuple(module.weight.shape) for module in linears]
    total = sum(packed_bytes(kind, *shape) for shape in [*shapes, tuple(model.head_weight.shape)])
    memory = Memory(total)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                bias = None if child.bias is None else child.bias.data
                packed = PackedMatrix(kind, child.weight.data, bias, memory)
                child.weight.data = torch.empty(0)  # the next one needs the memory
                setattr(parent, name, PackedLinear(packed))
    head = PackedMatrix(kind, model.head_weight.data, None, memory)
    is_tied = model.table.tied is not None
    if not is_tied:
        model.head.weight.data = torch.empty(0)
    if is_tied and not kind.startswith("int"):
        model.embeddings.word = PackedEmbedding(head)  # type: ignore[assignment]
    elif kind != "float32":
        model.embeddings.word = HalfEmbedding.of(table)
    return PackedLinear(head)


# -- the network in one call ----------------------------------------------------------------------


# What decides the network that decode.c computes, and what does not matter to generation.
KNOWN_OPTIONS = {
    *("num_key_value_heads", "head_dim", "activation", "normalization", "norm_epsilon"),
    *("norm_placement", "parallel_residual", "qk_norm", "bias", "tie_word_embeddings"),
    *("position_embedding", "rope_theta", "partial_rotary_factor", "rope_scaling"),
    *("sliding_window", "sliding_window_layers", "attention_scale", "embedding_scale"),
    *("logit_scale", "logit_softcap", "z_loss", "hidden_dropout_prob", "initializer_range"),
    *("attention_probs_dropout_prob", "depth_scaled_init", "fused_linear", "loss_chunk_tokens"),
    *("mup_base_width", "network"),
}


def is_known(model: GPT) -> bool:
    """Whether the network is, part by part, the one of fourfold/model/gpt.py, with options that the
    kernels have."""
    shape = model.shape
    norm = RMSNorm if shape.normalization == "RMSNorm" else LayerNorm
    options = [field for field in fields(shape) if field.default is not MISSING]
    return (
        all(
            option.name in KNOWN_OPTIONS or getattr(shape, option.name) == option.default
            for option in options
        )
        and shape.activation in ACTIVATIONS
        and type(model.embeddings) is Embeddings
        and type(model.head) is Head
        and type(model.norm) is norm
        and all(
            type(layer) is Block
            and type(layer.attn) is Attention
            and type(layer.mlp) is MLP
            and all(type(each) is norm for each in (layer.norm1, layer.norm2))
            for layer in model.layers.values()
        )
    )


class FusedGPT:
    """The whole network in one call, with its cache of keys and values.

    The cache holds `rows` sequences; a token is computed with its sequence and its position. Keys
    and values are those of `num_key_value_heads`, float32, or with narrower weights float16.
    """

    def __init__(self, model: GPT, head: PackedLinear) -> None:
        self.shape, self.head = model.shape, head.matrix
        shape, embeddings = self.shape, model.embeddings
        self._layers = (_Layer * len(model.layers))()
        self._kept: list[Any] = [model]  # what the pointers point to
        self._turns = torch.empty(0)
        for layer, (number, block) in zip(self._layers, model.layers.items()):
            for name in ("norm1", "norm2"):
                self._set_norm(layer, name, getattr(block, name))
            if shape.qk_norm != "none":
                for name in ("q_norm", "k_norm"):
                    self._set_norm(layer, name, getattr(block.attn, name))
            for name, linear in self._linears(block):
                setattr(layer, name, linear.matrix.struct)
            layer.window = shape.window_of(int(number)) or 0
        word, position = embeddings.word, embeddings.position
        is_post = shape.norm_placement == "post"
        self._network = _Network(
            layers=len(model.layers),
            hidden=shape.hidden_size,
            heads=shape.num_attention_heads,
            ffn=shape.ffn_hidden_size,
            vocabulary=self.head.outputs,
            activation=ACTIVATIONS[shape.activation],
            rms_norm=int(shape.normalization == "RMSNorm"),
            post_norm=int(is_post),
            parallel_residual=int(shape.parallel_residual and not is_post),
            norm_all_heads=int(shape.qk_norm == "all_heads"),
            rotary_pairs=(shape.rotary_size + 1) // 2,
            layer=ctypes.addressof(self._layers),
            head=ctypes.addressof(self.head.struct),
            half_words=word.weight.data_ptr() if isinstance(word, HalfEmbedding) else None,
            words=word.weight.data_ptr() if type(word) is Embedding else None,
            places=None if position is None else position.weight.data_ptr(),
            epsilon=shape.norm_epsilon,
            attention_scale=shape.attention_scale or 1 / math.sqrt(shape.head_size),
            embedding_scale=embeddings.scale,
            logit_scale=model.head.scale,
            logit_softcap=model.head.vocabulary.softcap or 0.0,
        )
        self._set_norm(self._network, "norm", model.norm)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._library = _needed()
        self.nbytes = self.head.nbytes + sum(
            linear.matrix.nbytes
            for block in model.layers.values()
            for _, linear in self._linears(block)
        )

    def _set_norm(self, struct: Any, name: str, norm: Any) -> None:
        weight, bias = norm.weight, getattr(norm, "bias", None)
        if bias is None:
            bias = torch.zeros_like(weight)
            self._kept.append(bias)
        setattr(struct, f"{name}_weight", weight.data_ptr())
        setattr(struct, f"{name}_bias", bias.data_ptr())

    @staticmethod
    def _linears(block: Any) -> list[tuple[str, PackedLinear]]:
        """By their names in decode.c, where `q` is the one of all three if there is just one."""
        attn, mlp = block.attn, block.mlp
        return [
            *(attn.in_proj.items() if attn.is_grouped else [("q", attn.qkv)]),
            ("out", attn.out),
            *(mlp.in_proj.items() if mlp.is_gated else [("up", mlp.up)]),
            ("down", mlp.down),
        ]

    def reserve(self, rows: int, positions: int) -> None:
        """Memory for the keys and values of that many sequences of that many tokens."""
        shape = self.shape
        layers, heads = len(self._layers), shape.key_value_heads
        blocks, size = -(-positions // PANEL), shape.head_size
        padded = -(-size // PANEL) * PANEL
        half = self.head.kind != "float32"
        dtype = torch.float16 if half else torch.float32
        self.keys = _zeros((layers, rows, heads, blocks, size * PANEL), dtype)
        self.values = _zeros((layers, rows, heads, blocks * PANEL, padded), dtype)
        for layer, keys, values in zip(self._layers, self.keys, self.values):
            places = keys.data_ptr(), values.data_ptr()
            layer.cache = _Cache(*places, heads, size, blocks * PANEL, int(half))
        if shape.rotary_size > 0:
            self._turns = rotation(shape, torch.arange(positions)).contiguous()
            cosines, sines = self._turns
            self._network.cosines, self._network.sines = cosines.data_ptr(), sines.data_ptr()

    def copy(self, moves: Sequence[tuple[int, int]], width: int) -> None:
        """The first `width` tokens of rows onto other rows (from, to), all at once."""
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        blocks = -(-width // PANEL)
        self.keys[:, targets, :, :blocks] = self.keys[:, sources, :, :blocks]
        self.values[:, targets, :, :width] = self.values[:, sources, :, :width]

    def take_in(self, parts: Sequence[RowPart]) -> Tensor:
        """Logits (sum of wanted, V)."""
        tokens, wanted = list[tuple[int, int, int]](), list[int]()
        for row, start, new, last in parts:
            tokens += [(token, row, place) for place, token in enumerate(new, start)]
            wanted += range(len(tokens) - last, len(tokens))
        return self.run(tokens, wanted)

    def wipe(self, rows: Sequence[int]) -> None:
        self.keys[:, list(rows)] = self.values[:, list(rows)] = 0.0

    def run(self, tokens: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> Tensor:
        """Take in tokens, each with its row and position; logits (wanted, V) of some of them.

        Tokens of one row come in their order, without a gap.
        """
        logits = torch.empty(len(wanted), self.head.outputs)
        done = 0
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            part = np.array(tokens[start : start + ROWS_AT_ONCE], dtype=np.int32)
            places = [place - start for place in wanted if start <= place < start + len(part)]
            self._run(part, places, logits[done : done + len(places)])
            done += len(places)
        assert done == len(wanted), "wanted places come in their order"
        return logits

    def _run(self, part: np.ndarray, wanted: Sequence[int], logits: Tensor) -> None:
        threads, count = _int64(torch.get_num_threads()), _int64(len(part))
        network = ctypes.byref(self._network)
        size = self._library.scratch_bytes(network, count, threads)
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.uint8)
        places = np.array(wanted, dtype=np.int32)
        self._library.forward(
            network,
            _pointer(part.ctypes.data),
            count,
            _pointer(places.ctypes.data),
            _int64(len(wanted)),
            *map(_pointer, (logits.data_ptr(), self._scratch.data_ptr())),
            threads,
        )
