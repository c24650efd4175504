"""Saving and resuming GPT-2 124M with AdamW's state, next to what the disk does by itself.

The disk's own rates are those of the same number of bytes in the same directory, written in large
blocks and synced, or read: through the page cache and past it (`O_DIRECT`). All variants take
turns; before anything is read, its pages are dropped from the cache. Ours hash every byte.

A save in the background is measured on real training steps: how long the run stands still for it
(until the save has begun, and before the next update), and how much longer the steps beside it
take.

    python benchmarks/save.py [--rounds 5] [--steps 4] [--directory .]
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from parallel_memory import run_step
from parallel_ranks import Desk, say, table

from fourfold import checkpoint
from fourfold.config.batch_schedule import BatchSchedule
from fourfold.engine import Engine, build_engine, saving
from fourfold.metrics import Meter
from fourfold.model import ModelShape, table_of
from fourfold.processors import processor_name

GPT2 = [
    "Model.vocab_size=50304",
    "Model.hidden_size=768",
    "Model.num_layers=12",
    "Model.num_attention_heads=12",
    "Model.max_position_embeddings=1024",
    "Data.dataset.max_seq_len=512",
    "Data.batch_size.global_batch_size=4",
    "Data.batch_size.micro_batch_size=4",
    "Engine.save_load.async_save=True",
]
BLOCK_BYTES = 8 << 20
TOKENS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads of each kind")
    parser.add_argument("--steps", type=int, default=4, help="pairs of steps with and without")
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the disk in question")
    options = parser.parse_args()
    print(f"{processor_name()}, torch {torch.__version__}\n")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        desk = Desk(Path(folder), GPT2, TOKENS, 50304)
        if options.rounds:
            disk_tables(Path(folder), desk, options.rounds)
        if options.steps:
            async_table(desk, options.steps)


# -- the disk -------------------------------------------------------------------------------------


def disk_tables(folder: Path, desk: Desk, rounds: int) -> None:
    tensors = state_of_124m(desk)
    size = sum(tensor.nbytes for tensor in tensors.values())
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    plain, torchs, saves = folder / "plain", folder / "torch.pt", folder / "saves"
    writers: dict[str, Callable[[], object]] = {
        "the disk, past the page cache": lambda: write_plainly(plain, size, os.O_DIRECT),
        "the disk, through the page cache": lambda: write_plainly(plain, size, 0),
        "fourfold, hashed": lambda: checkpoint.save(saves, 1, tensors, {}),
        "torch.save, synced, not hashed": lambda: torch_save(tensors, torchs),
    }
    readers: dict[str, Callable[[], object]] = {
        "the disk, past the page cache": lambda: read_plainly(plain, os.O_DIRECT),
        "the disk, through the page cache": lambda: read_plainly(plain, 0),
        "fourfold, hashed": lambda: checkpoint.resume(saves, blank, print),
        "torch.load, not hashed": lambda: torch.load(torchs),
    }
    written = dict(zip(writers, (plain, plain, saves, torchs)))
    for title, variants in (("saving", writers), ("resuming, nothing cached", readers)):
        rates: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(rounds + 1):
            for name, work in variants.items():
                if variants is writers:
                    remove(written[name])
                drop_cached(folder)
                say(f"{title}: {name}")
                start = time.perf_counter()
                work()
                if number > 0:  # the first is a warm-up
                    rates[name].append(size / 1e6 / (time.perf_counter() - start))
        rows = [
            [name, f"{statistics.median(taken):.0f}", *of_disk(rates, name)]
            for name, taken in rates.items()
        ]
        head = f"{title}, {size / 1e9:.2f} GB | MB/s | of the disk, past | through the cache"
        table(head, rows)
    for name in tensors:
        assert torch.equal(tensors[name], blank[name])


def of_disk(rates: dict[str, list[float]], name: str) -> list[str]:
    """How fast it is relative to the disk, in the median over rounds."""
    return [
        f"{statistics.median(our / its for our, its in zip(rates[name], rates[disk])):.2f}"
        for disk in list(rates)[:2]
    ]


def state_of_124m(desk: Desk) -> dict[str, torch.Tensor]:
    shape = ModelShape.of(desk.config(1, []).Model)
    return {
        pattern.format(name): torch.randn(size)
        for name, size in table_of(shape).shapes.items()
        for pattern in ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")
    }


def remove(path: Path) -> None:
    """A save would otherwise have to make room for itself."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def drop_cached(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with opened(path, os.O_RDONLY) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_plainly(path: Path, size: int, flags: int) -> None:
    block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=np.uint8)
    block[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags) as descriptor:
        for _ in range(-(-size // BLOCK_BYTES)):
            os.write(descriptor, block.data)
        os.fsync(descriptor)


def read_plainly(path: Path, flags: int) -> None:
    block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=np.uint8)
    with opened(path, os.O_RDONLY | flags) as descriptor:
        while os.readv(descriptor, [block.data]):
            pass


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# -- in the background ----------------------------------------------------------------------------


def async_table(desk: Desk, pairs: int) -> None:
    engine = build_engine(desk.config(1, []), 1)
    alone, beside, stalls, writing = [], [], [], []
    for step in range(2 * pairs + 1):
        saves = step > 0 and step % 2 == 0
        stall = begin(engine) if saves else 0.0
        start = time.perf_counter()
        stall += timed_step(engine, step)
        taken = time.perf_counter() - start
        say(f"step {step}: {taken:.2f} s, stood still {stall:.3f} s")
        if saves:
            beside.append(taken)
            stalls.append(stall)
            writing.append(finish(engine))
        elif step > 0:
            alone.append(taken)
    step_seconds, stall = statistics.median(alone), statistics.median(stalls)
    slower = statistics.median(beside) / step_seconds - 1
    rows = [
        ["a step, 4 x 512 tokens, float32", f"{step_seconds:.2f} s", ""],
        ["standing still for a save", f"{stall:.3f} s", f"{100 * stall / step_seconds:.1f} %"],
        ["the step beside it", f"{statistics.median(beside):.2f} s", f"{100 * slower:+.1f} %"],
        ["left to write after that step", f"{statistics.median(writing):.2f} s", ""],
    ]
    table("saving in the background | time | of a step", rows)


def begin(engine: Engine) -> float:
    start = time.perf_counter()
    saving.save(engine, Meter(batch_schedule=BatchSchedule(1), seq_len=1), final=False)
    return time.perf_counter() - start


def timed_step(engine: Engine, step: int) -> float:
    """One step; returns how long it stood still before its update."""
    waited, before = [0.0], engine.saves.before_update

    def timed() -> None:
        start = time.perf_counter()
        before()
        waited[0] += time.perf_counter() - start

    engine.saves.before_update = timed  # type: ignore[method-assign]
    try:
        run_step(engine, step)
    finally:
        del engine.saves.before_update
    return waited[0]


def finish(engine: Engine) -> float:
    start = time.perf_counter()
    saving.finish(engine)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
