"""Workloads, what a price depends on: a network, its layout over ranks, the properties of the
software.

Each of these three is a row of plain numbers. Any field may instead be an array, one entry per
layout; the formulas of memory.py and steptime.py work on both. `columns` turns many rows into one
such row. A `Workload` is the model and batch of one configuration, to be laid out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from fourfold.config import Config
from fourfold.config.engine_section import default_level
from fourfold.config.optimizer_section import default_ns_dtype
from fourfold.cost.flops import flops_per_token, newton_schulz_flops
from fourfold.cost.terms import Numbers
from fourfold.model import ModelShape, count_parameters, table_of
from fourfold.model.kernels import usable
from fourfold.model.loss import default_chunk_tokens
from fourfold.model.params import Param

RECOMPUTE_MODES = ("none", "core_attn", "full_attn", "ops", "full")


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
    head_size: Numbers = 0  # 0: hidden / heads
    gated: Numbers = False  # three feed-forward matrices instead of two
    squared_relu: Numbers = False  # of two, which keeps its own result
    rms: Numbers = False  # norms are RMSNorm
    post_norm: Numbers = False  # norms come after attention and the feed-forward block
    parallel_residual: Numbers = False  # both read the layer's input
    qk_norm: Numbers = "none"
    rotary_size: Numbers = 0  # numbers of each head that are rotated
    windows: Numbers = 0  # kinds of sliding windows shorter than a sequence
    tied: Numbers = True  # the head is the embedding
    hidden_dropout: Numbers = True
    attention_dropout: Numbers = True
    divided_parameters: Numbers = 0  # of one layer: what tensor parallelism divides
    # Of these, what it cuts into no more pieces than there are key-value heads.
    shared_parameters: Numbers = 0
    whole_parameters: Numbers = 0  # of one layer: norms, biases added after a sum over ranks
    head_parameters: Numbers = 0  # of these, what is applied to each rank's own heads
    layer_norms: Numbers = 0  # of one layer, whole
    divided_norms: Numbers = 0  # of queries, over all heads
    shared_norms: Numbers = 0  # of keys, over all heads
    matrices: Numbers = 0  # of one layer: those that Muon may update
    shared_matrices: Numbers = 0  # of these, keys' and values'
    newton_schulz: Numbers = 0  # FLOPs of one iteration for the matrices of one layer
    last_norm: Numbers = 0
    joint_products: Numbers = True  # one of q, k and v where heads share these, one of gate and up

    @classmethod
    def of(cls, shape: ModelShape, seq: int) -> Network:
        """A network of ours, in sequences of `seq` tokens; its table says what it has."""
        table = table_of(shape)
        layer = table.layer()
        uncut = [row for row in layer if row.split_dim is None]
        cut = [row for row in layer if row.split_dim is not None]
        shared = [row for row in cut if row.most_pieces is not None]
        windows = {shape.window_of(number) for number in range(shape.num_layers)}
        return cls(
            layers=shape.num_layers,
            hidden=shape.hidden_size,
            heads=shape.num_attention_heads,
            ffn=shape.ffn_hidden_size,
            vocab=shape.vocab_size,
            seq=seq,
            positions=sum(row.shape[0] for row in table.at("first") if row.split_dim is None),
            kv_heads=shape.key_value_heads,
            head_size=shape.head_size,
            gated=shape.is_gated,
            squared_relu=shape.activation == "relu_squared",
            rms=shape.normalization == "RMSNorm",
            post_norm=shape.norm_placement == "post",
            parallel_residual=shape.parallel_residual,
            qk_norm=shape.qk_norm,
            rotary_size=shape.rotary_size,
            windows=sum(window is not None and window < seq for window in windows),
            tied=table.tied is not None,
            hidden_dropout=shape.hidden_dropout_prob > 0,
            attention_dropout=shape.attention_probs_dropout_prob > 0,
            divided_parameters=_numel(cut),
            shared_parameters=_numel(shared),
            whole_parameters=_numel(uncut),
            head_parameters=_numel(row for row in uncut if row.partial_gradient == "heads"),
            layer_norms=_numel(row for row in uncut if row.kind == "norm"),
            divided_norms=_numel(row for row in cut if row.kind == "norm" and row not in shared),
            shared_norms=_numel(row for row in shared if row.kind == "norm"),
            last_norm=_numel(row for row in table.at("last") if row.kind == "norm"),
            joint_products=False,
            matrices=_numel(row for row in layer if is_muons(row)),
            shared_matrices=_numel(row for row in shared if is_muons(row)),
            newton_schulz=sum(newton_schulz_flops(*row.shape) for row in layer if is_muons(row)),
        )

    @property
    def shared_heads(self) -> Numbers:
        """Heads of keys and values."""
        return np.where(np.asarray(self.kv_heads) > 0, self.kv_heads, self.heads)

    @property
    def query_width(self) -> Numbers:
        """Of all heads of queries."""
        head_size = np.where(
            np.asarray(self.head_size) > 0, self.head_size, self.hidden / self.heads
        )
        return self.heads * head_size

    @property
    def key_width(self) -> Numbers:
        """Of all heads of keys, and of values."""
        return self.query_width * self.kv_share

    def key_pieces(self, mp: Numbers) -> Numbers:
        """Different parts that model parallelism makes of keys and values."""
        return np.minimum(mp, self.shared_heads)

    @property
    def kv_share(self) -> Numbers:
        """Width of keys (or values) over that of queries."""
        return self.shared_heads / self.heads

    @property
    def layer_parameters(self) -> Numbers:
        return self.divided_parameters + self.whole_parameters

    def layer_share(self, mp: Numbers) -> Numbers:
        """Parameters of one layer on one of `mp` ranks."""
        own = self.divided_parameters - self.shared_parameters
        return own / mp + self.shared_parameters / self.key_pieces(mp) + self.whole_parameters

    def norm_share(self, mp: Numbers) -> Numbers:
        """Of these, those of norms."""
        shared = self.shared_norms / self.key_pieces(mp)
        return self.layer_norms + self.divided_norms / mp + shared

    @property
    def parameters(self) -> Numbers:
        tables = np.where(self.tied, 1, 2) * self.vocab + self.positions
        return self.layers * self.layer_parameters + tables * self.hidden + self.last_norm


def options_of(shape: ModelShape) -> str:
    """What makes it another network than GPT-2, in words; empty where nothing does."""
    positions = {
        "learned": "",
        "none": "no positions",
        "rotary": f"rotary positions of theta {shape.rope_theta:g}",
    }[shape.position_embedding]
    if shape.rotary_size and shape.partial_rotary_factor < 1:
        positions += f" on {shape.rotary_size} of {shape.head_size} numbers of a head"
    if shape.rotary_size and shape.rope_scaling.type != "none":
        positions += f", stretched {shape.rope_scaling.factor:g} times ({shape.rope_scaling.type})"
    shared, width = shape.key_value_heads, shape.num_attention_heads * shape.head_size
    chosen = shape.sliding_window_layers
    where = "" if chosen is None else f" in {len(chosen)} layer(s)"
    said = [
        positions,
        shape.normalization if shape.normalization != "LayerNorm" else "",
        "norms after the blocks" if shape.norm_placement == "post" else "",
        "parallel residual" if shape.parallel_residual else "",
        f"normalized queries and keys ({shape.qk_norm})" if shape.qk_norm != "none" else "",
        shape.activation if shape.activation != "gelu_tanh" else "",
        f"{shared} key-value heads" if shared != shape.num_attention_heads else "",
        f"heads of {shape.head_size}" if width != shape.hidden_size else "",
        {"all": "", "none": "no biases", "qkv": "biases of q, k and v alone"}[shape.bias],
        "" if shape.tie_word_embeddings else "own head",
        f"a window of {shape.sliding_window} tokens{where}" if shape.sliding_window else "",
        f"scores times {shape.attention_scale:g}" if shape.attention_scale else "",
        f"embeddings times {shape.embedding_scale:g}" if shape.embedding_scale != 1 else "",
        f"logits times {shape.logit_scale:g}" if shape.logit_scale != 1 else "",
        f"logits within {shape.logit_softcap:g}" if shape.logit_softcap else "",
        f"z-loss {shape.z_loss:g}" if shape.z_loss else "",
    ]
    return ", ".join(one for one in said if one)


def _numel(rows: Iterable[Param]) -> int:
    return sum(row.numel for row in rows)


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
    recompute_method: Numbers = "uniform"
    recompute_layers: Numbers = 1  # run together, or with `block` the first so many of a stage
    keeps_products: Numbers = True  # recomputing operations
    keeps_attention: Numbers = True
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


# What the optimizer keeps of a parameter: AdamW's two moments in fp32, or Muon's momentum.
MOMENT_BYTES, MUON_MOMENT_BYTES = 8, 4


def is_muons(row: Param) -> bool:
    """Whether Muon updates it, where the optimizer is Muon; AdamW updates everything else."""
    return row.is_matrix and row.in_every_layer


@dataclass(frozen=True)
class Software:
    """Properties of a training program that cost or save bytes and seconds."""

    compute_bytes: Numbers = 2  # per activation
    weight_bytes: Numbers = 2  # per parameter, the copy that is multiplied with
    master_bytes: Numbers = 4  # a separate fp32 copy; 0 when the weights themselves are fp32
    moment_bytes: Numbers = MOMENT_BYTES
    matrix_moment_bytes: Numbers = MOMENT_BYTES  # of the matrices of layers
    ema_bytes: Numbers = 0  # of an average of the weights
    ns_steps: Numbers = 0  # Muon's iterations; 0: no Muon
    ns_bytes: Numbers = 4  # per number that Muon's ranks send each other
    gradient_bytes: Numbers = 4  # as kept and added up between micro-batches
    lasting_gradients: Numbers = True  # their memory is there through the whole step
    reduce_bytes: Numbers = 4  # per gradient on the wire
    gather_bytes: Numbers = 2  # per parameter that sharding gathers
    wide_gathers: Numbers = False  # of norms and embeddings, which are gathered in fp32
    cast_bytes: Numbers = 0  # low-precision copies of fp32 weights, alive through a micro-batch
    residual_bytes: Numbers = 2  # per number of the residual stream
    norm_bytes: Numbers = 2  # per number a norm keeps of its input
    offloads: Numbers = False  # what layers keep for their backward pass is in host memory
    stops_early: Numbers = False  # recomputing leaves out a block's last sum, which nobody needs
    remakes_norms: Numbers = False  # their results are made again where a layer keeps the rest
    remakes_activation: Numbers = False  # and so is the one between the MLP's two products
    # Each is one kernel, which keeps what goes into it alone; else also what is between its steps.
    whole_rms: Numbers = True
    whole_gates: Numbers = True
    # Our own kernels for processors: RMSNorm takes and keeps its input in whatever type it has, and
    # attention rotates queries and keys as it reads them.
    own_kernels: Numbers = False
    masks_windows: Numbers = False  # sliding windows are a table of what a token may attend to
    flash: Numbers = True  # attention never holds the table of scores
    attention_rate: Numbers = 1.0  # of fused attention over the first FlashAttention's
    tensor_overlap: Numbers = 0.0  # share of tensor parallelism's messages beside products
    mask_bytes: Numbers = 1  # of dropout, per number it falls on
    logit_bytes: Numbers = 12  # per logit held at once
    logit_tokens: Numbers = np.inf  # of a chunk of logits, one of which is held at a time
    overlap: Numbers = 1.0  # share of gradient communication that may hide behind backward
    data_inside_pipeline: Numbers = False  # rank order: Megatron's; Fourfold puts data outermost
    split_sends: Numbers = False  # pipeline messages cut over the tensor-parallel ranks
    blocking: Numbers = False  # the host waits for each kernel before it issues the next
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


# -- what a configuration asks for ----------------------------------------------------------------

PrecisionName = Literal["float32", "bfloat16", "float16"]
CONTEXT_BYTES, CONTEXT_BYTES_CPU = 2.0e9, 0.33e9
FRAGMENTATION = 0.05


def software_of(config: Config, *, on_cpu: bool) -> Software:
    """The properties of Fourfold itself, as its parallel code has them:

    - O2 keeps weights in the low type and fp32 masters; O1 keeps fp32 weights and, through each
      micro-batch, the low-type copies autocast makes of them, or that sharding gathers;
    - with sharding, master weights and moments are divided; the weights multiplied with are whole
      in stages 1 and 2 and gathered layer by layer in stage 3; gradients are whole in stage 1;
    - the stream between the layers, which norms keep, is in the low type at O2, but norms on a
      processor keep it in fp32, as all do at O1;
    - gradients add up in fp32, logits exist for a chunk of tokens.
    """
    precision, model = config.Engine.mix_precision, config.Model
    low = precision.dtype != "float32"
    kernels = on_cpu and usable(torch.device("cpu"), getattr(torch, precision.dtype))
    compiled = config.Engine.graph_mode == "static"
    remakes = on_cpu and not compiled
    sharding = config.Distributed.sharding
    level = precision.level or default_level(precision.dtype, on_cpu=on_cpu)
    masters = level == "O2"
    optimizer = config.Optimizer
    muon, ns_dtype = optimizer.name == "Muon", optimizer.muon.ns_dtype
    return Software(
        matrix_moment_bytes=MUON_MOMENT_BYTES if muon else MOMENT_BYTES,
        ema_bytes=0 if optimizer.ema_decay is None else 4,
        ns_steps=optimizer.muon.ns_steps if muon else 0,
        ns_bytes=2 if (ns_dtype or default_ns_dtype(on_cpu=on_cpu)) == "bfloat16" else 4,
        compute_bytes=2 if low else 4,
        weight_bytes=2 if masters else 4,
        master_bytes=4 if masters else 0,
        gradient_bytes=4,
        lasting_gradients=config.Fused.tensor_fusion,
        reduce_bytes=4,
        gather_bytes=2 if low else 4,
        wide_gathers=low and not masters,
        cast_bytes=2 if low and not masters else 0,
        residual_bytes=2 if masters else 4,
        # A processor computes norms in fp32.
        norm_bytes=2 if masters and not on_cpu else 4,
        offloads=model.offload_activations and not on_cpu,
        stops_early=True,
        remakes_norms=remakes and (sharding.sharding_degree == 1 or sharding.sharding_stage < 3),
        remakes_activation=remakes,
        whole_rms=compiled or kernels or not on_cpu,
        whole_gates=compiled or kernels,
        own_kernels=kernels,
        masks_windows=not kernels,
        # On a CPU torch has no flash attention with dropout; our own kernel is one.
        flash=kernels or not (on_cpu and model.attention_probs_dropout_prob > 0),
        # A processor's masks are numbers to multiply with.
        mask_bytes=(2 if low else 4) if on_cpu else 1,
        logit_bytes=_logit_bytes(config, low=low, kernels=kernels),
        logit_tokens=model.loss_chunk_tokens or default_chunk_tokens(on_cpu=on_cpu, low=low),
        # A processor that moves messages does not compute meanwhile.
        overlap=0.0 if on_cpu else 1.0,
        fused=compiled,
        reserve_bytes=CONTEXT_BYTES_CPU if on_cpu else CONTEXT_BYTES,
        reserve_share=0.0 if on_cpu else FRAGMENTATION,
    )


def _logit_bytes(config: Config, *, low: bool, kernels: bool) -> int:
    """In place, by our own kernel in low precision too; else there are fp32 probabilities and the
    gradient besides. Capped softly, there are those before and after, their slope and its square.
    """
    model = config.Model
    if model.logit_softcap is not None:
        return 14 if low else 16
    in_place = kernels and config.Distributed.mp_degree == 1 and model.z_loss == 0
    return 4 if not low else 2 if in_place else 8


def spread_of(config: Config) -> Spread:
    """The layout that the file itself configures."""
    layout, sharding = config.Distributed, config.Distributed.sharding
    return Spread(
        mp=layout.mp_degree,
        pp=layout.pp_degree,
        dp=layout.dp_degree,
        sharding=sharding.sharding_degree,
        stage=sharding.sharding_stage,
        micro_batch=config.Data.batch_size.micro_batch_size,
        micro_batches=config.Engine.accumulate_steps,
        recompute=config.Model.recompute_granularity or "none",
        recompute_method=config.Model.recompute_method,
        recompute_layers=config.Model.recompute_num_layers,
        keeps_products="products" in config.Model.recompute_keep,
        keeps_attention="attention" in config.Model.recompute_keep,
        sequence_parallel=config.Model.sequence_parallel and layout.mp_degree > 1,
        schedule=layout.pp_schedule,
        virtual=layout.virtual_pp_degree,
    )


@dataclass(frozen=True)
class Workload:
    """One model and one global batch, to be laid out."""

    config: Config
    network: Network
    software: Software
    precision: PrecisionName
    shape: ModelShape
    global_batch: int
    batches: tuple[int, ...]  # of every size that a growing batch has; the last is the whole

    @property
    def parameters(self) -> int:
        return count_parameters(self.shape)

    @property
    def checkpoint_bytes(self) -> float:
        """The fp32 weights and what the optimizer keeps of them."""
        network, software = self.network, self.software
        matrices = network.layers * network.matrices
        spared = (software.moment_bytes - software.matrix_moment_bytes) * matrices
        return float((4 + software.moment_bytes + software.ema_bytes) * self.parameters - spared)

    @property
    def tokens_per_step(self) -> int:
        return int(self.global_batch * self.network.seq)

    @property
    def model_flops(self) -> float:
        """Model FLOPs of one step, full attention: the numerator of MFU."""
        return flops_per_token(self.shape, int(self.network.seq)) * self.tokens_per_step


def workload_of(config: Config, *, on_cpu: bool = False) -> Workload:
    model = config.Model
    shape = ModelShape.of(model)
    network = Network.of(shape, config.Data.dataset.max_seq_len)
    precision = config.Engine.mix_precision.dtype
    return Workload(
        config=config,
        network=network,
        software=software_of(config, on_cpu=on_cpu),
        precision=precision,
        shape=shape,
        global_batch=config.Data.batch_size.global_batch_size,
        batches=tuple(config.batch_schedule.batches),
    )
