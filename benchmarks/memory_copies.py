"""Copies in memory: what one costs a step, and how long it takes to resume from it.

Two ranks, each with a directory of its own in /dev/shm, stand for two machines. The state is
sharded over them, so each writes half of it, sends that half to the other through the loopback and
takes the other's. Steps with and without a copy take turns. Then everything one machine holds is
removed, and the run is put together from what is left: found, hashed, half of it sent back, loaded.

    python benchmarks/memory_copies.py [--pairs 5] [--layers 12] [--width 768]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from parallel_ranks import Desk, Ranks, say, table
from save import timed_step

from fourfold.checkpoint import copy_store
from fourfold.config import Config
from fourfold.engine import Engine, build_engine, resuming
from fourfold.engine.memory_copies import MemoryCopies
from fourfold.metrics import Sinks
from fourfold.processors import processor_name

TOKENS = 100_000
VOCABULARY = 50304
LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="steps with a copy, and without")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    print(f"{processor_name()}, torch {torch.__version__}\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=copy_store.MEMORY) as memory,
    ):
        network = [
            f"Model.vocab_size={VOCABULARY}",
            f"Model.hidden_size={options.width}",
            f"Model.num_layers={options.layers}",
            f"Model.num_attention_heads={max(1, options.width // 64)}",
            "Model.max_position_embeddings=1024",
            f"Data.dataset.max_seq_len={LENGTH}",
            "Data.batch_size.global_batch_size=4",
            "Data.batch_size.micro_batch_size=2",
            "Distributed.sharding.sharding_degree=2",
            "Distributed.sharding.sharding_stage=2",
            "Engine.save_load.memory_copy_steps=1",
        ]
        config = Desk(Path(folder), network, TOKENS, VOCABULARY).config(2, [])
        measure(config, Path(memory), options.pairs)


def measure(config: Config, memory: Path, pairs: int) -> None:
    ranks = Ranks(2, lambda: one_rank(config, memory, pairs))
    try:
        (size,) = {each for each in ranks.turn() if each}
        steps: dict[bool, list[float]] = {False: [], True: []}
        stalls, complete = [], []
        for step in range(2 * pairs + 1):
            told = ranks.turn()
            seconds, stall, done = (max(each) for each in zip(*told, strict=True))
            say(f"step {step}: {seconds:.2f} s, stood still {stall:.3f} s, complete {done:.2f} s")
            if step == 0:
                continue  # the first is always slower
            copied = step % 2 == 0
            steps[copied].append(seconds)
            if copied:
                stalls.append(stall)
                complete.append(done)
        found, loaded = (max(each) for each in zip(*ranks.turn(), strict=True))
    finally:
        ranks.close()
    alone, beside = (statistics.median(steps[copied]) for copied in (False, True))
    stall, done = statistics.median(stalls), statistics.median(complete)
    rows = [
        [f"a step of two ranks, 4 x {LENGTH} tokens, float32", f"{alone:.2f} s", ""],
        ["standing still for a copy", f"{stall:.3f} s", f"{100 * stall / alone:.1f} %"],
        ["the step beside it", f"{beside:.2f} s", f"{100 * (beside / alone - 1):+.1f} %"],
        ["the copy is complete on both after", f"{done:.2f} s", ""],
        ["one machine lost: found, hashed, sent", f"{found:.2f} s", ""],
        ["and loaded", f"{loaded:.2f} s", ""],
    ]
    table(f"copies in memory, {size / 1e9:.2f} GB | time | of a step", rows)


def one_rank(config: Config, memory: Path, pairs: int) -> Iterator[object]:
    rank = int(os.environ["RANK"])
    copy_store.MEMORY = memory / f"machine{rank}"
    copy_store.MEMORY.mkdir()
    engine = build_engine(config, 2)
    engine.copies = copies = MemoryCopies(engine)
    copies.check_room()
    copies.begin()
    yield sum(said.part_bytes for said in copies.ranks)
    for step in range(2 * pairs + 1):
        engine.mesh.all_reduce(0.0)
        began, before = time.perf_counter(), copies.costs.whole_seconds
        stall = 0.0
        if step > 0 and step % 2 == 0:
            copies.copy(Sinks())
            stall = time.perf_counter() - began
        stall += timed_step(engine, step)
        seconds = time.perf_counter() - began
        if engine.saves.copying is not None:
            engine.saves.copying.wait()
        yield seconds, stall, copies.costs.whole_seconds - before
    if rank == 1:
        for path in copy_store.MEMORY.iterdir():
            shutil.rmtree(path)
    yield recovered(engine)


def recovered(engine: Engine) -> tuple[float, float]:
    copies = MemoryCopies(engine)
    began = time.perf_counter()
    tensors = resuming.tensors_to_load(engine.runner, engine.optimizer)
    assert copies.recover(-1, tensors) is not None, engine.notices
    found = time.perf_counter() - began
    source = resuming.SavedRun(str(copies.store.whole), "copy", engine.config.Optimizer.name)
    resuming._restore(engine, source)
    return found, time.perf_counter() - began - found


if __name__ == "__main__":
    main()
