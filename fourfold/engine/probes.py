"""Probes: what this rank measures of its processor or GPU, its disk, its memory and a link.

Each takes milliseconds and returns its best of several tries: whatever else runs on a machine makes
a try slower, never faster. Who is slow is decided elsewhere, by comparing ranks (`preflight.py`).
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import fourfold
from fourfold import heartbeat
from fourfold.engine.agreement import library_versions, source_hash
from fourfold.processors import num_processors

# One product takes a few milliseconds on a core, and tens of microseconds on a GPU.
CPU_SIDE, GPU_SIDE = 384, 4096
GPU_PRODUCTS = 4  # one after the other, so that starting them does not count
SMALLEST_MESSAGE, LONG_ENOUGH = 1 << 16, 0.03
DISK_BLOCK = 1 << 20
SMALL_SYNCS = 3
LONG_WRITE_SECONDS = 1.0


# -- computing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComputeRate:
    """Of products of matrices."""

    flops: float  # per second, in the best stretch
    cpu_flops: float  # per second that a processor worked for us; 0 on a GPU


def compute_rate(device: torch.device, seconds: float, stretches: int = 4) -> ComputeRate:
    """The best of several stretches of `seconds`. A stretch is long against the slices of time a
    scheduler deals out, so that a shared processor shows in it."""
    side = CPU_SIDE if device.type == "cpu" else GPU_SIDE
    left = torch.ones(side, side, device=device)
    right, out = torch.ones_like(left), torch.empty_like(left)
    work = 2.0 * side**3
    if device.type != "cpu":
        times = [_gpu_seconds(left, right, out) for _ in range(2 * stretches)]
        return ComputeRate(GPU_PRODUCTS * work / min(times), 0.0)
    threads = torch.get_num_threads()
    torch.mm(left, right, out=out)
    best = best_cpu = 0.0
    for _ in range(stretches):
        count, began, began_cpu = 0, time.perf_counter(), time.process_time()
        while (wall := time.perf_counter() - began) < seconds:
            torch.mm(left, right, out=out)
            count += 1
        used = max(time.process_time() - began_cpu, 1e-9) / threads
        best, best_cpu = max(best, count * work / wall), max(best_cpu, count * work / used)
    return ComputeRate(best, best_cpu)


def _gpu_seconds(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(GPU_PRODUCTS):
        torch.mm(left, right, out=out)
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


class GpuProbe:
    """Products of fixed size between two events, queued at one log and read at the next: a GPU that
    lost its clock shows, whatever the layout waits for, and the host waits for nothing.

    The step itself would not do: collectives of tensor, pipeline and sharded layouts are inside it,
    so that every rank is as slow as the slowest.
    """

    def __init__(self, device: torch.device) -> None:
        self._left = torch.ones(GPU_SIDE // 4, GPU_SIDE // 4, device=device)
        self._right, self._out = torch.ones_like(self._left), torch.empty_like(self._left)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def last_seconds(self) -> float:
        """Of the products queued at the last call; 0 at the first."""
        took = [began.elapsed_time(ended) / 1e3 for began, ended in self._events if ended.query()]
        self._events = []
        for _ in range(GPU_PRODUCTS):
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            began.record()
            torch.mm(self._left, self._right, out=self._out)
            ended.record()
            self._events.append((began, ended))
        return min(took, default=0.0)


def queued_seconds() -> float:
    """How long this thread was ready to run and had no processor, since it began; 0 where the
    kernel does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


# -- what a rank is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFacts:
    """What needs no measuring."""

    nice: int
    processors: float  # this process may use, by affinity and quota
    threads: int
    device: str
    versions: dict[str, str]
    memory_bytes: int  # free on the machine
    shm_bytes: int  # size of /dev/shm


def rank_facts(device: torch.device) -> RankFacts:
    on_gpu = device.type != "cpu"
    return RankFacts(
        os.getpriority(os.PRIO_PROCESS, 0),
        min(float(num_processors()), _processor_quota()),
        torch.get_num_threads(),
        torch.cuda.get_device_name(device) if on_gpu else "CPU",
        _versions(on_gpu),
        free_memory(),
        _shm_bytes(),
    )


def _versions(on_gpu: bool) -> dict[str, str]:
    found = {
        "Python": platform.python_version(),
        "Fourfold": fourfold.__version__,
        "the code of Fourfold": source_hash(),
    } | library_versions()
    if on_gpu:
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["NCCL"] = str(torch.cuda.nccl.version())
    return found


def _processor_quota() -> float:
    """Of a control group, version 2 or 1; infinite where there is none."""
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(quota_file).read_text().split()
            words += Path(period_file).read_text().split() if period_file else []
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):
            continue
        if quota > 0 and period > 0:
            return quota / period
    return float("inf")


