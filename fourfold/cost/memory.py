"""Bytes that one rank of one pipeline stage holds, as named terms that add up.

Activations follow Korthikanti et al. (2022), byte by byte: what each operation of a layer keeps
for its backward pass, what tensor and sequence parallelism divide, how many micro-batches are in
flight in each stage. `allocated` terms are what an allocator reports; the reserve on top is what
the device shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fourfold.config.rules import V_SCHEDULES
from fourfold.cost.terms import Breakdown, Numbers, Term
from fourfold.cost.workload import RECOMPUTE_MODES, Network, Software, Spread


def layers_of_stage(network: Network, spread: Spread, rank: Numbers) -> Numbers:
    """Layers of pipeline rank `rank`, in all of its stages; parallel/stages.py has the rule."""
    return sum(_layers_by_turn(network, spread, rank))


def _layers_by_turn(network: Network, spread: Spread, rank: Numbers) -> Iterator[Numbers]:
    """Of each of the rank's stages; 0 where it has fewer."""
    schedule = np.asarray(spread.schedule)
    in_v = np.isin(schedule, V_SCHEDULES)
    for turn in range(int(np.max(spread.virtual))):
        onward = np.asarray(rank) + turn * np.asarray(spread.pp)
        back = 2 * np.asarray(spread.pp) - 1 - np.asarray(rank)
        stage = np.where(in_v & (turn == 1), back, onward)
        yield np.where(turn < np.asarray(spread.virtual), _layers(network, spread, stage), 0)


