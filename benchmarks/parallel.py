"""What parallelism costs: memory by sharding stage, building, speed against torch, launching.

Everything runs on this machine, over gloo, with one thread per rank. Memory is counted over live
tensors and held against the formula of docs/parallel_cost.md; speed against one process with two
threads and against `DistributedDataParallel` and `fully_shard` written by hand, in turns.

    python benchmarks/parallel.py [--only memory|build|speed|launch] [--rounds 5]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import parallel_build
import parallel_memory
import parallel_speed
import torch
from parallel_ranks import Desk, say

from fourfold.processors import processor_name

SECTIONS = ("memory", "build", "speed", "launch")
TOKENS = 400_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each layout")
    parser.add_argument("--repeats", type=int, default=2, help="launches of each size")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="ranks, for memory")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="for memory")
    options = parser.parse_args()
    print(f"{processor_name()}, torch {torch.__version__}\n")
    for section in [options.only] if options.only else SECTIONS:
        start = time.perf_counter()
        print(f"## {section}\n")
        with tempfile.TemporaryDirectory() as folder:
            run(section, Path(folder), options)
        say(f"{section}: {time.perf_counter() - start:.0f} s in all")


def run(section: str, folder: Path, options: argparse.Namespace) -> None:
    if section == "memory":
        desk = Desk(folder, parallel_memory.SHAPE, TOKENS, 1024)
        parallel_memory.memory_table(desk, options.dtypes, options.worlds)
    elif section == "build":
        parallel_build.build_table(Desk(folder, parallel_build.BUILD_SHAPE, TOKENS, 1024))
    elif section == "speed":
        desk = Desk(folder, parallel_speed.SHAPE, TOKENS, parallel_speed.VOCABULARY)
        parallel_speed.speed_table(desk, options.rounds)
    else:
        desk = Desk(folder, parallel_build.LAUNCH_SHAPE, TOKENS, 1024)
        parallel_build.launch_table(desk, [1, 2, 4, 8], options.repeats)


if __name__ == "__main__":
    main()
