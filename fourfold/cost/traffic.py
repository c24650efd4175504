"""Bytes one rank sends in a step, by axis, from formulas: what `--dry-run` counts.

An all-reduce counts twice its tensor, as a ring moves it; a gather or a scatter its whole tensor
once; a message between stages once, where it is sent.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.memory import layers_of_stage, own_words, stage_ends, stage_parameters
from fourfold.cost.terms import Numbers
from fourfold.cost.workload import Network, Software, Spread
from fourfold.parallel.stages import V_SCHEDULES


def traffic_of(
    network: Network, spread: Spread, software: Software, stage: Numbers = 0
) -> dict[str, Numbers]:
    """Of a rank of pipeline rank `stage`."""
    return {
        "mp": _model_parallel(network, spread, software, stage),
        "sharding": _sharding(network, spread, software, stage),
        "dp": _replicas(network, spread, software, stage),
        "pp": _messages(network, spread, software, stage),
        "pp ends": _tied(network, spread, software, stage),
    }


def _model_parallel(
    network: Network, spread: Spread, software: Software, stage: Numbers
) -> Numbers:
    """Two blocks a layer; each sums what it gives and, backward, what it was given. In pieces of
    the sequence the sums are gathers and scatters, which move as much."""
    first, last = stage_ends(spread, stage)
    unit = spread.micro_batch * network.seq * network.hidden
    given, taken = software.compute_bytes * unit, software.residual_bytes * unit
    by_sequence = np.asarray(spread.sequence_parallel)
    gathers_again = np.where(by_sequence & np.asarray(software.regathers), taken, 0)
    mode, early = np.asarray(spread.recompute), np.asarray(software.stops_early)
    # Forward again: of each block the gather, and its sum unless nothing asks for it.
    enters = np.where(by_sequence, taken, 0)
    leaves = np.where(by_sequence, given, 2 * given)
    full = 2 * enters + np.where(early, 1, 2) * leaves
    attention = enters + np.where(early, 0, 1) * leaves
    repeated = np.where(mode == "full", full, np.where(mode == "full_attn", attention, 0))
    layer = 4 * (given + taken) + 2 * gathers_again + repeated
    word = np.where(first, 2 * taken, 0)
    losses = 2 * 12 * spread.micro_batch * network.seq  # the largest logit and two sums, in fp32
    head = np.where(last, 2 * taken + losses, 0)
    layers = layers_of_stage(network, spread, stage)
    # Each rank's gradient of what is applied between blocks is only of its own positions.
    between = layers * network.whole_parameters + np.where(last, network.last_norm, 0)
    between = between + np.where(first, network.positions * network.hidden, 0)
    once = np.where(by_sequence, 2 * 4 * between, 0)
    each = layers * layer + word + head
    return np.where(np.asarray(spread.mp) > 1, spread.micro_batches * each + once, 0)


def _sharding(network: Network, spread: Spread, software: Software, stage: Numbers) -> Numbers:
    parameters = stage_parameters(network, spread, stage)
    gather, scatter = software.gather_bytes * parameters, software.reduce_bytes * parameters
    first, last = stage_ends(spread, stage)
    word = own_words(network, spread) * network.hidden
    # The tables are wanted at both ends of the network and stay gathered in between.
    kept = np.where(first, word + network.positions * network.hidden, np.where(last, word, 0))
    m, level = spread.micro_batches, np.asarray(spread.stage)
    twice = 2 * gather - software.gather_bytes * kept
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
