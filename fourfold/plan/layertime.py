"""Seconds one device spends on one layer, and on the head, for one micro-batch.

A matrix product takes its FLOPs over the sustained rate, times what is lost on a last, partly
filled wave of tiles, times what a short inner dimension loses, but never less than moving its
operands. Element-wise kernels and unfused attention take their bytes over the memory bandwidth.
Host and device run side by side: the slower of the two sets the pace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.flops import forward_flops
from fourfold.cost.terms import Numbers
from fourfold.cost.workload import Network, Software, Spread
from fourfold.plan.machine import Coefficients, Group, Machine, all_reduce_seconds, gather_seconds

TILE = 128 * 256  # results a multiprocessor works on at a time
# Bytes per score of the attention table that is written and read again, in 2-byte numbers:
# product 2, softmax 4, dropout 5, product 2; and their counterparts in the backward pass.
SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 13.0, 19.0
# Numbers moved per token and hidden unit. Whole: two norms (in, out), two additions with dropout
# (two in, one out, a mask). Divided by mp: heads apart and together. The activation: in and out.
MOVED_WHOLE, MOVED_HEADS, MOVED_ACTIVATION = 11.0, 8.0, 2.0
BACKWARD_MOVES = 2.0  # over the forward pass
BACKWARD_KERNELS = 2.0
FUSED_KERNELS = 0.5  # of the kernels are left when a compiler joins the element-wise ones
MATRIX_UNITS = 16.0  # how much faster than the rest of the device they multiply
LOGIT_MOVES = 28.0  # bytes per logit: cast, softmax, loss, gradient, cast back


@dataclass(frozen=True)
class PassTime:
    """Seconds of one layer, one micro-batch, by what they are spent on."""

    products: Numbers
    attention: Numbers
    elementwise: Numbers
    tensor_parallel: Numbers
    host: Numbers  # what the host needs to issue it all, side by side with the rest

    @property
    def device(self) -> Numbers:
        return self.products + self.attention + self.elementwise + self.tensor_parallel

    def plus(self, other: PassTime, share: Numbers = 1.0) -> PassTime:
        return PassTime(
            self.products + share * other.products,
            self.attention + share * other.attention,
            self.elementwise + share * other.elementwise,
            self.tensor_parallel + share * other.tensor_parallel,
            self.host + share * other.host,
        )


@dataclass(frozen=True)
class LayerTime:
    forward: PassTime
    repeated: PassTime  # what recomputation runs a second time
    backward: PassTime

    @property
    def all(self) -> PassTime:
        return self.forward.plus(self.repeated).plus(self.backward)


def product_seconds(
    m: Numbers, n: Numbers, k: Numbers, machine: Machine, c: Coefficients, bytes_each: Numbers
) -> Numbers:
    """(m, k) times (k, n)."""
    waste = 1 + c.wave * machine.units * TILE / (m * n)
    rate = machine.peak * machine.sustained / (waste * (1 + c.inner / k))
    moved = bytes_each * (m * k + k * n + m * n)
    return np.maximum(2.0 * m * n * k / rate, moved / machine.memory_bandwidth)


def layer_time(
    network: Network, spread: Spread, software: Software, machine: Machine, c: Coefficients
) -> LayerTime:
    forward, backward = _passes(network, spread, software, machine, c)
    # Of a layer's forward pass: the core alone, and the attention block with its projections,
    # which are a third of GPT's products (4 of 12 h^2), one of two all-reduces, half the kernels. A
    # third is also about what other programs repeat that choose by operation.
    core = PassTime(0.0, forward.attention, 0.0, 0.0, 0.2 * forward.host)
    parts = forward_flops(
        network.hidden, network.ffn, 0, 0, query_share=network.query_width / network.hidden,
        kv_share=network.kv_share, mlp_matrices=np.where(network.gated, 3, 2),
    )  # fmt: skip
    share = np.where(network.joint_products, 1 / 3, parts.projections / parts.layer)
    block = PassTime(
        forward.products * share,
        forward.attention,
        forward.elementwise / 3,
        np.where(software.stops_early, 0.0, forward.tensor_parallel / 2),
        forward.host / 2,
    )
    # A block's last sum over ranks is not made again where recomputing stops before it.
    stopped = 0.5 * np.where(software.stops_early, forward.tensor_parallel, 0.0)
    whole = replace(forward, tensor_parallel=forward.tensor_parallel - stopped)
    mode = np.asarray(spread.recompute)
    # Norms, GELU and dropout again, the sums, and what is not kept.
    products = np.where(spread.keeps_products, 0.0, forward.products)
    attention = np.where(spread.keeps_attention, 0.0, forward.attention)
    ops = replace(whole, products=products, attention=attention)
    repeated = forward.plus(forward, -1.0)
    by_mode = (("full", whole), ("ops", ops), ("full_attn", block), ("core_attn", core))
    share = _recomputed_share(network, spread)
    for name, part in by_mode:
        repeated = repeated.plus(part, np.where(mode == name, share, 0.0))
    return LayerTime(forward, repeated, backward)


def _recomputed_share(network: Network, spread: Spread) -> Numbers:
    """Of the layers of a stage, those that are recomputed if any are."""
    stages = np.asarray(spread.pp) * np.asarray(spread.virtual)
    first = np.minimum(spread.recompute_layers * stages / network.layers, 1.0)
    return np.where(np.asarray(spread.recompute_method) == "block", first, 1.0)


def _passes(
    network: Network, spread: Spread, software: Software, machine: Machine, c: Coefficients
) -> tuple[PassTime, PassTime]:
    t = spread.mp
    tokens = spread.micro_batch * network.seq / spread.context
    products = _products(network, tokens, t, machine, c, software.compute_bytes)
    attention = _attention(network, spread, software, machine, c)
    unit = software.compute_bytes * tokens * network.hidden
    whole = MOVED_WHOLE / np.where(spread.sequence_parallel, t, 1)
    inner = np.where(network.gated, 3.0, MOVED_ACTIVATION) * network.ffn / network.hidden
    heads = MOVED_HEADS * network.query_width / network.hidden / t
    made, more_kernels = _made_of_heads(network, software, t)
    slack = np.where(software.fused, 1.0, c.traffic)
    moved = unit * (whole + heads + made + inner / t) * slack / machine.layer_bandwidth
    group = Group.of(t, 1, machine)
    reduce = 2 * all_reduce_seconds(unit, group, machine)
    # Sums of the backward pass are of what norms gave, or of the stream where these come after.
    wide = np.where(network.post_norm, software.residual_bytes / software.compute_bytes, 1.0)
    reduce_back = 2 * all_reduce_seconds(unit * wide, group, machine)
    # With sequence parallelism the backward pass gathers the two inputs a second time.
    again = np.where(spread.sequence_parallel, 2 * gather_seconds(unit, group, machine), 0.0)
    shown = 1.0 - np.asarray(software.tensor_overlap)
    # A collective starts when the last of its hosts arrives: the more, the later.
    issued = c.kernels + more_kernels + c.collective_kernels * (t - 1)
    host = machine.launch * np.where(software.fused, FUSED_KERNELS, 1.0) * issued
    return (
        PassTime(products[0], attention[0], moved, shown * reduce, host),
        PassTime(
            products[1],
            attention[1],
            BACKWARD_MOVES * moved,
            shown * (reduce_back + again),
            BACKWARD_KERNELS * host,
        ),
    )


def _made_of_heads(network: Network, software: Software, t: Numbers) -> tuple[Numbers, Numbers]:
    """Numbers moved per token and hidden unit to rotate queries and keys and to normalize them, and
    kernels for it; what other programs do of it is in their own coefficients."""
    wide = 4 / np.asarray(software.compute_bytes)  # numbers in fp32, in which both are computed
    fused = np.asarray(software.fused)
    rotated, normalized = np.asarray(network.rotary_size) > 0, np.asarray(network.qk_norm) != "none"
    # Two products of each half, a sum, the cast back, and the halves joined; else in and out.
    rotary = np.where(rotated, np.where(fused, 2.0, 5.0 + 6.0 * wide), 0.0)
    norms = np.where(normalized, np.where(fused, 2.0, 2.0 + 4.0 * wide), 0.0)
    key = network.key_width / network.key_pieces(t)
    share = (network.query_width / t + key) / network.hidden
    return (rotary + norms) * share, np.where(rotated, 18.0, 0.0) + np.where(normalized, 6.0, 0.0)


def weight_shapes(network: Network, t: Numbers) -> dict[str, tuple[Numbers, Numbers, Numbers]]:
    """(out, in) of the weights of one layer that one rank multiplies with, and how many there are
    of each: keys and values, or a gate, are products of their own or part of another."""
    h, ffn = network.hidden, network.ffn / t
    query, key = network.query_width / t, network.key_width / network.key_pieces(t)
    joint = np.asarray(network.joint_products)
    together = joint | (np.asarray(network.shared_heads) == network.heads)
    wide = ffn * np.where(np.asarray(network.gated) & joint, 2, 1)
    gates = np.where(np.asarray(network.gated) & ~joint, 1, 0)
    return {
        "qkv": (query + np.where(together, 2 * key, 0), h, 1),
        "kv": (key, h, np.where(together, 0, 2)),
        "out": (h, query, 1),
        "gate": (ffn, h, gates),
        "up": (wide, h, 1),
        "down": (h, ffn, 1),
    }


def linear_seconds(
    tokens: Numbers, n: Numbers, k: Numbers, machine: Machine, c: Coefficients, size: Numbers
) -> tuple[Numbers, Numbers]:
    """Forward, and backward: the gradients of the input and of the (n, k) weight."""
    forward = product_seconds(tokens, n, k, machine, c, size)
    inputs = product_seconds(tokens, k, n, machine, c, size)
    return forward, inputs + product_seconds(n, k, tokens, machine, c, size)


def _products(
    network: Network, tokens: Numbers, t: Numbers, machine: Machine, c: Coefficients, size: Numbers
) -> tuple[Numbers, Numbers]:
    machine = replace(machine, peak=machine.peak * machine.linear_gain)
    forward: Numbers = 0.0
    backward: Numbers = 0.0
    for n, k, times in weight_shapes(network, t).values():
        there, back = linear_seconds(tokens, n, k, machine, c, size)
        forward, backward = forward + times * there, backward + times * back
    return forward, backward


def _attention(
    network: Network, spread: Spread, software: Software, machine: Machine, c: Coefficients
) -> tuple[Numbers, Numbers]:
    """Unfused: two batched products over all pairs, and the traffic of the table. Flash: half of
    the pairs, no traffic, a rate of its own; its backward pass makes the scores again."""
    s = network.seq
    sequences = spread.micro_batch / spread.mp / spread.context
    flops = forward_flops(network.query_width, 0, 0, s).core * s * sequences
    rate = machine.peak * machine.sustained
    head_size = network.query_width / network.heads
    table = sequences * network.heads * s * s * c.scores / machine.layer_bandwidth
    # Matrix units take rows of 8 numbers of 2 bytes; other head sizes are multiplied without them.
    spurned = (head_size % 8 > 0) & (machine.units > 1)
    unfused = flops / rate * (1 + c.inner / head_size) * np.where(spurned, MATRIX_UNITS, 1.0)
    flash = 0.5 * flops / (rate * software.attention_rate)
    scale = software.compute_bytes / 2
    forward = np.where(
        software.flash, flash / c.flash_forward, unfused + SCORE_BYTES_FORWARD * scale * table
    )
    backward = np.where(
        software.flash,
        2.5 * flash / c.flash_backward,
        2 * unfused + SCORE_BYTES_BACKWARD * scale * table,
    )
    return forward, backward


def head_seconds(
    network: Network, spread: Spread, software: Software, machine: Machine, c: Coefficients
) -> Numbers:
    """Head and loss, forward and backward, for one micro-batch."""
    tokens = spread.micro_batch * network.seq / spread.context
    rows, size = network.vocab / spread.mp, software.compute_bytes
    forward, backward = linear_seconds(tokens, rows, network.hidden, machine, c, size)
    moving = machine.memory_bandwidth * machine.logit_factor
    return forward + backward + LOGIT_MOVES * tokens * rows / moving
