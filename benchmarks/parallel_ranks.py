"""Ranks for a benchmark: forked from this warm process, joined by gloo, and run turn by turn.

`Ranks(size, work)` starts the processes; each `turn()` lets every rank run on to its next `yield`
and gives what they yielded. Several such teams can be alive at once, so that variants take turns
and a disturbance of the machine meets all of them alike.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fourfold.config import Config, load_config
from fourfold.launch.workers import die_with_parent

CONFIG = """
Global: {device: cpu, seed: 1}
Engine:
  logging_freq: 1
  eval_freq: 0
  test_iters: 0
  tensorboard: False
  mix_precision: {dtype: float32}
  save_load: {save_steps: 0}
Data:
  dataset: {split: '1,0,0', eod_mask_loss: False}
Model:
  hidden_dropout_prob: 0.0
  attention_probs_dropout_prob: 0.0
  use_recompute: False
Optimizer:
  weight_decay: 0.1
  grad_clip: 1.0
  lr: {decay_steps: 1000, max_lr: 1.0e-4, min_lr: 1.0e-5}
"""

Work = Callable[[], Iterator[Any]]


class Ranks:
    """A team of processes that all run the same generator, one `yield` a turn.

    Of a team that `takes_turns` the threads of a rank that waits sleep, as the command has it for
    pipelines. OpenMP learns of that when it is loaded, so these processes are started afresh.
    """

    def __init__(
        self, size: int, work: Work, threads: int = 1, *, takes_turns: bool = False
    ) -> None:
        self.place = tempfile.TemporaryDirectory()
        fork = multiprocessing.get_context("spawn" if takes_turns else "fork")
        if takes_turns:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = fork.Pipe()
            arguments = (rank, size, threads, Path(self.place.name) / "store", work, theirs)
            process = fork.Process(target=_serve, args=(*arguments, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)
        os.environ.pop("OMP_WAIT_POLICY", None)

    def turn(self) -> list[Any]:
        """What each rank yields next."""
        for end in self.ends:
            end.send(True)
        try:
            return [end.recv() for end in self.ends]
        except EOFError:
            # The rank that failed has printed why.
            raise SystemExit("a rank of the benchmark failed") from None

    def timed_turn(self) -> float:
        """Seconds until the last rank has yielded."""
        start = time.perf_counter()
        self.turn()
        return time.perf_counter() - start

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.place.cleanup()


def once(size: int, work: Work) -> list[Any]:
    """What a team yields in its only turn."""
    ranks = Ranks(size, work)
    try:
        return ranks.turn()
    finally:
        ranks.close()


def _serve(
    rank: int, size: int, threads: int, store: Path, work: Work, end: Connection, parent: int
) -> None:
    die_with_parent(parent)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["FOURFOLD_STORE"] = str(store)
    torch.set_num_threads(threads)
    try:
        turns = work()
        while end.recv():
            end.send(next(turns))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Desk:
    """A directory with random tokens, and configurations over it."""

    def __init__(self, folder: Path, overrides: list[str], tokens: int, vocab_size: int) -> None:
        self.folder = folder
        self.overrides = overrides
        self.outputs = count()  # runs that are alive at once may not share an output directory
        self.yaml = folder / "config.yaml"
        self.yaml.write_text(CONFIG)
        data = folder / "data"
        data.mkdir()
        drawn = np.random.default_rng(0).integers(0, vocab_size, tokens, dtype=np.uint16)
        np.save(data / "random_ids.npy", drawn)
        lengths = np.array([tokens], np.int32)
        np.savez(data / "random_idx.npz", lens=lengths, docs=np.array([0, 1]))

    def config(self, world: int, overrides: list[str]) -> Config:
        places = [
            f"Data.dataset.input_dir={self.folder / 'data'}",
            f"Data.dataset.cache_dir={self.folder / 'cache'}",
            f"Engine.save_load.output_dir={self.folder / f'output{next(self.outputs)}'}",
        ]
        return load_config(self.yaml, [*places, *self.overrides, *overrides], world_size=world)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(head: str, rows: list[list[str]]) -> None:
    """A Markdown table; columns of the head are separated by a bar."""
    titles = [title.strip() for title in head.split("|")]
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()
