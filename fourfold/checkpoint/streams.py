"""Streams: the bytes of a file to the disk and back, hashed on their way, at the disk's own rate.

A file passes through in chunks, and a thread of its own does what comes first for the next chunk
while this one is dealt with: copying and hashing before writing, reading before hashing. Several
files are under way at once.

Files are written past the page cache (`O_DIRECT`) where the file system can: a checkpoint is not
read again soon, pages for it would be taken from the run, and filling them costs more than a fast
disk does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fourfold.checkpoint.bounded import HASH, FileRecord, Hasher, new_hasher
from fourfold.checkpoint.rendezvous import Beat, silent

# Of one rank. What they do leaves the interpreter lock free: hashing, writing, reading.
THREADS = 4
CHUNK_BYTES = 1 << 20
BEAT_SECONDS = 0.5
# One is filled, one waits, one is used.
CHUNKS_IN_FLIGHT = 3
# Of a direct write: its length and its place in the file. No device has larger blocks.
BLOCK_BYTES = 4096

Bytes = npt.NDArray[np.uint8]
Item = TypeVar("Item")
Result = TypeVar("Result")


# --- several files at once --------------------------------------------------------------------


class Abandoned(Exception):
    """Another thread failed, so this one need not finish."""


def in_threads(
    work: Callable[[Item, Beat], Result], items: Iterable[Item], beat: Beat
) -> list[Result]:
    """`work(item, progress)` of every item, on a few threads; the first error ends them all.

    The work calls `progress` every few megabytes, and this thread then beats. The threads do not
    keep the process alive.
    """
    waiting = list(enumerate(items))[::-1]
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    abandoned, moved = threading.Event(), threading.Event()

    def progress() -> None:
        if abandoned.is_set():
            raise Abandoned
        moved.set()

    def run() -> None:
        try:
            while True:
                try:
                    number, item = waiting.pop()
                except IndexError:
                    return
                progress()
                results[number] = work(item, progress)
        except Abandoned:
            return
        except BaseException as error:
            errors.append(error)
            abandoned.set()

    threads = [
        threading.Thread(target=run, name=f"checkpoint-{number}", daemon=True)
        for number in range(min(THREADS, len(waiting)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(BEAT_SECONDS)
                if moved.is_set():
                    moved.clear()
                    beat()
    except BaseException:
        abandoned.set()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(results))]


def one_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The same items, each made in another thread while the one before is used.

    To be closed: whoever stops early would leave the thread waiting.
    """
    made: Queue[tuple[Item | None, BaseException | None]] = Queue(CHUNKS_IN_FLIGHT - 2)
    stopped = threading.Event()

    def put(item: Item | None, error: BaseException | None = None) -> None:
        made.put((item, error))
        if stopped.is_set():
            raise Abandoned

    def run() -> None:
        with suppress(Abandoned):
            try:
                for item in items:
                    put(item)
                put(None)
            except Exception as error:
                if not isinstance(error, Abandoned):
                    put(None, error)

    thread = threading.Thread(target=run, name="checkpoint-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        while thread.is_alive():
            with suppress(Empty):
                made.get_nowait()
            thread.join(0.01)


def _chunks() -> Iterator[Bytes]:
    """Buffers for chunks, in turns, on page borders as direct writes need them."""
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(CHUNKS_IN_FLIGHT)]
    arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    while True:
        yield from arrays


# --- to the disk ------------------------------------------------------------------------------


