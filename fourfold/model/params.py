"""The parameter table of a network, read by everything that has to know its parameters.

A row describes one parameter, or the same parameter of every layer. Initial weights, model (tensor)
parallelism, sharding, weight decay, mixed precision, the gradient norm, counts, costs, checkpoints
and the converters to and from other programs all look here, and never rely on the spelling of a
name:

    table = gpt_parameters(shape)
    table["layers.7.attn.qkv.weight"].split_dim      0: its rows are cut
    table.shapes["layers.7.attn.qkv.weight"]         (3 * hidden, hidden)

A second network is a second table and a second block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Literal

_LAYER_NUMBER = re.compile(r"^layers\.\d+\.")
EVERY_LAYER = "layers.*."


@dataclass(frozen=True)
class ModelShape:
    """What decides the network and its parameters; names are those of the `Model` section."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    ffn_hidden_size: int
    max_position_embeddings: int
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    depth_scaled_init: bool = False
    fused_linear: bool = True
    loss_chunk_tokens: int | None = None  # by the device
    network: str = "GPT"

    @classmethod
    def of(cls, section: object) -> ModelShape:
        """The shape a resolved `Model` section describes."""
        names = [field.name for field in fields(cls) if field.name != "network"]
        return cls(**{name: getattr(section, name) for name in names})

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


# -- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignNames:
    """A parameter's name in other programs' files; `*` is the number of its layer.

    `core` is Megatron Core with Transformer Engine, where a norm belongs to the linear layer after
    it, `core_local` Megatron Core with `--transformer-impl local`, `classic` Megatron-DeepSpeed.
    """

    huggingface: str
    fleetx: str
    core: str
    core_local: str
    classic: str

    def __getitem__(self, program: str) -> str:
        return str(getattr(self, program))


@dataclass(frozen=True)
class Param:
    """One row of the table."""

    name: str  # with "layers.*." where every layer has one
    shape: tuple[int, ...]  # of the whole, however it is cut
    kind: Literal["embedding", "linear", "norm"]  # of the module it belongs to
    init: Literal["normal", "zeros", "ones"]
    init_std: float = 0.0
    split_dim: int | None = None  # the dimension model parallelism cuts; None: every rank has all
    weight_decay: bool = True
    lr_scale: float = 1.0  # of the learning rate, under muP
    # Under sequence parallelism it is applied to a rank's own positions only, so that the ranks'
    # gradients add up to the whole one.
    partial_gradient: bool = False
    end: Literal["first", "last"] | None = None  # the pipeline stage that has it; None: its layer's
    # Tied to the head: the last pipeline stage holds a copy, and the gradients of both add up.
    tied_to_head: bool = False
    # Its rows are [q, k, v] of one head after the other, so that contiguous slices are whole heads.
    rows_by_head: bool = False
    in_attention: bool = False  # or in the rest of its layer
    foreign: ForeignNames | None = None

    @property
    def numel(self) -> int:
        """Of the whole parameter, in one layer."""
        return math.prod(self.shape)

    @property
    def in_every_layer(self) -> bool:
        return self.name.startswith(EVERY_LAYER)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied by it; an embedding table is no matrix."""
        return self.kind == "linear" and len(self.shape) == 2

    def of_layer(self, number: int) -> str:
        """Its name in that layer."""
        return self.name.replace("*", str(number), 1)


class ParamTable:
    """The rows of a network, by name, in the order in which its modules have them."""

    def __init__(self, rows: Iterable[Param], num_layers: int) -> None:
        self.rows = tuple(rows)
        self.num_layers = num_layers
        self._by_name = {row.name: row for row in self.rows}
        assert len(self._by_name) == len(self.rows), "every name once"

    def __getitem__(self, name: str) -> Param:
        """By the name of a parameter, in any layer."""
        return self._by_name[_LAYER_NUMBER.sub(EVERY_LAYER, name)]

    def __contains__(self, name: str) -> bool:
        return _LAYER_NUMBER.sub(EVERY_LAYER, name) in self._by_name

    def __iter__(self) -> Iterator[tuple[str, Param]]:
        """Every parameter of the whole network under its own name."""
        per_layer = [row for row in self.rows if row.in_every_layer]
        for row in self.rows:
            if not row.in_every_layer:
                yield row.name, row
            elif row is per_layer[0]:
                for number in range(self.num_layers):
                    yield from ((each.of_layer(number), each) for each in per_layer)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter of the whole network, by name."""
        return {name: row.shape for name, row in self}

    @property
    def tied(self) -> str | None:
        """The name of the parameter that is also the head."""
        return next((row.name for row in self.rows if row.tied_to_head), None)

    def count(self) -> int:
        """Numbers in all parameters; one that is tied counts once."""
        return sum(row.numel for _, row in self)

    def layer(self) -> list[Param]:
        """The rows of one layer."""
        return [row for row in self.rows if row.in_every_layer]

    def at(self, end: Literal["first", "last"]) -> list[Param]:
        """What that end of the network has besides its layers."""
        return [row for row in self.rows if row.end == end or (end == "last" and row.tied_to_head)]