def free_memory() -> int:
    """Bytes this machine could still give to processes; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    words = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    return int(words.get("MemAvailable", 0)) * 1024


def _shm_bytes() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


# -- disk -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskRate:
    bytes_per_second: float  # written and synced
    sync_seconds: float  # of a file of one block


def disk_rate(directory: Path, size: int, tries: int = 2) -> DiskRate:
    """The best of several files of `size` bytes, and of small ones; raises OSError.

    A file is cut short once it takes long, so a slow disk costs little."""
    block = os.urandom(DISK_BLOCK)
    best = max(DISK_BLOCK / _seconds_a_block(directory, block, size) for _ in range(tries))
    small = min(_seconds_a_block(directory, block[:4096], 4096) for _ in range(SMALL_SYNCS))
    return DiskRate(best, small)


def _seconds_a_block(directory: Path, block: bytes, size: int) -> float:
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".preflight-") as file:
        start, written = time.perf_counter(), 0
        while written < size and time.perf_counter() - start < LONG_WRITE_SECONDS:
            file.write(block)
            written += len(block)
            heartbeat.alive()
        file.flush()
        os.fsync(file.fileno())
        return (time.perf_counter() - start) * len(block) / written


# -- a link ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkRate:
    """Between two ranks, as the first of them sees it."""

    latency_seconds: float  # one way, half of the best round trip
    sent_per_second: float  # bytes to the other
    received_per_second: float  # bytes from the other
    clock_offset_seconds: float  # by how much the other's clock is ahead
    clock_error_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return min(self.sent_per_second, self.received_per_second)


def link_rate(peer: int, leads: bool, device: torch.device, most_bytes: int) -> LinkRate | None:
    """Messages with `peer`, who calls this at the same time; the one that `leads` has the result.

    A message grows until it takes long enough to be timed, so a slow link costs little. It goes the
    way the run's own messages go: by NCCL between GPUs, by gloo between processors.
    """
    talk = Talk(peer, device)
    if not leads:
        talk.follow()
        return None
    pings = [talk.ping() for _ in range(6)]
    trip, offset = min(pings)
    sent, size = 0.0, SMALLEST_MESSAGE
    received = 0.0
    for way in ("send", "receive"):
        size, best = SMALLEST_MESSAGE, 0.0
        while True:
            took = min(talk.move(way, size) for _ in range(2))
            best = max(best, size / max(took - trip, 0.1 * took, 1e-9))
            if took > LONG_ENOUGH or size >= most_bytes:
                break
            size = min(4 * size, most_bytes)
        sent, received = (best, received) if way == "send" else (sent, best)
    talk.end()
    return LinkRate(trip / 2, sent, received, offset, trip / 2)


class Talk:
    """A conversation of two ranks; a word of two numbers says what comes next."""

    PING, SEND, RECEIVE, END = range(4)

    def __init__(self, peer: int, device: torch.device) -> None:
        self._peer = peer
        self._device = device
        self._word = torch.zeros(2, dtype=torch.float64, device=device)
        self._payload = torch.zeros(0, dtype=torch.uint8, device=device)

    def ping(self) -> tuple[float, float]:
        """Seconds of a round trip, and by how much the other's clock is ahead."""
        began, wall = time.perf_counter(), time.time()
        self._tell(self.PING, 0.0)
        _, theirs = self._hear()
        trip = time.perf_counter() - began
        return trip, theirs - (wall + trip / 2)

    def move(self, way: str, size: int) -> float:
        """Seconds to send or receive `size` bytes, with a word on the way back."""
        payload = self._of(size)
        began = time.perf_counter()
        if way == "send":
            self._tell(self.SEND, size)
            self._send(payload)
            self._hear()
        else:
            self._tell(self.RECEIVE, size)
            self._receive(payload)
            self._wait()
        return time.perf_counter() - began

    def end(self) -> None:
        self._tell(self.END, 0.0)

    def follow(self) -> None:
        """Answer until the other ends it."""
        answer: dict[int, Callable[[torch.Tensor], None]] = {
            self.SEND: self._receive,
            self.RECEIVE: self._send,
        }
        while (heard := self._hear())[0] != self.END:
            what, size = int(heard[0]), int(heard[1])
            if what in answer:
                answer[what](self._of(size))
            if what != self.RECEIVE:
                self._tell(what, time.time())
        self._wait()

    def _of(self, size: int) -> torch.Tensor:
        if self._payload.numel() < size:
            self._payload = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._payload[:size]

    def _tell(self, what: int, value: float) -> None:
        self._send(torch.tensor([what, value], dtype=torch.float64, device=self._device))

    def _hear(self) -> tuple[float, float]:
        self._receive(self._word)
        what, value = self._word.tolist()
        return what, value

    def _send(self, tensor: torch.Tensor) -> None:
        self._exchange(dist.P2POp(dist.isend, tensor, self._peer))

    def _receive(self, tensor: torch.Tensor) -> None:
        self._exchange(dist.P2POp(dist.irecv, tensor, self._peer))

    def _exchange(self, operation: dist.P2POp) -> None:
        # As a batch, which NCCL sends by the communicator there is, without one for each pair.
        heartbeat.alive()
        for each in dist.batch_isend_irecv([operation]):
            each.wait()

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