class Outgoing:
    """The bytes of a tensor that is to be saved, in order and once.

    It may be left where it is until it is needed or `settle` is called, whichever is first: then
    what is left of it is copied, so that the tensor can change.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = tensor.nbytes
        self._tensor: Tensor | None = tensor.detach()
        self._bytes: Bytes | None = None
        self._taken = 0
        self._lock = threading.Lock()

    def fill(self, into: Bytes) -> None:
        """The next bytes of it."""
        with self._lock:
            held = self._all_bytes()
            stop = self._taken + len(into)
            into[:] = held[self._taken : stop]
            self._taken = stop
            if stop == self.nbytes:
                self._tensor = self._bytes = None

    def settle(self) -> None:
        with self._lock:
            if self._tensor is not None:
                self._tensor, self._bytes = self._tensor.to("cpu", copy=True), None

    def _all_bytes(self) -> Bytes:
        if self._bytes is None:
            assert self._tensor is not None
            flat = self._tensor.cpu().contiguous().reshape(-1)
            self._bytes = flat.view(torch.uint8).numpy()
        return self._bytes


def write_hashed(
    path: Path, beginning: bytes, sources: Iterable[Outgoing], beat: Beat = silent
) -> FileRecord:
    """A file of `beginning` and then the sources, synced when this returns."""
    hasher, size = new_hasher(HASH), 0
    descriptor, is_direct = _open_new(path)
    try:
        with closing(one_ahead(_filled(beginning, sources, hasher))) as filled:
            for chunk, length in filled:
                is_direct = _write(descriptor, chunk, length, size, is_direct)
                size += length
                beat()
        if is_direct:
            os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beat()
    return FileRecord(bytes=size, digest=hasher.hexdigest())


def _filled(
    beginning: bytes, sources: Iterable[Outgoing], hasher: Hasher
) -> Iterator[tuple[Bytes, int]]:
    """Chunks, all but the last full, and how many bytes of them count; hashed."""
    chunks = _chunks()
    chunk, used = next(chunks), 0
    for source in [Outgoing(torch.frombuffer(bytearray(beginning), dtype=torch.uint8)), *sources]:
        left = source.nbytes
        while left:
            count = min(left, CHUNK_BYTES - used)
            source.fill(chunk[used : used + count])
            left, used = left - count, used + count
            if used == CHUNK_BYTES:
                hasher.update(chunk.data)
                yield chunk, used
                chunk, used = next(chunks), 0
    if used:
        hasher.update(chunk[:used].data)
        yield chunk, used


def _open_new(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether what is written to it goes past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):
            return os.open(path, flags | direct, 0o666), True
    return os.open(path, flags, 0o666), False


def _write(descriptor: int, chunk: Bytes, length: int, start: int, is_direct: bool) -> bool:
    """Write `length` bytes at `start`, the last ones of a file with what follows them up to a whole
    block; returns whether this file can still be written directly."""
    if is_direct:
        try:
            _write_all(descriptor, chunk[: length + -length % BLOCK_BYTES], start)
            return True
        except OSError as error:
            # A file system may accept the flag and refuse its use.
            if error.errno != errno.EINVAL:
                raise
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    _write_all(descriptor, chunk[:length], start)
    return False


def _write_all(descriptor: int, content: Bytes, start: int) -> None:
    while len(content):
        count = os.pwrite(descriptor, content.data, start)
        content, start = content[count:], start + count


# --- from the disk ----------------------------------------------------------------------------


class Incoming:
    """Where bytes `begin` to `end` of a file belong: the memory of a contiguous tensor."""

    def __init__(self, begin: int, tensor: Tensor) -> None:
        self.begin, self.end = begin, begin + tensor.nbytes
        self.into: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()

    def take(self, chunk: Bytes, start: int) -> None:
        """What `chunk`, which is at `start` of the file, has of it."""
        first, last = max(self.begin, start), min(self.end, start + len(chunk))
        if first < last:
            self.into[first - self.begin : last - self.begin] = chunk[first - start : last - start]


def read_hashed(
    descriptor: int, hasher: Hasher, targets: Iterable[Incoming] = (), beat: Beat = silent
) -> None:
    """Hash a file from its beginning to its end, and fill `targets` from it on the way."""
    waiting = sorted(targets, key=lambda target: target.begin, reverse=True)
    under_way: list[Incoming] = []
    start = 0
    with closing(one_ahead(_read(descriptor))) as chunks:
        for chunk, length in chunks:
            hasher.update(chunk[:length].data)
            while waiting and waiting[-1].begin < start + length:
                under_way.append(waiting.pop())
            for target in under_way:
                target.take(chunk[:length], start)
            start += length
            under_way = [target for target in under_way if target.end > start]
            beat()


def _read(descriptor: int) -> Iterator[tuple[Bytes, int]]:
    start = 0
    for chunk in _chunks():
        count = os.preadv(descriptor, [chunk.data], start)
        if count == 0:
            return
        start += count
        yield chunk, count
