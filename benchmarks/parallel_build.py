"""Host memory while a model is built, and the time from the command to the first step.

Of each layout the rank that grows most is shown.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from parallel_memory import forget_peak, mega, resident_memory, storage_bytes
from parallel_ranks import Desk, once, say, table

from fourfold.config import Config
from fourfold.mesh import connect
from fourfold.metrics import read_jsonl
from fourfold.model import ModelShape, count_parameters
from fourfold.parallel import layout_of, parallelize, preload

BUILD_SHAPE = [
    "Model.vocab_size=8192",
    "Model.hidden_size=1024",
    "Model.num_layers=24",
    "Model.num_attention_heads=16",
    "Model.max_position_embeddings=64",
    "Data.dataset.max_seq_len=4",
    "Data.batch_size.global_batch_size=4",
    "Data.batch_size.micro_batch_size=1",
]
BUILD_LAYOUTS = {
    "sharding4, stage 3": [
        "Distributed.sharding.sharding_degree=4",
        "Distributed.sharding.sharding_stage=3",
    ],
    "mp4": ["Distributed.mp_degree=4"],
    "pp4": ["Distributed.pp_degree=4"],
    "sharding2, stage 3 x mp2": [
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=3",
        "Distributed.mp_degree=2",
    ],
}

LAUNCH_SHAPE = [
    "Model.vocab_size=1024",
    "Model.hidden_size=32",
    "Model.num_layers=2",
    "Model.num_attention_heads=4",
    "Model.max_position_embeddings=16",
    "Data.dataset.max_seq_len=16",
    "Data.batch_size.global_batch_size=8",
    "Data.batch_size.micro_batch_size=1",
    "Engine.max_steps=1",
]


def build_table(desk: Desk) -> None:
    rows = []
    for name, overrides in BUILD_LAYOUTS.items():
        say(f"build: {name}")
        config = desk.config(4, overrides)
        preload(layout_of(config))  # as the command does before it forks
        found = once(4, partial(build, config))
        whole, share, grown = max(found, key=lambda figures: figures[2])
        rows.append([name, mega(whole), mega(share), mega(grown), f"{grown / share:.2f}"])
    table("layout | model, MB | share of a rank | peak | peak of share", rows)


def build(config: Config) -> Iterator[tuple[int, int, int]]:
    """Bytes of the whole model, of this rank's share, and by how much the process grew at most."""
    device = torch.device("cpu")
    mesh = connect(layout_of(config), device)
    forget_peak()
    before = resident_memory()
    runner = parallelize(config, mesh, device)
    grown = resident_memory("VmHWM") - before
    whole = 4 * count_parameters(ModelShape.of(config.Model))
    share = storage_bytes([parameter.data for parameter in runner.masters.values()])
    yield whole, share, grown


def launch_table(desk: Desk, worlds: list[int], repeats: int) -> None:
    seconds: dict[int, list[float]] = {world: [] for world in worlds}
    for repeat in range(repeats):
        for world in worlds:
            say(f"launch: {world} ranks, repeat {repeat + 1}")
            seconds[world].append(first_step_seconds(desk, world, repeat))
    rows = [[str(world), f"{statistics.median(taken):.1f} s"] for world, taken in seconds.items()]
    table("ranks | command to first step", rows)


def first_step_seconds(desk: Desk, world: int, repeat: int) -> float:
    output = desk.folder / f"launch_{world}_{repeat}"
    overrides = [
        *desk.overrides,
        f"Data.dataset.input_dir={desk.folder / 'data'}",
        f"Engine.save_load.output_dir={output}",
        f"Distributed.dp_degree={world}",
    ]
    command = [sys.executable, "-m", "fourfold", "train", "-c", str(desk.yaml)]
    command += ["--nproc", str(world)]
    command += [word for override in overrides for word in ("-o", override)]
    start = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = read_jsonl(Path(output, "metrics.jsonl"))
    first = next(record for record in records if record["kind"] == "train")
    return datetime.fromisoformat(first["time"]).timestamp() - start
