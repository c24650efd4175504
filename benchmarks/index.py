"""Index building at size: 10 million documents, 10 billion tokens, and a mixture of 5 million.

Ours is what a run does: numpy alone, nothing compiled. The peer is how Megatron does the same:
numpy's shuffles, and the two sequential loops (where samples begin, which source comes next) in
C++, written here from the description of the algorithm and compiled with g++ where there is one.
Both run in processes of their own, alternating; medians are taken, every array is compared by its
hash, and memory is the peak resident size of the process above what its imports took.

    python benchmarks/index.py [--documents 10000000] [--mean 1000] [--seq-len 2048] [--rounds 3]
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.processors import processor_name

SEED = 1234
WEIGHTS = (0.35, 0.65)
PARTS = ("blend: sources", "blend: samples")
CPP = r"""
#include <algorithm>
#include <cstdint>

extern "C" void sample_index(const int32_t *sizes, const int32_t *documents, int64_t length,
                             int64_t samples, int32_t *out) {
    int64_t position = 0;
    int32_t offset = 0;
    out[0] = out[1] = 0;
    for (int64_t k = 1; k <= samples; ++k) {
        int64_t remaining = length + 1;
        for (;;) {
            int64_t available = sizes[documents[position]] - offset;
            if (available >= remaining) {
                offset += static_cast<int32_t>(remaining - 1);
                break;
            }
            remaining -= available;
            ++position;
            offset = 0;
        }
        out[2 * k] = static_cast<int32_t>(position);
        out[2 * k + 1] = offset;
    }
}

extern "C" void blend(const double *weights, int32_t sources, int64_t samples, int16_t *source,
                      int64_t *number, int64_t *counts) {
    for (int64_t s = 0; s < samples; ++s) {
        double scale = std::max(static_cast<double>(s), 1.0);
        int32_t best = 0;
        double largest = weights[0] * scale - static_cast<double>(counts[0]);
        for (int32_t i = 1; i < sources; ++i) {
            double behind = weights[i] * scale - static_cast<double>(counts[i]);
            if (behind > largest) {
                largest = behind;
                best = i;
            }
        }
        source[s] = static_cast<int16_t>(best);
        number[s] = counts[best]++;
    }
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--mean", type=int, default=1000, help="tokens per document")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--blend", type=int, default=5_000_000, help="samples of the mixture")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](arguments)))
        return
    with tempfile.TemporaryDirectory() as directory:
        arguments.dir = Path(directory)
        write_tokens(arguments)
        compiled = compile_peer(arguments.dir)
        compare(arguments, [name for name in ("ours", "peer") if name == "ours" or compiled])