def split_range(size: int, rank: int, degree: int) -> tuple[int, int]:
    """The slice [start, stop) of `size` rows that `rank` holds; the first ones are the longer."""
    short, longer = divmod(size, degree)
    start = rank * short + min(rank, longer)
    return start, start + short + (rank < longer)


# -- GPT-2 and GPT-3 ------------------------------------------------------------------------------


@cache
def gpt_parameters(shape: ModelShape) -> ParamTable:
    """The table of `GPT`.

    Biases and norms do not decay, embeddings do, as in the originals. FleetX draws all matrices
    alike; GPT-2's scaling of the matrices that end in the residual stream is an option.
    """
    width, wide, std = shape.hidden_size, shape.ffn_hidden_size, shape.initializer_range
    to_residual = std / math.sqrt(2 * shape.num_layers) if shape.depth_scaled_init else std
    word = Param(
        name="embeddings.word.weight",
        shape=(shape.vocab_size, width),
        kind="embedding",
        init="normal",
        init_std=std,
        split_dim=0,
        end="first",
        tied_to_head=True,
        foreign=ForeignNames(
            huggingface="transformer.wte.weight",
            fleetx="gpt.embeddings.word_embeddings.weight",
            core="embedding.word_embeddings.weight",
            core_local="embedding.word_embeddings.weight",
            classic="language_model.embedding.word_embeddings.weight",
        ),
    )
    position = Param(
        name="embeddings.position.weight",
        shape=(shape.max_position_embeddings, width),
        kind="embedding",
        init="normal",
        init_std=std,
        partial_gradient=True,
        end="first",
        foreign=ForeignNames(
            huggingface="transformer.wpe.weight",
            fleetx="gpt.embeddings.position_embeddings.weight",
            core="embedding.position_embeddings.weight",
            core_local="embedding.position_embeddings.weight",
            classic="language_model.embedding.position_embeddings.weight",
        ),
    )
    norm1 = _in_layer("ln_1.", "norm1.", _QKV + "layer_norm_", _INPUT, _INPUT)
    qkv = _in_layer("attn.c_attn.", "self_attn.qkv_proj.", _QKV, _QKV, _OLD + "query_key_value.")
    out = _in_layer("attn.c_proj.", "self_attn.out_proj.", _PROJ, _PROJ, _OLD + "dense.")
    norm2 = _in_layer("ln_2.", "norm2.", _FC1 + "layer_norm_", "pre_mlp_layernorm.", _POST)
    up = _in_layer("mlp.c_fc.", "linear1.", _FC1, _FC1, "mlp.dense_h_to_4h.")
    down = _in_layer("mlp.c_proj.", "linear2.", _FC2, _FC2, "mlp.dense_4h_to_h.")
    final = ForeignNames(
        huggingface="transformer.ln_f.",
        fleetx="gpt.decoder.norm.",
        core="decoder.final_layernorm.",
        core_local="decoder.final_layernorm.",
        classic="language_model.encoder.final_layernorm.",
    )
    rows = [
        word,
        position,
        *norm_rows("layers.*.norm1.", width, foreign=norm1),
        *linear_rows(
            "layers.*.attn.qkv.", 3 * width, width, std, 0, foreign=qkv,
            in_attention=True, rows_by_head=True,
        ),
        *linear_rows(
            "layers.*.attn.out.", width, width, to_residual, 1, foreign=out, in_attention=True
        ),
        *norm_rows("layers.*.norm2.", width, foreign=norm2),
        *linear_rows("layers.*.mlp.up.", wide, width, std, 0, foreign=up),
        *linear_rows("layers.*.mlp.down.", width, wide, to_residual, 1, foreign=down),
        *norm_rows("norm.", width, end="last", foreign=final),
    ]  # fmt: skip
    return ParamTable(rows, shape.num_layers)


