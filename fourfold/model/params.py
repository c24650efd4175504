"""The parameter table of a network, read by everything that has to know its parameters.

A row describes one parameter, or the same parameter of every layer. Initial weights, model (tensor)
parallelism, sharding, weight decay, mixed precision, the gradient norm, counts, costs, checkpoints
and the converters to and from other programs all look here, and never rely on the spelling of a
name:

    table = table_of(shape)
    table["layers.7.attn.qkv.weight"].split_dim      0: its rows are cut
    table.shapes["layers.7.attn.qkv.weight"]         (3 * hidden, hidden)

A second network is a second table and a second block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from fourfold.config.model_section import GATED

_LAYER_NUMBER = re.compile(r"^layers\.\d+\.")
EVERY_LAYER = "layers.*."


@dataclass(frozen=True)
class RopeScaling:
    """`Model.rope_scaling`; what the values mean is in fourfold/config/model_section.py."""

    type: str = "none"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


_NOT_THE_NETWORK = {
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "depth_scaled_init",
    "fused_linear",
    "loss_chunk_tokens",
    "z_loss",
    "network",
}


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
    num_key_value_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # hidden_size / heads
    activation: str = "gelu_tanh"
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    norm_placement: str = "pre"
    parallel_residual: bool = False
    qk_norm: str = "none"
    bias: str = "all"
    tie_word_embeddings: bool = True
    position_embedding: str = "learned"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeScaling = RopeScaling()
    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] | None = None  # all of them
    attention_scale: float | None = None  # 1 / sqrt(head_size)
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    z_loss: float = 0.0
    mup_base_width: int | None = None
    network: str = "GPT"

    @classmethod
    def of(cls, section: object) -> ModelShape:
        """The shape a resolved `Model` section describes."""
        names = [field.name for field in fields(cls) if field.name != "network"]
        given = {name: getattr(section, name) for name in names}
        scaling = given["rope_scaling"]
        values = {field.name: getattr(scaling, field.name) for field in fields(RopeScaling)}
        given["rope_scaling"] = RopeScaling(**values)
        if given["sliding_window_layers"] is not None:
            given["sliding_window_layers"] = tuple(given["sliding_window_layers"])
        return cls(**given)

    @classmethod
    def network_fields(cls) -> list[Field[Any]]:
        """Of the sizes and options that decide which network this is; the others are of training
        and of how it is computed."""
        return [field for field in fields(cls) if field.name not in _NOT_THE_NETWORK]

    def other_settings(self, network: ModelShape) -> list[str]:
        """The keys of the `Model` section in which `network` is another, with its values."""
        found = []
        for field in self.network_fields():
            own, other = getattr(self, field.name), getattr(network, field.name)
            if isinstance(other, RopeScaling):
                found += [
                    f"{field.name}.{inner.name}={getattr(other, inner.name)}"
                    for inner in fields(other)
                    if getattr(own, inner.name) != getattr(other, inner.name)
                ]
            elif own != other:
                other = list(other) if isinstance(other, tuple) else other
                found.append(f"{field.name}={other}")
        return found

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block has a third matrix."""
        return self.activation in GATED

    @property
    def width_ratio(self) -> float:
        """How many times wider than the network that muP takes its settings from; else 1."""
        return 1.0 if self.mup_base_width is None else self.hidden_size / self.mup_base_width

    @property
    def output_scale(self) -> float:
        """What the logits are multiplied by, with muP's share."""
        return self.logit_scale / self.width_ratio

    @property
    def rotary_size(self) -> int:
        """How many numbers of each head are rotated."""
        is_rotary = self.position_embedding == "rotary"
        return int(self.head_size * self.partial_rotary_factor) if is_rotary else 0

    def window_of(self, layer: int) -> int | None:
        """The tokens that one may attend to in that layer; None: all before it."""
        chosen = self.sliding_window_layers
        return self.sliding_window if chosen is None or layer in chosen else None


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
    # The most pieces it can be cut into; with more ranks several share one, and as each computes
    # with it for heads of its own, their gradients add up. None: as many as there are ranks.
    most_pieces: int | None = None
    weight_decay: bool = True
    lr_scale: float = 1.0  # of the learning rate, under muP
    # Every model-parallel rank has all of it and computes a part of its gradient: that of its own
    # positions, under sequence parallelism, or that of its own heads.
    partial_gradient: Literal["positions", "heads"] | None = None
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

    def pieces(self, mp_degree: int) -> int:
        """How many different parts model parallelism makes of it."""
        if self.split_dim is None:
            return 1
        return mp_degree if self.most_pieces is None else min(mp_degree, self.most_pieces)

    def cut(self, mp_rank: int, mp_degree: int) -> tuple[int, int]:
        """The slice [start, stop) of `split_dim` that a rank holds."""
        assert self.split_dim is not None
        pieces = self.pieces(mp_degree)
        return split_range(self.shape[self.split_dim], mp_rank * pieces // mp_degree, pieces)

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

    def layer_groups(self, most: int) -> dict[str, str]:
        """The group of every parameter, by name: `embeddings`, `layers.3`, `norm`, `head`. Of more
        layers than `most`, as many neighbours share one (`layers.6-11`) as it takes."""
        each = -(-self.num_layers // most)
        found = {}
        for row in self.rows:
            if not row.in_every_layer:
                at_end = "norm" if row.kind == "norm" else "head"
                found[row.name] = "embeddings" if row.end == "first" else at_end
                continue
            for number in range(self.num_layers):
                first = number - number % each
                last = min(first + each, self.num_layers) - 1
                name = f"layers.{first}" if first == last else f"layers.{first}-{last}"
                found[row.of_layer(number)] = name
        return {name: found[name] for name, _ in self}

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


# -- rows of a layer ------------------------------------------------------------------------------


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
            partial_gradient="positions" if split_dim == 1 else None,
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
        partial_gradient="positions",
        end=end,
        foreign=_suffixed(foreign, "weight"),
    )
    if not bias:
        return [weight]
    named = _suffixed(foreign, "bias")
    return [weight, replace(weight, name=f"{name}bias", init="zeros", foreign=named)]


def _suffixed(module: ForeignNames | None, suffix: str) -> ForeignNames | None:
    if module is None:
        return None
    return ForeignNames(*(module[field.name] + suffix for field in fields(module)))