def compare(arguments: argparse.Namespace, names: list[str]) -> None:
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            results[name].append(run_child(arguments, name))
    hashes = {json.dumps(result["sha256"]) for runs in results.values() for result in runs}
    if len(hashes) != 1:
        sys.exit("the indices differ")
    tokens = arguments.documents * arguments.mean
    samples = results["ours"][0]["samples"]
    print(f"{processor_name()}, {os.cpu_count()} cores")
    print(f"{arguments.documents:,} documents, about {tokens:,} tokens, {samples:,} samples")
    print(f"a blend of {arguments.blend:,} samples; medians of {arguments.rounds} runs")
    if "peer" in names:
        print("every array is identical to the peer's\n")
    stages = list(results["ours"][0]["seconds"])
    medians = {
        name: {s: statistics.median(r["seconds"][s] for r in runs) for s in stages}
        for name, runs in results.items()
    }
    print("| stage | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for stage in stages:
        print(f"| {stage} | " + " | ".join(f"{medians[n][stage]:.2f} s" for n in names) + " |")
    totals = {name: sum(medians[name].values()) for name in names}
    print("| all | " + " | ".join(f"{totals[n]:.2f} s" for n in names) + " |")
    memory = {name: statistics.median(r["megabytes"] for r in results[name]) for name in names}
    print("| resident above imports | " + " | ".join(f"{memory[n]:.0f} MB" for n in names) + " |")
    if "peer" in names:
        print(f"\nours / peer: {totals['ours'] / totals['peer']:.2f} in time, ", end="")
        print(f"{memory['ours'] / memory['peer']:.2f} in memory")
    first = run_child(arguments, "open")
    again = [run_child(arguments, "open") for _ in range(arguments.rounds)]
    print(f"\nopened as a run opens it, built and stored: {first['open']:.2f} s")
    for what, name in (("open", "found in the cache"), ("fingerprint", "of which content hash")):
        print(f"{name}: {1000 * statistics.median(r[what] for r in again):.0f} ms")


def run_child(arguments: argparse.Namespace, child: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", child, "--dir", str(arguments.dir)]
    for name in ("documents", "mean", "seq_len", "blend"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# -- what the children do -------------------------------------------------------------------------


class Stages:
    """Seconds and hashes by stage; the hashing is not timed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.sha256: dict[str, str] = {}
        self.arrays: dict[str, np.ndarray] = {}  # all are held, as they are until written
        self._resident = peak_megabytes()

    def run(self, name: str, *parts: str, work: Callable[[], Sequence[np.ndarray]]) -> None:
        start = time.perf_counter()
        arrays = work()
        self.seconds[name] = time.perf_counter() - start
        for part, array in zip(parts or [name], arrays, strict=True):
            self.arrays[part] = array
            self.sha256[part] = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()

    def result(self, samples: int) -> dict[str, Any]:
        megabytes = peak_megabytes() - self._resident
        return {
            "seconds": self.seconds,
            "sha256": self.sha256,
            "megabytes": megabytes,
            "samples": samples,
        }


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    from fourfold.data.index import (
        build_document_index,
        build_sample_index,
        build_shuffle_index,
        plan_indices,
    )
    from fourfold.data.mixture import blend_index, normalised

    stages, sizes = Stages(), read_sizes(arguments)
    plan = plan_for(arguments, sizes, plan_indices)
    rng, ranges = np.random.RandomState(SEED), [(0, len(sizes))]
    shares = normalised(WEIGHTS)
    stages.run(
        "document shuffle", work=lambda: [build_document_index(ranges, plan, rng, shuffled=True)]
    )
    documents = stages.arrays["document shuffle"]
    stages.run("sample index", work=lambda: [build_sample_index(sizes, documents, plan)])
    stages.run("sample shuffle", work=lambda: [build_shuffle_index(plan, rng)])
    stages.run("blend", *PARTS, work=lambda: list(blend_index(shares, arguments.blend).values()))
    return stages.result(plan.num_samples)


def peer(arguments: argparse.Namespace) -> dict[str, Any]:
    from fourfold.data.index import plan_indices

    loops = ctypes.CDLL(str(arguments.dir / "peer.so"))
    stages, sizes = Stages(), np.require(read_sizes(arguments), requirements="A")
    samples = plan_for(arguments, sizes, plan_indices).num_samples
    rng = np.random.RandomState(SEED)

    def shuffled(count: int, dtype: str) -> list[np.ndarray]:
        index = np.arange(count, dtype=dtype)
        rng.shuffle(index)
        return [index]

    def sample_index() -> list[np.ndarray]:
        documents = stages.arrays["document shuffle"]
        out = np.empty((samples + 1, 2), np.int32)
        counts = ctypes.c_int64(arguments.seq_len), ctypes.c_int64(samples)
        loops.sample_index(pointer(sizes), pointer(documents), *counts, pointer(out))
        return [out]

    def blend() -> list[np.ndarray]:
        weights = np.array(WEIGHTS)
        source = np.empty(arguments.blend, np.int16)
        number = np.empty(arguments.blend, np.int64)
        counts = np.zeros(len(weights), np.int64)
        size = ctypes.c_int32(len(weights)), ctypes.c_int64(arguments.blend)
        loops.blend(pointer(weights), *size, pointer(source), pointer(number), pointer(counts))
        return [source, number]

    stages.run("document shuffle", work=lambda: shuffled(len(sizes), "int32"))
    stages.run("sample index", work=sample_index)
    stages.run("sample shuffle", work=lambda: shuffled(samples, "uint32"))
    stages.run("blend", *PARTS, work=blend)
    return stages.result(samples)


def open_samples(arguments: argparse.Namespace) -> dict[str, Any]:
    from fourfold.data import Samples, SampleSpec, open_datasets

    sources = open_datasets(arguments.dir / "tokens")
    samples = int(arguments.documents * arguments.mean / arguments.seq_len * 0.9)
    start = time.perf_counter()
    _ = sources[0].fingerprint
    fingerprint = time.perf_counter() - start
    cache_dir = arguments.dir / "cache"
    Samples.open(
        sources, SampleSpec("1", "train", arguments.seq_len, SEED, cache_dir=cache_dir), samples
    )
    return {"open": time.perf_counter() - start, "fingerprint": fingerprint}


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "ours": ours,
    "peer": peer,
    "open": open_samples,
}


def plan_for(arguments: argparse.Namespace, sizes: np.ndarray, plan_indices: Any) -> Any:
    tokens = int(sizes.sum(dtype=np.int64))
    return plan_indices(len(sizes), tokens, arguments.seq_len, (tokens - 1) // arguments.seq_len)


def read_sizes(arguments: argparse.Namespace) -> np.ndarray:
    from fourfold.data import open_datasets

    return open_datasets(arguments.dir / "tokens")[0].sizes


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def peak_megabytes() -> float:
    """The most this process has held; getrusage would begin with what its parent held."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


# -- before them ----------------------------------------------------------------------------------


def write_tokens(arguments: argparse.Namespace) -> None:
    """An .idx with documents of 1 to twice the mean; a .bin of zeros that takes no room."""
    count = arguments.documents
    sizes = np.random.default_rng(0).integers(1, 2 * arguments.mean, count, dtype=np.int32)
    ends = np.cumsum(sizes, dtype=np.int64) * 2
    with open(arguments.dir / "tokens.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        file.write(sizes.data)
        file.write((ends - 2 * sizes).data)
        file.write(np.arange(count + 1, dtype=np.int64).data)
    with open(arguments.dir / "tokens.bin", "wb") as file:
        file.truncate(int(ends[-1]))


def compile_peer(directory: Path) -> bool:
    if shutil.which("g++") is None:
        print("no g++ here: the peer is left out")
        return False
    source = directory / "peer.cpp"
    source.write_text(CPP)
    command = ["g++", "-O3", "-shared", "-fPIC", "-std=c++17", str(source), "-o"]
    subprocess.run([*command, str(directory / "peer.so")], check=True)
    return True


if __name__ == "__main__":
    main()
