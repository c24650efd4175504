"""Seconds of one training step, as named terms that add up.

The stage with the most to do sets the pace: its busy time for all micro-batches, plus the bubble
(what one micro-batch takes in all other stages, less with several stages per rank), plus the
communication that does not hide behind compute, plus what happens once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.config.rules import V_SCHEDULES
from fourfold.cost.memory import (
    gathered_bytes,
    layers_of_stage,
    stage_matrices,
    stage_parameters,
)
from fourfold.cost.terms import Breakdown, Numbers, Term
from fourfold.cost.traffic import muon_bytes
from fourfold.cost.workload import MOMENT_BYTES, Network, Software, Spread
from fourfold.plan.layertime import LayerTime, head_seconds, layer_time
from fourfold.plan.machine import (
    Coefficients,
    Group,
    Machine,
    all_reduce_seconds,
    gather_seconds,
    send_seconds,
)

DETERMINISTIC = 1.15  # Megatron's own figure for its deterministic mode
BACKWARD_SHARE = 0.6  # of a micro-batch: gradients of a step can hide behind its last backward pass
# Read weight, gradient and moments in fp32; write weight, moments and a 2-byte copy.
OPTIMIZER_BYTES = (8 + MOMENT_BYTES) + (4 + MOMENT_BYTES + 2)


@dataclass(frozen=True)
class Pace:
    """What the stage that sets the pace does for one micro-batch, in seconds."""

    layer: LayerTime
    paced: Numbers  # of one layer: the slower of host and device
    head: Numbers  # head and loss, wherever they run
    held: Numbers  # layers of this stage
    head_share: Numbers  # head and loss, if they are this stage's
    sends: Numbers
    fixed: Numbers
    drag: Numbers  # everything takes this much longer: on many nodes, in a whole network

    @property
    def busy(self) -> Numbers:
        return self.held * self.paced + self.head_share + self.sends + self.fixed


def step_time_of(
    network: Network,
    spread: Spread,
    software: Software,
    machine: Machine,
    coefficients: Coefficients,
) -> Breakdown:
    """One step of one layout, or of as many as the fields have entries."""
    c = coefficients
    pace = _pace(network, spread, software, machine, c)
    return Breakdown(
        {
            **_busy_terms(spread, pace),
            "bubble": _bubble(network, spread, pace),
            **_shared_cores(network, spread, machine, pace),
            "data parallel": _data_parallel(network, spread, software, machine, c, pace.busy),
            "optimizer": _optimizer(network, spread, software, machine, c),
            **_muon(network, spread, software, machine),
            "fixed": Term(
                c.step_seconds + 0.0 * pace.busy,
                "{each:.4g} s once per step: clipping, logging, launches",
                {"each": c.step_seconds},
            ),
        }
    )


def _pace(
    network: Network, spread: Spread, software: Software, machine: Machine, c: Coefficients
) -> Pace:
    layer = layer_time(network, spread, software, machine, c)
    head = head_seconds(network, spread, software, machine, c)
    paced = _paced(layer.all.device, layer.all.host, software, machine, c)
    most, last = np.ceil(network.layers / spread.pp), np.floor(network.layers / spread.pp)
    head_decides = most * paced <= last * paced + head
    nodes = np.maximum(1.0, spread.world / machine.node)
    slowdown = np.where(software.deterministic, DETERMINISTIC, 1.0)
    return Pace(
        layer=layer,
        paced=paced,
        head=head,
        held=np.where(head_decides, last, most),
        head_share=np.where(head_decides, head, 0.0),
        sends=_sends(network, spread, software, machine) * c.send,
        fixed=c.micro_batch_seconds,
        drag=(1 + c.jitter * np.log2(nodes)) * slowdown * machine.step_factor,
    )


def _busy_terms(spread: Spread, pace: Pace) -> dict[str, Term]:
    """Of all micro-batches together, by what the time is spent on."""
    m, held, drag, whole = spread.micro_batches, pace.held, pace.drag, pace.layer.all

    def of_layers(each: Numbers, what: str) -> Term:
        return Term(
            drag * m * held * each,
            "{m:.0f} micro-batches x {held:.0f} layers x {each:.4g} s" + what,
            {"m": m, "held": held, "each": drag * each, "mp": spread.mp},
        )

    def of_stage(each: Numbers, what: str) -> Term:
        return Term(
            drag * m * each,
            "{m:.0f} micro-batches x {each:.4g} s " + what,
            {"m": m, "each": drag * each, "pp": spread.pp},
        )

    waits = held * (pace.paced - whole.device) + pace.fixed
    return {
        "products": of_layers(whole.products, " of matrix products"),
        "attention": of_layers(whole.attention, ""),
        "element-wise": of_layers(whole.elementwise, " of norms, activations, additions"),
        "head": of_stage(pace.head_share, "of head and loss, if the last stage sets the pace"),
        "tensor parallel": of_layers(whole.tensor_parallel, " of all-reduce over mp{mp:.0f}"),
        "host": of_stage(waits, "in which the device waits for the host"),
        "pipeline sends": of_stage(pace.sends, "to and from the neighbours of pp{pp:.0f}"),
    }


def _paced(
    device: Numbers, host: Numbers, software: Software, machine: Machine, c: Coefficients
) -> Numbers:
    """The slower of the two; near a tie a little more than either. On a processor, or where the
    host waits for each kernel, both."""
    p = c.host_sharpness
    most = np.maximum(device, host)
    slower = most * ((device / most) ** p + (host / most) ** p) ** (1 / p)
    alternate = np.asarray(machine.serial, bool) | np.asarray(software.blocking, bool)
    return np.where(alternate, device + host, slower)


def _sends(network: Network, spread: Spread, software: Software, machine: Machine) -> Numbers:
    """One activation in and one gradient out per micro-batch, for every stage a rank holds."""
    inner = np.where(software.data_inside_pipeline, spread.data, spread.sharding)
    group = Group.of(spread.pp, spread.mp * inner * spread.context, machine)
    tokens = spread.micro_batch * network.seq / spread.context
    cut = np.where(
        np.asarray(software.split_sends) | np.asarray(spread.sequence_parallel), spread.mp, 1
    )
    message = software.residual_bytes * tokens * network.hidden / cut
    return 2 * spread.virtual * send_seconds(message, group, machine)


def _idle(network: Network, spread: Spread, pace: Pace) -> Numbers:
    others = network.layers * pace.paced + pace.head + spread.pp * pace.sends - pace.busy
    idle = np.maximum(others, 0.0) * _idle_share(spread, pace.layer)
    return np.where(np.asarray(spread.pp) > 1, idle, 0.0)


def _bubble(network: Network, spread: Spread, pace: Pace) -> Term:
    """What one micro-batch spends in the other stages, times the share the schedule leaves idle."""
    seconds = pace.drag * _idle(network, spread, pace)
    busy = pace.drag * spread.micro_batches * pace.busy
    return Term(
        seconds,
        "{seconds:.4g} s in which the pace-setting stage waits for the {others:.0f} others "
        "({share:.1%} of its busy time)",
        {"seconds": seconds, "others": spread.pp - 1, "share": seconds / busy},
    )


def _shared_cores(
    network: Network, spread: Spread, machine: Machine, pace: Pace
) -> dict[str, Term]:
    """Where several ranks share a core, one that waits leaves it to the others: a step is then as
    long as all work on all cores, or as its longest path at the speed of a core alone."""
    if not np.any(np.asarray(machine.crowd) > 1):
        return {}
    m, drag, crowd = spread.micro_batches, pace.drag, machine.crowd
    stages = spread.pp * (pace.sends + pace.fixed)
    everyone = (network.layers * pace.paced + pace.head + stages) / spread.pp
    busy = m * pace.busy
    path = (busy + _idle(network, spread, pace)) / crowd
    seconds = drag * (np.maximum(m * everyone, path) - busy - _idle(network, spread, pace))
    return {
        "shared cores": Term(
            np.where(crowd > 1, seconds, 0.0),
            "{crowd:.3g} ranks a core: who waits leaves it to another, so {work:.4g} s of work on "
            "all cores or {path:.4g} s of the longest path, whichever is more",
            {"crowd": crowd, "work": drag * m * everyone, "path": drag * path},
        )
    }


def _idle_share(spread: Spread, layer: LayerTime) -> Numbers:
    forward = layer.forward.device
    inputs = layer.repeated.device + layer.backward.device / 2
    weights = layer.backward.device / 2
    total = forward + inputs + weights
    # Weight gradients fill the gaps, in part or, with two stages in a V, nearly all of them.
    partly = (forward + inputs - weights) / total
    nearly = np.maximum(forward + inputs - 2 * weights, 0.0) / total
    # A rank's second stage starts when the first micro-batch has gone round all ranks: with fewer
    # micro-batches than ranks it waits for that, whatever the number of stages.
    m, p = spread.micro_batches, spread.pp
    waits = np.maximum(p - m, 0) + (np.minimum(m, p) - 1) / spread.virtual
    schedule = np.asarray(spread.schedule)
    in_v = np.isin(schedule, V_SCHEDULES)
    usual = (
        waits / np.maximum(p - 1, 1) * np.where(schedule == "InterleavedZeroBubble", partly, 1.0)
    )
    return np.where(in_v, nearly, usual)


@dataclass(frozen=True)
class DataTraffic:
    """Seconds of one step's gradient and weight traffic between data ranks."""

    per_micro_batch: Numbers
    per_step: Numbers