def linear_rows(
    name: str,
    outputs: int,
    inputs: int,
    std: float,
    split_dim: int,
    *,
    bias: bool = True,
    in_attention: bool = False,
    rows_by_head: bool = False,
    foreign: ForeignNames | None = None,
) -> list[Param]:
    """A linear layer: column-parallel where its outputs are cut, dimension 0 of its weight.

    Row-parallel, dimension 1, its bias is added after the partial sums, by every rank.
    """
    weight = Param(
        name=f"{name}weight",
        shape=(outputs, inputs),
        kind="linear",
        init="normal",
        init_std=std,
        split_dim=split_dim,
        in_attention=in_attention,
        rows_by_head=rows_by_head,
        foreign=_suffixed(foreign, "weight"),
    )
    if not bias:
        return [weight]
    return [
        weight,
        replace(
            weight,
            name=f"{name}bias",
            shape=(outputs,),
            init="zeros",
            init_std=0.0,
            split_dim=0 if split_dim == 0 else None,
            weight_decay=False,
            partial_gradient=split_dim == 1,
            foreign=_suffixed(foreign, "bias"),
        ),
    ]


def norm_rows(
    name: str,
    width: int,
    *,
    bias: bool = True,
    end: Literal["first", "last"] | None = None,
    foreign: ForeignNames | None = None,
) -> list[Param]:
    """A norm, which is between the blocks."""
    weight = Param(
        name=f"{name}weight",
        shape=(width,),
        kind="norm",
        init="ones",
        weight_decay=False,
        partial_gradient=True,
        end=end,
        foreign=_suffixed(foreign, "weight"),
    )
    if not bias:
        return [weight]
    named = _suffixed(foreign, "bias")
    return [weight, replace(weight, name=f"{name}bias", init="zeros", foreign=named)]


# Of Megatron's layers.
_QKV, _PROJ = "self_attention.linear_qkv.", "self_attention.linear_proj."
_FC1, _FC2 = "mlp.linear_fc1.", "mlp.linear_fc2."
_INPUT, _POST, _OLD = "input_layernorm.", "post_attention_layernorm.", "self_attention."


def _in_layer(
    huggingface: str, fleetx: str, core: str, core_local: str, classic: str
) -> ForeignNames:
    """Of a module of every layer, up to the dot (or what core has for it) before `weight`."""
    return ForeignNames(
        huggingface=f"transformer.h.*.{huggingface}",
        fleetx=f"gpt.decoder.layers.*.{fleetx}",
        core=f"decoder.layers.*.{core}",
        core_local=f"decoder.layers.*.{core_local}",
        classic=f"language_model.encoder.layers.*.{classic}",
    )


def _suffixed(module: ForeignNames | None, suffix: str) -> ForeignNames | None:
    if module is None:
        return None
    return ForeignNames(*(module[field.name] + suffix for field in fields(module)))
