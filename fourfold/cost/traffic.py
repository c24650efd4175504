"""Bytes that one rank of one pipeline stage sends in a step, by axis.

An all-reduce counts twice its tensor, as a ring moves it; a gather or a scatter its whole tensor
once; a message between stages once, where it is sent.
"""

from __future__ import annotations

import numpy as np

from fourfold.config.rules import V_SCHEDULES
from fourfold.cost.memory import (
    end_parameters,
    gathered_bytes,
    layers_of_stage,
    own_words,
    recomputed_layers,
    stage_ends,
    stage_parameters,
)
from fourfold.cost.terms import Numbers
from fourfold.cost.workload import Network, Software, Spread


def traffic_of(
    network: Network, spread: Spread, software: Software, stage: Numbers = 0
) -> dict[str, Numbers]:
    """What a rank of pipeline rank `stage` sends in a step, by axis: what `--dry-run` counts."""
    return {
        "mp": _model_parallel(network, spread, software, stage),
        "sharding": _sharding(network, spread, software, stage),
        "dp": _replicas(network, spread, software, stage),
        "pp": _messages(network, spread, software, stage),
        "pp ends": _tied(network, spread, software, stage),
        "muon": muon_bytes(network, spread, software, stage),
    }


def muon_bytes(network: Network, spread: Spread, software: Software, stage: Numbers) -> Numbers:
    """What Muon's ranks send others in a step, on average: each matrix of a stage is gathered on
    one of its ranks, and goes back in rectangles to all of them."""
    layers = layers_of_stage(network, spread, stage)
    ranks = np.asarray(spread.dp) * spread.sharding * spread.mp
    pieces = np.asarray(spread.sharding) * spread.mp
    each = (1 - 1 / pieces) + (ranks - 1) / pieces
    sent = software.ns_bytes * layers * network.matrices / ranks * each
    return np.where(software.ns_steps, sent, 0)


def _model_parallel(
    network: Network, spread: Spread, software: Software, stage: Numbers
) -> Numbers:
    """Two blocks a layer; each all-reduces its output and, backward, the gradient of its input. In
    pieces of the sequence the sums are gathers and scatters, which move half as much each."""
    first, last = stage_ends(spread, stage)
    unit = spread.micro_batch * network.seq * network.hidden
    given, stream = software.compute_bytes * unit, software.residual_bytes * unit
    # Backward, what norms gave; where they come after the blocks, the stream itself.
    taken = np.where(network.post_norm, stream, given)
    by_sequence = np.asarray(spread.sequence_parallel)
    mode, early = np.asarray(spread.recompute), np.asarray(software.stops_early)
    # Forward again: of each block the gather, and its sum unless nothing asks for it.
    enters = np.where(by_sequence, given, 0)
    leaves = np.where(by_sequence, given, 2 * given)
    # A norm after the last block asks for its sum.
    full = 2 * enters + np.where(early & ~np.asarray(network.post_norm), 1, 2) * leaves
    attention = enters + np.where(early, 0, 1) * leaves
    whole = np.isin(mode, ("full", "ops"))
    repeated = np.where(whole, full, np.where(mode == "full_attn", attention, 0))
    # A block that takes pieces gathers them twice, to multiply and for its weights' gradient.
    block = np.where(by_sequence, 4 * given + taken, 2 * given + 2 * taken)
    word = np.where(first, 2 * stream, 0)
    losses = 2 * 12 * spread.micro_batch * network.seq  # the largest logit and two sums, in fp32
    head = np.where(last, 2 * given + losses, 0)
    layers = layers_of_stage(network, spread, stage)
    # Each rank's gradient of what is applied between blocks is only of its own positions, that of
    # what is applied to heads, and of keys and values that ranks share, only of its own heads.
    ends = np.where(last, network.last_norm, 0)
    ends = ends + np.where(first, network.positions * network.hidden, 0)
    between = layers * np.where(by_sequence, network.whole_parameters, network.head_parameters)
    between = between + np.where(by_sequence, ends, 0)
    is_shared = np.asarray(spread.mp) > network.shared_heads
    between = between + layers * np.where(is_shared, network.shared_parameters, 0)
    once = 2 * 4 * between / spread.sharding
    again, pieces = recomputed_layers(network, spread, stage)
    # Of layers recomputed together only the last can stop early.
    stopped = (mode == "full") & early & ~np.asarray(network.post_norm)
    unstopped = np.where(stopped, (again - pieces) * leaves, 0)
    # Norms over all heads of queries and of keys: a sum each way.
    of_all = np.asarray(network.qk_norm) == "all_heads"
    passes = 2 * layers + again * np.where(np.isin(mode, ("full", "ops", "full_attn")), 1, 0)
    sums = np.where(of_all, 2 * 2 * 4 * spread.micro_batch * network.seq * passes, 0)
    each = layers * 2 * block + again * repeated + unstopped + sums + word + head
    return np.where(np.asarray(spread.mp) > 1, spread.micro_batches * each + once, 0)


def _sharding(network: Network, spread: Spread, software: Software, stage: Numbers) -> Numbers:
    gather = gathered_bytes(network, spread, software, stage)
    scatter = software.reduce_bytes * stage_parameters(network, spread, stage)
    # What the ends of the network have stays gathered in between.
    kept = end_parameters(network, spread, stage)
    m, level = spread.micro_batches, np.asarray(spread.stage)
    twice = 2 * gather - np.where(software.wide_gathers, 4, software.gather_bytes) * kept
    moved = np.where(
        level == 3, m * (twice + scatter), gather + np.where(level == 2, m, 1) * scatter
    )
    return np.where(np.asarray(spread.sharding) > 1, moved, 0)


def _replicas(network: Network, spread: Spread, software: Software, stage: Numbers) -> Numbers:
    held = stage_parameters(network, spread, stage) / spread.sharding
    return np.where(np.asarray(spread.dp) > 1, 2 * software.reduce_bytes * held, 0)


def _messages(network: Network, spread: Spread, software: Software, stage: Numbers) -> Numbers:
    """An output to the next stage and a gradient to the one before, where another rank has it."""
    schedule, v = np.asarray(spread.schedule), spread.virtual
    in_v = np.isin(schedule, V_SCHEDULES)
    first = np.asarray(stage) == 0
    final = np.asarray(stage) == spread.pp - 1
    round_trip = 2 * v - np.where(first, 1, 0) - np.where(final, 1, 0)
    # There and back: the turning point is on one rank, and so are both ends.
    sends = np.where(in_v, 4 - np.where(first, 2, 0) - np.where(final, 2, 0), round_trip)
    cut = np.where(spread.sequence_parallel, spread.mp, 1)
    message = software.residual_bytes * spread.micro_batch * network.seq * network.hidden / cut
    return np.where(np.asarray(spread.pp) > 1, spread.micro_batches * sends * message, 0)


def _tied(network: Network, spread: Spread, software: Software, stage: Numbers) -> Numbers:
    """The gradient of the embedding, which the first and the last stage both hold."""
    first, last = stage_ends(spread, stage)
    one_end = (first ^ last) & (np.asarray(spread.pp) > 1) & np.asarray(network.tied)
    words = np.ceil(own_words(network, spread) / spread.sharding) * network.hidden
    return np.where(one_end, 2 * 4 * words, 0)