def _data_traffic(
    network: Network, spread: Spread, software: Software, machine: Machine
) -> DataTraffic:
    parameters = stage_parameters(network, spread, 0)
    inside = np.asarray(software.data_inside_pipeline)
    outer_stride = spread.mp * spread.sharding * np.where(inside, 1, spread.pp) * spread.context
    shards = Group.of(spread.sharding, spread.mp * spread.context, machine)
    copies = Group.of(spread.dp, outer_stride, machine)
    gradients = software.reduce_bytes * parameters
    weights = gathered_bytes(network, spread, software)
    units = np.ceil(network.layers / spread.pp) + 1  # each layer is a message of its own
    # Between devices such messages run into each other; on a processor each has to be waited for.
    waits = np.where(machine.serial, units, 1)
    replicas = all_reduce_seconds(gradients / spread.sharding, copies, machine, waits)
    # What is gathered or scattered is copied out of or into its message. A device does so beside
    # its computing; a processor has nothing beside it.
    copied = np.where(
        np.asarray(machine.serial, bool) & (np.asarray(spread.sharding) > 1),
        2 / machine.memory_bandwidth,
        0.0,
    )
    # And gloo scatters a sum by making it whole on every rank, in a copy of the message.
    whole = np.where(machine.serial, 2, 1)
    scatter = whole * (gather_seconds(gradients, shards, machine, units) + copied * gradients)
    gather = gather_seconds(weights, shards, machine, units) + copied * weights
    stage = np.asarray(spread.stage)
    each = np.where(stage == 3, 2 * gather + scatter, np.where(stage == 2, scatter, 0.0))
    once = replicas + np.where(stage == 3, 0.0, gather) + np.where(stage == 1, scatter, 0.0)
    return DataTraffic(each, once)


