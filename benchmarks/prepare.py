"""Preparing data: `fourfold data prepare` against the way Megatron's preprocess_data.py works.

Megatron's way: a pool of workers, each parsing one JSON line and encoding one document at a time
with `tokenizers`, sends the ids to the parent, which writes them. Same text (that of this Python
installation, repeated), same tokenizer, same documents and as many workers for both; each is timed
as a process of its own from start to end, alternately, and the outputs must be the same bytes. Ours
also reads the same text from one .zst and from one .gz file. With `--megabytes 1` the text is not
repeated: no word is known from an earlier copy.

    python benchmarks/prepare.py [--megabytes 100] [--workers 2] [--rounds 3] [--tokenizer gpt2]
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from fourfold.processors import processor_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--dir", type=Path, default=None, help="kept if given")
    parser.add_argument("--pool", nargs=3, metavar=("INPUT", "PREFIX", "TOKENIZER"))
    options = parser.parse_args()
    if options.pool:
        encode_with_pool(*options.pool, workers=options.workers)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.dir or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        compare(directory, options)


def compare(directory: Path, options: argparse.Namespace) -> None:
    from fourfold.tokenizer import Tokenizer

    text = repeated_corpus(directory, options.megabytes * 10**6)
    tokenizer = Tokenizer.load(options.tokenizer).save(directory / "tokenizer.json")
    workers = str(options.workers)
    pool = [sys.executable, __file__, "--workers", workers]
    pool += ["--pool", str(text), str(directory / "pool"), str(tokenizer)]
    commands = {"Megatron's way": pool}
    fourfold = [sys.executable, "-m", "fourfold", "data", "prepare", "--overwrite"]
    fourfold += ["--tokenizer", str(tokenizer), "--workers", workers]
    outputs = {}
    for form, file in compressed_forms(text).items():
        name = f"`fourfold data prepare`, {form}"
        outputs[name] = directory / form
        commands[name] = [*fourfold, "--input", str(file), "--output-prefix", str(outputs[name])]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            begin = time.perf_counter()
            quiet = subprocess.DEVNULL
            subprocess.run(command, check=True, stdout=quiet, stderr=quiet)
            seconds[name].append(time.perf_counter() - begin)
    for ending in ("bin", "idx"):
        theirs = (directory / f"pool_text_document.{ending}").read_bytes()
        for prefix in outputs.values():
            ours = prefix.with_name(f"{prefix.name}_text_document.{ending}").read_bytes()
            assert ours == theirs, f"{prefix}: the .{ending} files differ"
    megabytes = text.stat().st_size / 1e6
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"\n{processor_name()}, {os.cpu_count()} cores")
    print(f"{megabytes:.0f} MB of JSON lines, {workers} workers, medians of {options.rounds}\n")
    print("| | seconds | MB/s of text | |\n|---|---|---|---|")
    for name, median in medians.items():
        ratio = medians["Megatron's way"] / median
        print(f"| {name} | {median:.1f} | {megabytes / median:.1f} | {ratio:.1f}x |")
    print("\nOutputs are identical.")


def compressed_forms(text: Path) -> dict[str, Path]:
    """The text as it is, and as one archive of each kind that is read."""
    zst, gz = text.with_name(f"{text.name}.zst"), text.with_name(f"{text.name}.gz")
    if not zst.exists():
        zst.write_bytes(zstandard.ZstdCompressor(level=3).compress(text.read_bytes()))
        gz.write_bytes(gzip.compress(text.read_bytes(), compresslevel=6))
    return {"plain": text, "zst": zst, "gz": gz}


def repeated_corpus(directory: Path, num_bytes: int) -> Path:
    """The text of this Python installation, over and over until it is large enough."""
    from fourfold.tools.prepare.corpus import write_corpus

    path = directory / f"repeated_{num_bytes}.jsonl"
    if not path.exists():
        once = write_corpus(directory).read_bytes()
        with path.open("wb") as file:
            for _ in range(-(-num_bytes // len(once))):
                file.write(once)
    return path


# Megatron's way


def encode_with_pool(text: str, prefix: str, tokenizer: str, workers: int) -> None:
    dtype = np.dtype(np.uint16)
    sizes: list[int] = []
    with (
        open(text, encoding="utf-8") as lines,
        multiprocessing.Pool(workers, load_tokenizer, (tokenizer,)) as pool,
        open(f"{prefix}_text_document.bin", "wb") as tokens,
    ):
        for ids in pool.imap(encode_line, lines, 32):
            tokens.write(np.array(ids, dtype=dtype).tobytes(order="C"))
            sizes.append(len(ids))
    ends = np.cumsum([0, *sizes], dtype=np.int64) * dtype.itemsize
    with open(f"{prefix}_text_document.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1))
        index.write(np.array(sizes, np.int32).tobytes())
        index.write(ends[:-1].tobytes())
        index.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())


_tokenizer: Any = None


def load_tokenizer(path: str) -> None:
    from tokenizers import Tokenizer

    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_file(path)
    _tokenizer.encode_special_tokens = True


def encode_line(line: str) -> list[int]:
    ids: list[int] = _tokenizer.encode(json.loads(line)["text"]).ids
    if ids:
        ids.append(_tokenizer.token_to_id("<|endoftext|>"))
    return ids


if __name__ == "__main__":
    main()