def recomputed_layers(network: Network, spread: Spread, rank: Numbers) -> tuple[Numbers, Numbers]:
    """Of a pipeline rank's layers, those that are recomputed, and in how many pieces."""
    block = np.asarray(spread.recompute_method) == "block"
    size = np.asarray(spread.recompute_layers)
    layers: Numbers = 0
    pieces: Numbers = 0
    for held in _layers_by_turn(network, spread, rank):
        some = np.where(block, np.minimum(size, held), held)
        layers, pieces = layers + some, pieces + np.where(block, some, -(-held // size))
    nothing = np.asarray(spread.recompute) == "none"
    return np.where(nothing, 0, layers), np.where(nothing, 0, pieces)


def _layers(network: Network, spread: Spread, stage: Numbers) -> Numbers:
    """Of one stage. Where they do not divide evenly those in the middle hold one more, the very
    middle first and of two as near to it the earlier one."""
    stages = np.asarray(spread.pp) * np.asarray(spread.virtual)
    even, over = network.layers // stages, network.layers % stages
    distance = np.abs(2 * stage - stages + 1)
    turn = np.where(distance == 0, 0, distance - 1 + (2 * stage > stages - 1))
    return even + np.where(turn < over, 1, 0)


def stage_parameters(
    network: Network, spread: Spread, stage: Numbers, mp_rank: Numbers = 0
) -> Numbers:
    """Parameters on one rank of pipeline rank `stage` before sharding divides them: exact."""
    layers = layers_of_stage(network, spread, stage)
    ends = end_parameters(network, spread, stage, mp_rank)
    return layers * network.layer_share(spread.mp) + ends


def end_parameters(
    network: Network, spread: Spread, stage: Numbers, mp_rank: Numbers = 0
) -> Numbers:
    """Of these, embeddings, last norm and head."""
    first, last = stage_ends(spread, stage)
    word = own_words(network, spread, mp_rank) * network.hidden
    # On one rank both ends share the embedding only if they are one stage.
    alone = np.asarray(spread.pp) * np.asarray(spread.virtual) == 1
    separate = last & ~(alone & np.asarray(network.tied))
    tables = np.where(first, word + network.positions * network.hidden, 0) + np.where(
        separate, word, 0
    )
    return tables + np.where(last, network.last_norm, 0)


def stage_matrices(network: Network, spread: Spread, stage: Numbers) -> Numbers:
    """Of these, numbers in the matrices that Muon may update."""
    own = network.matrices - network.shared_matrices
    each = own / spread.mp + network.shared_matrices / network.key_pieces(spread.mp)
    return layers_of_stage(network, spread, stage) * each


def stage_ends(spread: Spread, stage: Numbers) -> tuple[Numbers, Numbers]:
    """Whether pipeline rank `stage` has the network's first stage, and whether its last."""
    schedule = np.asarray(spread.schedule)
    in_v = np.isin(schedule, V_SCHEDULES)
    first = np.asarray(stage) == 0
    return first, np.where(in_v, first, np.asarray(stage) == spread.pp - 1)


def own_words(network: Network, spread: Spread, mp_rank: Numbers = 0) -> Numbers:
    """Rows of the vocabulary on one model-parallel rank: the first ones hold one more."""
    return network.vocab // spread.mp + np.where(
        np.asarray(mp_rank) < network.vocab % spread.mp, 1, 0
    )


def _wide_parameters(
    network: Network, spread: Spread, software: Software, stage: Numbers
) -> Numbers:
    """Of these, what sharding gathers in fp32 where it gathers the rest in low precision."""
    layers = layers_of_stage(network, spread, stage)
    wide = layers * network.norm_share(spread.mp) + end_parameters(network, spread, stage)
    return np.where(software.wide_gathers, wide, 0)


def gathered_bytes(
    network: Network, spread: Spread, software: Software, stage: Numbers = 0
) -> Numbers:
    """Of all weights of a rank of this pipeline rank, once gathered."""
    wide = _wide_parameters(network, spread, software, stage)
    low = stage_parameters(network, spread, stage) - wide
    return software.gather_bytes * low + 4 * wide


def micro_batches_in_flight(spread: Spread, stage: Numbers) -> Numbers:
    """Micro-batches whose activations pipeline rank `stage` holds at its peak, each counted for all
    of the rank's layers: of its `v` stages, one micro-batch in one of them is a `v`-th.

    This is what torch's schedules hold. Where a schedule splits the backward pass, activations stay
    until the weight gradients are computed.
    """
    p, v, m = (np.asarray(number) for number in (spread.pp, spread.virtual, spread.micro_batches))
    schedule = np.asarray(spread.schedule)
    rounds = np.maximum(1, m // p)
    ahead = (v - 1) * (m // rounds)  # forward passes of earlier stages before the last one's first
    in_v = np.minimum(2 * p, m + 1 + stage)
    held = np.select(
        [
            (schedule == "GPipe") | (schedule == "LoopedBFS"),
            schedule == "Interleaved1F1B",
            schedule == "InterleavedZeroBubble",
            schedule == "ZBVZeroBubble",
            schedule == "DualPipeV",
        ],
        [v * m, ahead + 2 * (p - 1 - stage) + 1, ahead + p, in_v, 2 * p + 1],
        default=p - stage,  # 1F1B
    )
    return np.minimum(held, v * m) / v


def activation_bytes(network: Network, spread: Spread, software: Software) -> dict[str, Numbers]:
    """Bytes one layer keeps of one micro-batch, by recompute mode; "none" keeps all."""
    t, tokens = spread.mp, spread.micro_batch * network.seq / spread.context
    c, post = software.compute_bytes, np.asarray(network.post_norm)
    split = np.where(spread.sequence_parallel, t, 1)
    mask = np.where(network.hidden_dropout, software.mask_bytes, 0)
    # With sequence parallelism a block keeps its own positions and gathers again.
    inputs = 2 * (c + mask) / split * network.hidden
    norms = _norm_bytes(network, software) / split * network.hidden
    # Recomputed, a block keeps the stream it is given, which a product would have cast.
    whole_input = np.where(post, software.residual_bytes - c, 0) / split * network.hidden
    inner = _inner_bytes(network, software) * network.ffn / t
    remade = np.where(np.asarray(software.remakes_norms) & ~post, 2 * c, 0) / split * network.hidden
    # Its own result is what squared ReLU keeps, and made again it needs what went in.
    remakes_inner = np.asarray(software.remakes_activation) & ~np.asarray(network.squared_relu)
    remade = remade + np.where(remakes_inner, c, 0) * network.ffn / t
    query, key = network.query_width / t, network.key_width / network.key_pieces(t)
    heads, heads_alone = _heads_bytes(network, software, query, key)
    table = np.where(network.attention_dropout, 2 * c + software.mask_bytes, c)
    own_heads = network.heads / t
    scores = own_heads * tokens * np.where(software.flash, 4, table * network.seq)
    rest = tokens * (norms + inputs + inner)
    entered = tokens * network.hidden * software.residual_bytes / split
    # Of qkv, up and, where it is no partial sum, out; of attention without the table of scores.
    up = network.ffn / t * np.where(network.gated, 2, 1)
    out = np.where(np.asarray(t) > 1, 0, network.hidden)
    products = tokens * c * (query + 2 * key + up + out)
    attention = np.where(software.flash, tokens * c * query + scores, 0)
    ops = entered + np.where(spread.keeps_products, products, 0)
    return {
        "none": rest
        + tokens * heads
        + scores
        - np.where(np.asarray(spread.recompute) == "none", tokens * remade, 0.0),
        "core_attn": rest + tokens * heads_alone,
        "full_attn": rest + tokens * whole_input,
        "ops": ops + np.where(spread.keeps_attention, attention, 0),
        "full": entered,
    }


def _norm_bytes(network: Network, software: Software) -> Numbers:
    """Of a layer's two norms, for each number of the stream."""
    rms, post = np.asarray(network.rms), np.asarray(network.post_norm)
    given = np.where(post, software.compute_bytes, software.residual_bytes)
    each = np.where(rms & np.asarray(software.own_kernels), given, software.norm_bytes)
    # Both read the same, which each keeps by itself only where it is cast for it.
    same = np.asarray(network.parallel_residual) & (each == given)
    between = np.where(rms & ~np.asarray(software.whole_rms), 4, 0)
    return np.where(same, 1, 2) * each + 2 * between


def _inner_bytes(network: Network, software: Software) -> Numbers:
    """Of the feed-forward block, for each number of its inner width: before the activation and
    after it; gated, two before it, and in several steps what the one gave alone."""
    gated = np.where(software.whole_gates, 3, 4)
    return software.compute_bytes * np.where(network.gated, gated, 2)


def _heads_bytes(
    network: Network, software: Software, query: Numbers, key: Numbers
) -> tuple[Numbers, Numbers]:
    """For each token, where a rank's queries and keys are so wide: what is kept of these, of values
    and of what the output projection reads; and the same where attention is recomputed."""
    c, own_kernels = np.asarray(software.compute_bytes), np.asarray(software.own_kernels)
    normalized = np.asarray(network.qk_norm) != "none"
    # Attention keeps what it is given: of what is rotated before it, copies.
    rotated = (np.asarray(network.rotary_size) > 0) & ~own_kernels
    # Where each head has keys and values of its own, queries, keys and values are one product, and
    # values keep all of it, whatever has been made of the rest.
    grouped = np.asarray(network.shared_heads) != network.heads
    alone = query + 2 * key + np.where(normalized & ~grouped, query + key, 0)
    made = query + 2 * key + np.where((normalized | rotated) & ~grouped, query + key, 0)
    # A norm of heads keeps what it is given, which is cast to fp32 but for our kernel; one over all
    # heads, or in steps, also what it multiplies by its weight.
    of_all, rms = np.asarray(network.qk_norm) == "all_heads", np.asarray(network.rms)
    takes_any = rms & ~of_all & own_kernels
    uncast = np.where(grouped, c, 0)
    given = np.where(takes_any, uncast, np.where(c < 4, 4, uncast))
    steps = np.where(of_all | (rms & ~np.asarray(software.whole_rms)), 4, 0)
    head_size = network.query_width / network.heads
    sums = np.where(of_all, 0, np.where(rms, 4, 8) / head_size)
    norms = np.where(normalized, given + steps + sums, 0) * (query + key)
    return c * (made + query) + norms, c * (alone + query) + norms


def memory_of(
    network: Network, spread: Spread, software: Software, stage: Numbers = 0
) -> Breakdown:
    """What one rank of pipeline stage `stage` (the first is 0) needs."""
    parameters = stage_parameters(network, spread, stage)
    shards, level = spread.sharding, np.asarray(spread.stage)
    wide = _wide_parameters(network, spread, software, stage)
    states = _states(parameters, wide, shards, level, software)
    states["optimizer"] = _less_for_muon(
        states["optimizer"], stage_matrices(network, spread, stage), shards, software
    )
    activations = _activations(network, spread, software, stage)
    logits = _logits(network, spread, software, stage)
    buffers = _buffers(network, spread, software, stage, parameters)
    terms = {**states, "activations": activations, "logits": logits, "buffers": buffers}
    if not np.all(software.lasting_gradients):
        terms["gradients"] = _passing_gradients(terms, spread, software)
    allocated = Breakdown(terms).total
    reserve = software.reserve_bytes + software.reserve_share * allocated
    terms["reserve"] = Term(
        reserve,
        "{fixed:.3g} GB of context and libraries + {share:.0%} of what is allocated",
        {"fixed": software.reserve_bytes / 1e9, "share": software.reserve_share},
    )
    return Breakdown(terms)


def holding_of(
    network: Network, spread: Spread, software: Software, stage: Numbers, mp_rank: Numbers = 0
) -> dict[str, Numbers]:
    """Bytes of a rank when its gradients are whole, before the update, and no weight is gathered:
    what `--dry-run` counts. Exact where sharding divides the rows of every parameter."""
    divided = np.asarray(spread.sharding) > 1
    own = stage_parameters(network, spread, stage, mp_rank) / spread.sharding
    return {
        "weights": np.where(divided, 0, software.weight_bytes) * own,
        "masters": np.where(divided, 4, software.master_bytes) * own,
        "gradients": software.gradient_bytes * own,
        "moments": software.moment_bytes * own,
    }


def _states(
    parameters: Numbers, wide: Numbers, shards: Numbers, level: Numbers, software: Software
) -> dict[str, Term]:
    """`wide` of the parameters are gathered in fp32 whatever the rest is."""
    divided = np.asarray(shards) > 1
    by = {
        "weights": np.where(divided & (level == 3), shards, 1),
        "gradients": np.where(divided & (level >= 2), shards, 1),
        "optimizer": np.where(divided, shards, 1),
    }
    # Sharded, the fp32 weights are the optimizer's and the copy multiplied with is made of them.
    whole = np.where(
        divided,
        np.where(level == 3, 0, np.minimum(software.weight_bytes, software.gather_bytes)),
        software.weight_bytes,
    )
    master = np.where(divided, 4, software.master_bytes)
    each = {
        "weights": whole,
        "gradients": software.gradient_bytes,
        "optimizer": master + software.moment_bytes + software.ema_bytes,
    }
    wider = {"weights": np.where(divided & (whole > 0), (4 - whole) * wide, 0.0)}
    return {
        name: Term(
            each[name] * parameters / by[name] + wider.get(name, 0.0),
            "{each:g} bytes x {parameters:.4g} B parameters / {by:.0f}{wider}",
            {
                "each": each[name],
                "parameters": parameters / 1e9,
                "by": by[name],
                "wider": _wider_text(wider.get(name, 0.0)),
            },
        )
        for name in each
    }


def _less_for_muon(whole: Term, matrices: Numbers, shards: Numbers, software: Software) -> Term:
    """Muon keeps less of the matrices than AdamW does of the rest."""
    less = (np.asarray(software.moment_bytes) - software.matrix_moment_bytes) * matrices / shards
    if not np.any(less):
        return whole
    return Term(
        whole.value - less,
        whole.sentence + ", {less:.4g} MB less because Muon has one moment of the matrices",
        {**whole.inputs, "less": less / 1e6},
    )


def _wider_text(bytes_: Numbers) -> Numbers:
    """What is in fp32, for one layout; a search over many shows no sentences."""
    if np.ndim(bytes_) or not bytes_:
        return ""
    return f" + {float(bytes_) / 1e6:.4g} MB for norms and embeddings in fp32"


def _passing_gradients(terms: dict[str, Term], spread: Spread, software: Software) -> Term:
    """With one micro-batch gradients appear while activations go, in the place of these."""
    whole, makes_room = terms["gradients"], terms["activations"].value + terms["logits"].value
    alone = (np.asarray(spread.micro_batches) == 1) & ~np.asarray(software.lasting_gradients)
    left = np.where(alone, np.maximum(whole.value - makes_room, 0.0), whole.value)
    freed = np.where(alone, np.minimum(whole.value, makes_room), 0.0)
    return Term(
        left,
        whole.sentence + ", {freed:.4g} MB of them in place of activations that are done with",
        {**whole.inputs, "freed": freed / 1e6},
    )


def _activations(network: Network, spread: Spread, software: Software, stage: Numbers) -> Term:
    kept = activation_bytes(network, spread, software)
    mode = np.asarray(spread.recompute)
    per_piece: Numbers = kept["none"]
    for name in RECOMPUTE_MODES[1:]:
        per_piece = np.where(mode == name, kept[name], per_piece)
    layers = layers_of_stage(network, spread, stage)
    again, pieces = recomputed_layers(network, spread, stage)
    # One piece is made whole again at a time.
    block = np.asarray(spread.recompute_method) == "block"
    size = np.where(block, np.minimum(again, 1), np.minimum(spread.recompute_layers, again))
    working = np.maximum(size * kept["none"] - np.minimum(pieces, 1) * per_piece, 0.0)
    held = (layers - again) * kept["none"] + pieces * per_piece
    # Offloaded, all but the inputs of what is recomputed as a whole; a layer's is on its way while
    # the next one's is made.
    whole = np.isin(mode, ("full", "ops"))
    stays = np.where(whole, pieces * per_piece, 0.0)
    gone = np.where(software.offloads, held - stays, 0.0)
    held = held - gone
    working = working + np.where(gone > 0, 2 * kept["none"], 0.0)
    flight = micro_batches_in_flight(spread, stage)
    tokens = spread.micro_batch * network.seq / spread.context
    split = np.where(spread.sequence_parallel, spread.mp, 1)
    first, last = stage_ends(spread, stage)
    mask = software.mask_bytes * np.where(network.hidden_dropout, 1, 0)
    embedded = np.where(first, flight * tokens * network.hidden * mask / split, 0)
    # Rotary positions and windows, which all layers of a stage have in common.
    common = 4 * np.asarray(network.rotary_size) + np.where(
        software.masks_windows, network.windows * network.seq * software.compute_bytes, 0
    )
    embedded = embedded + flight * spread.virtual * tokens * common
    final = np.where(
        last,
        tokens * network.hidden * (software.norm_bytes + software.compute_bytes) / split,
        0,
    )
    return Term(
        flight * held + working + embedded + final,
        "{flight:.3g} in flight x {layers:.0f} layers x {each:.4g} MB ({mode}) "
        "+ {working:.4g} MB of the current layer + {rest:.4g} MB of embedding, positions and last "
        "norm",
        {
            "flight": flight,
            "layers": layers,
            "each": held / layers / 1e6,
            "mode": _mode_text(spread, again, layers),
            "working": working / 1e6,
            "rest": (embedded + final) / 1e6,
        },
    )


def _mode_text(spread: Spread, again: Numbers, layers: Numbers) -> Numbers:
    """What is recomputed, for one layout; a search over many shows the granularity alone."""
    mode = np.asarray(spread.recompute)
    if np.ndim(again) or mode.ndim or not again:
        return np.where(mode == "none", "all kept", mode)
    if again < layers:
        return f"{mode}, of {int(again)} layers"
    together = int(spread.recompute_layers) if spread.recompute_method == "uniform" else 1
    return f"{mode}, {together} layers together" if together > 1 else str(mode)


def _logits(network: Network, spread: Spread, software: Software, stage: Numbers) -> Term:
    tokens = spread.micro_batch * network.seq / spread.context
    at_once = np.minimum(tokens, software.logit_tokens)
    rows = own_words(network, spread)
    return Term(
        np.where(stage_ends(spread, stage)[1], software.logit_bytes * at_once * rows, 0.0),
        "{bytes:g} bytes x {tokens:.0f} tokens x {rows:.0f} words (last stage only)",
        {"bytes": software.logit_bytes, "tokens": at_once, "rows": rows},
    )


def _buffers(
    network: Network, spread: Spread, software: Software, stage: Numbers, parameters: Numbers
) -> Term:
    """Casts, gathered layers and gradients on their way, messages between stages."""
    layer = network.layer_share(spread.mp)
    level, divided = np.asarray(spread.stage), np.asarray(spread.sharding) > 1
    last = stage_ends(spread, stage)[1]
    word = own_words(network, spread) * network.hidden
    # In stage 3 what both ends of the network have, and two layers.
    tables = end_parameters(network, spread, stage)
    table_bytes = np.where(software.wide_gathers, 4, software.gather_bytes)
    both = 2 * software.gather_bytes * layer + table_bytes * tables
    gathered = np.where(divided & (level == 3), both, 0.0)
    scattered = np.where(divided & (level >= 2), 2 * software.gradient_bytes * layer, 0.0)
    # Sharded, what is gathered has been cast already, but for the head.
    casts = software.cast_bytes * np.where(divided, np.where(last, word, 0), parameters)
    head = np.where(
        last,
        np.where(np.isfinite(software.logit_tokens), 4.0, 0.0)
        * network.vocab * network.hidden / spread.mp,
        0.0,
    )  # fmt: skip
    tokens = spread.micro_batch * network.seq / spread.context
    messages = np.where(
        np.asarray(spread.pp) > 1, 2 * software.compute_bytes * tokens * network.hidden, 0.0
    )
    return Term(
        gathered + scattered + casts + head + messages,
        "{gathered:.4g} MB of gathered weights + {scattered:.4g} MB of gradients on their way + "
        "{casts:.4g} MB of casts + {head:.4g} MB of the head's gradient + {messages:.4g} MB of "
        "pipeline messages",
        {
            "gathered": gathered / 1e6,
            "scattered": scattered / 1e6,
            "casts": casts / 1e6,
            "head": head / 1e6,
            "messages": messages / 1e6,
        },
    )


def fullest_stage(
    network: Network, spread: Spread, software: Software
) -> tuple[Breakdown, Numbers]:
    """The breakdown of the pipeline rank that needs most, and which it is: the first, where most
    is in flight and the embedding lives, the first of those with a layer more, or the last, which
    has the head and the logits."""
    pp = np.asarray(spread.pp)
    longest = (pp - network.layers % pp) // 2 % pp
    fullest, most = np.zeros_like(pp), memory_of(network, spread, software, 0).total
    for stage in (longest, pp - 1):
        total = memory_of(network, spread, software, stage).total
        fullest, most = np.where(total > most, stage, fullest), np.maximum(total, most)
    return memory_of(network, spread, software, fullest), fullest