def _data_parallel(
    network: Network,
    spread: Spread,
    software: Software,
    machine: Machine,
    c: Coefficients,
    busy: Numbers,
) -> Term:
    """What shows of it: all that cannot hide, and a share of what hides."""
    traffic = _data_traffic(network, spread, software, machine)
    m = spread.micro_batches
    window = np.asarray(software.overlap) * busy
    hidden_each = np.minimum(traffic.per_micro_batch, window)
    left = np.maximum(window - hidden_each, 0.0)
    hidden = m * hidden_each + np.minimum(traffic.per_step, BACKWARD_SHARE * left)
    total = m * traffic.per_micro_batch + traffic.per_step
    return Term(
        total - hidden + hidden * c.exposed,
        "{total:.4g} s on the wire ({each:.4g} s x {m:.0f} micro-batches + {once:.4g} s per step), "
        "of which {hidden:.4g} s hide behind compute and cost {exposed:.0%} of that",
        {
            "total": total,
            "each": traffic.per_micro_batch,
            "m": m,
            "once": traffic.per_step,
            "hidden": hidden,
            "exposed": c.exposed,
        },
    )


def _optimizer(
    network: Network, spread: Spread, software: Software, machine: Machine, c: Coefficients
) -> Term:
    mine = stage_parameters(network, spread, 0) / spread.sharding
    bandwidth = machine.memory_bandwidth * machine.update_factor
    less = 2 * (np.asarray(software.moment_bytes) - software.matrix_moment_bytes)
    spared = less * stage_matrices(network, spread, 0) / spread.sharding
    averaged = 3 * np.asarray(software.ema_bytes) * mine
    seconds = c.optimizer * (OPTIMIZER_BYTES * mine - spared + averaged) / bandwidth
    return Term(
        seconds,
        "{factor:.2f} x {bytes:.0f} bytes x {mine:.4g} parameters / {bandwidth:.4g} B/s",
        {
            "factor": c.optimizer,
            "bytes": OPTIMIZER_BYTES,
            "mine": mine,
            "bandwidth": bandwidth,
        },
    )


def _muon(
    network: Network, spread: Spread, software: Software, machine: Machine
) -> dict[str, Term]:
    """The iterations, divided over the ranks of a stage, and the messages around them."""
    if not np.any(np.asarray(software.ns_steps)):
        return {}
    ranks = spread.dp * spread.sharding * spread.mp
    layers = layers_of_stage(network, spread, 0)
    flops = software.ns_steps * layers * network.newton_schulz / ranks
    sent = muon_bytes(network, spread, software, 0)
    group = Group.of(ranks, 1, machine)
    return {
        "muon": Term(
            flops / (machine.peak * machine.sustained) + send_seconds(sent, group, machine),
            "{steps:.0f} iterations of Newton-Schulz on 1/{ranks:.0f} of the stage's matrices, "
            "{flops:.4g} TFLOP, and {sent:.4g} MB sent to gather and return them",
            {"steps": software.ns_steps, "ranks": ranks, "flops": flops / 1e12, "sent": sent / 1e6},
        )
    }
