"""What a checkpoint's metadata costs at scale: GPT-3 175B over 128, 512 and 1024 ways.

Names, shapes and rectangles are those of the real model under model parallelism of 8 and sharding
(stage 3) of the rest, every rank a writer, and go through the code of a real save and load. Only
the tensors and their files are missing. Measured are, each in a process of its own:

    save   what rank 0 does once all records are there: reads them, joins them, writes the indices
    open   what every rank does to load: reads the indices and finds the files that hold its part
    list   what it takes to learn which of twenty such checkpoints was saved last

Memory is the peak resident size above what the imports took.

    python benchmarks/manifest.py [--ways 128 512 1024] [--rounds 3]
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import platform
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint import Shard
from fourfold.checkpoint.bounded import FileRecord
from fourfold.checkpoint.directory import history
from fourfold.checkpoint.index import Part, StoredPiece, encode_part, joined, read_parts
from fourfold.checkpoint.manifest import read_manifest, write_manifest
from fourfold.checkpoint.tensor_files import parts_by_file, shard_names
from fourfold.model import ModelShape, table_of
from fourfold.model.params import split_range
from fourfold.processors import processor_name
from fourfold.shards import Box

GPT3 = ModelShape(
    vocab_size=51200,
    hidden_size=12288,
    num_layers=96,
    num_attention_heads=96,
    ffn_hidden_size=49152,
    max_position_embeddings=2048,
)
MP = 8
KEPT = 20


def names_and_shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Checkpoint name -> parameter and whole shape: weights and two moments each."""
    return {
        pattern.format(name): (name, shape)
        for name, shape in table_of(GPT3).shapes.items()
        for pattern in ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")
    }


def box_of(name: str, shape: tuple[int, ...], mp: int, shard: int, ways: int) -> Box | None:
    """What one rank writes of a parameter: its model-parallel part, of that its rows."""
    offsets, sizes = [0] * len(shape), list(shape)
    dim = table_of(GPT3)[name].split_dim
    if dim is not None:
        start, stop = split_range(shape[dim], mp, MP)
        offsets[dim], sizes[dim] = start, stop - start
    elif mp != zlib.crc32(name.encode()) % MP:
        return None  # one of the replicas writes it
    rows = -(-sizes[0] // ways)
    first = min(shard * rows, sizes[0])
    offsets[0] += first
    sizes[0] = min(rows, sizes[0] - first)
    return Box(tuple(offsets), tuple(sizes)) if sizes[0] > 0 else None


def boxes_of(tensors: dict[str, Any], rank: int, ranks: int) -> dict[str, Box]:
    shard, mp = divmod(rank, MP)
    boxes = {
        name: box_of(parameter, shape, mp, shard, ranks // MP)
        for name, (parameter, shape) in tensors.items()
    }
    return {name: box for name, box in boxes.items() if box is not None}


def part_of(tensors: dict[str, Any], rank: int, ranks: int) -> Part:
    boxes = boxes_of(tensors, rank, ranks)
    shards = shard_names({n: 4 * box.volume() for n, box in boxes.items()}, f"rank{rank:05d}-")
    files, pieces = {}, {}
    for file, names in shards.items():
        # Room for the header; the content is as unpredictable as a real digest.
        size = sum(4 * boxes[name].volume() for name in names) + 200 * len(names)
        digest = hashlib.sha256(file.encode()).hexdigest()
        files[file] = FileRecord(bytes=size, digest=digest)
        for name in names:
            pieces[name] = StoredPiece(tensors[name][1], "float32", boxes[name], file)
    return Part.of(files, pieces)


def save(directory: Path, ranks: int) -> None:
    paths = {rank: directory / f"rank{rank:05d}.json" for rank in range(ranks)}
    parts, problems = read_parts(paths)
    assert not problems
    write_manifest(directory, 1000, 1, joined(parts), b"{}")


def open_as(directory: Path, wanted: dict[str, Shard]) -> None:
    files = parts_by_file(read_manifest(directory), wanted)
    assert files


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds and peak megabytes of `work`, in a fork of this process."""

    def child(report: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        report.send((seconds, (_status("VmHWM") - before) / 1e3))

    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(ours,))
    process.start()
    result: tuple[float, float] = theirs.recv()
    process.join()
    return result


def _status(key: str) -> int:
    """Kilobytes, from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def median(rounds: int, work: Callable[[], object]) -> str:
    results = [measured(work) for _ in range(rounds)]
    seconds = statistics.median(seconds for seconds, _ in results)
    return f"{seconds:6.2f} s {max(peak for _, peak in results):5.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tensors = names_and_shapes()
    print(f"{processor_name()}, Python {platform.python_version()}")
    print(f"{len(tensors)} tensors, mp {MP} x sharding")
    print("  ways    pieces  files   indices          save              open              list")
    for ranks in options.ways:
        with tempfile.TemporaryDirectory() as folder:
            print(row(tensors, ranks, options.rounds, Path(folder)))


def row(tensors: dict[str, Any], ranks: int, rounds: int, folder: Path) -> str:
    directory = folder / "step_1000"
    directory.mkdir()
    pieces = files = 0
    for rank in range(ranks):
        part = part_of(tensors, rank, ranks)
        pieces, files = pieces + len(part.table), files + len(part.files)
        (directory / f"rank{rank:05d}.json").write_bytes(encode_part(part))
    saving = median(rounds, lambda: save(directory, ranks))
    size = sum(path.stat().st_size for path in directory.glob("index-*.json"))
    wanted = {
        name: Shard(torch.empty(box.shape, device="meta"), tensors[name][1], box.offsets)
        for name, box in boxes_of(tensors, ranks // 2, ranks).items()
    }
    opening = median(rounds, lambda: open_as(directory, wanted))
    for path in directory.glob("rank*.json"):
        path.unlink()
    for number in range(1, KEPT):
        shutil.copytree(directory, folder / f"step_{number}")
    listing = median(rounds, lambda: history(folder))
    return f"{ranks:6} {pieces:9,} {files:6} {size / 1e6:6.2f} MB {saving} {opening} {listing}"


if __name__ == "__main__":
    main()
