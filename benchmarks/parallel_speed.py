"""Tokens a second of each layout on two ranks, next to the same model on torch alone.

The peers are what one would write by hand: `DistributedDataParallel`, or `fully_shard` on each
layer, around this project's model, with torch's clipping and its fused AdamW.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parallel_memory import run_step
from parallel_ranks import Desk, Ranks, say, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fourfold.config import Config
from fourfold.engine import build_engine
from fourfold.model import GPT, ModelShape, initialize
from fourfold.processors import threads_of_rank

BATCH, LENGTH, VOCABULARY = 8, 256, 8192
SHAPE = [
    f"Model.vocab_size={VOCABULARY}",
    "Model.hidden_size=512",
    "Model.num_layers=6",
    "Model.num_attention_heads=8",
    f"Model.max_position_embeddings={LENGTH}",
    f"Data.dataset.max_seq_len={LENGTH}",
    f"Data.batch_size.global_batch_size={BATCH}",
]
ALONE = "one process, 2 threads"
# A pipeline lives on its micro-batches; the others take the batch of a rank at once.
LAYOUTS = {
    "dp2": ["Distributed.dp_degree=2"],
    "sharding2, stage 1": ["Distributed.sharding.sharding_degree=2"],
    "sharding2, stage 2": [
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=2",
    ],
    "sharding2, stage 3": [
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=3",
    ],
    "mp2": ["Distributed.mp_degree=2", f"Data.batch_size.micro_batch_size={BATCH}"],
    "pp2": ["Distributed.pp_degree=2", "Data.batch_size.micro_batch_size=1"],
}
TAKE_TURNS = {"pp2"}
PEERS = {
    "dp2": "DDP",
    "sharding2, stage 1": "FSDP2, weights kept",
    "sharding2, stage 2": "FSDP2, weights kept",
    "sharding2, stage 3": "FSDP2, weights freed",
}


def speed_table(desk: Desk, rounds: int) -> None:
    teams = start_teams(desk)
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    try:
        for warm_up in (True, True, *[False] * rounds):
            for name, team in teams.items():
                say(f"speed: {name}{', warm-up' if warm_up else ''}")
                elapsed = team.timed_turn()
                if not warm_up:
                    seconds[name].append(elapsed)
    finally:
        for team in teams.values():
            team.close()
    rows = []
    for name, taken in seconds.items():
        rate = BATCH * LENGTH / statistics.median(taken)
        peer = PEERS.get(name)
        against = f"{ratio(seconds[peer], taken):.2f} of {peer}" if peer else ""
        rows.append([name, f"{rate:.0f}", f"{ratio(seconds[ALONE], taken):.2f}", against])
    table(f"layout | tokens/s | of {ALONE} | of the peer", rows)


def ratio(theirs: list[float], ours: list[float]) -> float:
    """How fast we are relative to them: the median over rounds, in which both ran in turn."""
    return statistics.median(their / our for their, our in zip(theirs, ours))


def start_teams(desk: Desk) -> dict[str, Ranks]:
    whole = f"Data.batch_size.micro_batch_size={BATCH}"
    half = f"Data.batch_size.micro_batch_size={BATCH // 2}"
    alone = desk.config(1, [whole])
    teams = {ALONE: Ranks(1, partial(engine_steps, alone, 1), threads=2)}
    for name, overrides in LAYOUTS.items():
        config, turns = desk.config(2, [half, *overrides]), name in TAKE_TURNS
        work = partial(engine_steps, config, 2)
        threads = threads_of_rank(2, take_turns=turns)
        teams[name] = Ranks(2, work, threads, takes_turns=turns)
        # Next to the first layout it is compared with.
        peer = PEERS.get(name)
        if peer is not None and peer not in teams:
            teams[peer] = Ranks(2, partial(peer_steps, alone, peer))
    return teams


def engine_steps(config: Config, world: int) -> Iterator[None]:
    engine, step = build_engine(config, world), 0
    while True:
        run_step(engine, step)
        step += 1
        yield


def peer_steps(config: Config, kind: str) -> Iterator[None]:
    """The same step written on torch directly."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['FOURFOLD_STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    model = GPT(ModelShape.of(config.Model))
    initialize(model, seed=1)
    if kind == "DDP":
        run: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh, free = init_device_mesh("cpu", (world,)), kind == "FSDP2, weights freed"
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh, reshard_after_forward=free)
        run = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH // world, LENGTH + 1))
    while True:
        loss = run(tokens[:, :-1], tokens[:, 1:], loss_scale=1 / tokens[:, 1:].numel())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        yield
