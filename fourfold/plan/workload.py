"""What is planned: a network, its layout over ranks, and the habits of the software that runs it.

Each class is a row of plain numbers. Any field may instead be an array, one entry per layout; the
formulas of memory.py and steptime.py work on both. `columns` turns many rows into one such row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from fourfold.model import ModelShape, table_of
from fourfold.plan.terms import Numbers

RECOMPUTE_MODES = ("none", "core_attn", "full_attn", "full")


@dataclass(frozen=True)
class Network:
    layers: Numbers
    hidden: Numbers
    heads: Numbers
    ffn: Numbers
    vocab: Numbers
    seq: Numbers  # tokens per sample
    positions: Numbers  # rows of the learned position table; 0 for rotary positions
    kv_heads: Numbers = 0  # 0: as many as heads
    gated: Numbers = False  # three feed-forward matrices instead of two
    tied: Numbers = True  # the head is the embedding
    hidden_dropout: Numbers = True
    attention_dropout: Numbers = True
    divided_parameters: Numbers = 0  # of one layer: what tensor parallelism divides
    whole_parameters: Numbers = 0  # of one layer: norms, biases added after a sum over ranks
    layer_norms: Numbers = 0  # of these, the norms
    last_norm: Numbers = 0

    @classmethod
    def of(cls, shape: ModelShape, seq: int) -> Network:
        """A network of ours, in sequences of `seq` tokens; its table says what it has."""
        table = table_of(shape)
        layer = table.layer()
        cut = [row.numel for row in layer if row.split_dim is not None]
        uncut = [row.numel for row in layer if row.split_dim is None]
        tables = {row.name: row.shape[0] for row in table.at("first")}
        return cls(
            layers=shape.num_layers,
            hidden=shape.hidden_size,
            heads=shape.num_attention_heads,
            ffn=shape.ffn_hidden_size,
            vocab=shape.vocab_size,
            seq=seq,
            positions=sum(tables.values()) - shape.vocab_size,
            tied=table.tied is not None,
            hidden_dropout=shape.hidden_dropout_prob > 0,
            attention_dropout=shape.attention_probs_dropout_prob > 0,
            divided_parameters=sum(cut),
            whole_parameters=sum(uncut),
            layer_norms=sum(row.numel for row in layer if row.kind == "norm"),
            last_norm=sum(row.numel for row in table.at("last") if row.kind == "norm"),
        )

    @property
    def kv_share(self) -> Numbers:
        """Width of keys (or values) over that of queries."""
        return np.where(np.asarray(self.kv_heads) > 0, self.kv_heads, self.heads) / self.heads

    @property
    def layer_parameters(self) -> Numbers:
        return self.divided_parameters + self.whole_parameters

    @property
    def parameters(self) -> Numbers:
        tables = np.where(self.tied, 1, 2) * self.vocab + self.positions
        return self.layers * self.layer_parameters + tables * self.hidden + self.last_norm


@dataclass(frozen=True)
class Spread:
    """How one step is divided: the degrees of the axes, the schedule and the micro-batches."""

    mp: Numbers = 1
    pp: Numbers = 1
    dp: Numbers = 1
    sharding: Numbers = 1
    stage: Numbers = 1  # what sharding divides: 1 optimizer, 2 gradients too, 3 weights too
    micro_batch: Numbers = 1
    micro_batches: Numbers = 1
    recompute: Numbers = "none"
    sequence_parallel: Numbers = False
    schedule: Numbers = "1F1B"
    virtual: Numbers = 1
    context: Numbers = 1  # ranks that share a sequence; always 1 in Fourfold

    @property
    def world(self) -> Numbers:
        return self.mp * self.pp * self.dp * self.sharding * self.context

    @property
    def data(self) -> Numbers:
        """Ranks that read different samples."""
        return self.dp * self.sharding


@dataclass(frozen=True)
class Software:
    """Habits of a training program that cost or save bytes and seconds."""

    compute_bytes: Numbers = 2  # per activation
    weight_bytes: Numbers = 2  # per parameter, the copy that is multiplied with
    master_bytes: Numbers = 4  # a separate fp32 copy; 0 when the weights themselves are fp32
    moment_bytes: Numbers = 8
    gradient_bytes: Numbers = 4  # as kept and added up between micro-batches
    lasting_gradients: Numbers = True  # their memory is there through the whole step
    reduce_bytes: Numbers = 4  # per gradient on the wire
    gather_bytes: Numbers = 2  # per parameter that sharding gathers
    cast_bytes: Numbers = 0  # low-precision copies of fp32 weights, alive through a micro-batch
    residual_bytes: Numbers = 2  # per number of the residual stream
    norm_bytes: Numbers = 2  # per number a norm keeps of its input
    wide_norms: Numbers = False  # norms have fp32 weights, which are their own masters
    regathers: Numbers = True  # sequence parallel: inputs are gathered twice, not kept whole
    stops_early: Numbers = False  # recomputing leaves out a block's last sum, which nobody needs
    attention_copies: Numbers = 0  # more of what attention gives than its one reader keeps
    flash: Numbers = True  # attention never holds the table of scores
    logit_bytes: Numbers = 12  # per logit held at once
    logit_tokens: Numbers = np.inf  # of a chunk of logits; at most two chunks are held at once
    overlap: Numbers = 1.0  # share of gradient communication that may hide behind backward
    data_inside_pipeline: Numbers = False  # rank order: Megatron's; Fourfold puts data outermost
    split_sends: Numbers = False  # pipeline messages cut over the tensor-parallel ranks
    fused: Numbers = False  # element-wise kernels fused by a compiler or by hand
    reserve_bytes: Numbers = 0.0  # context and communication libraries
    reserve_share: Numbers = 0.0  # fragmentation, as a share of what is allocated
    deterministic: Numbers = False


Row = TypeVar("Row", Network, Spread, Software)


def columns(rows: Sequence[Row]) -> Row:
    """One row whose fields are arrays: entry i is that of `rows[i]`."""
    assert rows
    kind = type(rows[0])
    values: dict[str, Any] = {
        field.name: np.array([getattr(row, field.name) for row in rows]) for field in fields(kind)
    }
    return kind(**values)


def take(row: Row, index: Any) -> Row:
    """The entries at `index` (a number, a mask or a list) of a row of arrays."""
    values = {}
    for field in fields(row):
        value = np.asarray(getattr(row, field.name))
        values[field.name] = value[index] if value.ndim else value
    return type(row)(**values)
