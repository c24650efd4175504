"""Streams: the bytes of a file to the disk and back, hashed on their way, at the disk's own rate.

A file passes through in chunks. Of one that is saved a thread copies and hashes the next chunks
while others write those before; of one that is loaded a thread reads the next chunk while another
hashes this one. Several files are under way at once.

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
from itertools import cycle
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fourfold.checkpoint.bounded import HASH, FileRecord, Hasher, new_hasher
from fourfold.checkpoint.rendezvous import Beat, silent

# Of one rank. What they do leaves the interpreter lock free: hashing, writing, reading.
THREADS = 4
BEAT_SECONDS = 0.5
# Of a direct write: with less a fast disk waits for the next one.
CHUNK_BYTES = 4 << 20
# Of each file that is written, and the chunks these and the thread that fills them share.
WRITERS = 2
CHUNKS_TO_WRITE = 6
READ_BYTES = 1 << 20
# One is filled, one waits, one is used.
CHUNKS_READ = 3
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
    made: Queue[tuple[Item | None, BaseException | None]] = Queue(CHUNKS_READ - 2)
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


def _chunks(number: int, size: int) -> list[Bytes]:
    """Buffers on page borders, as direct writes need them."""
    return [np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8) for _ in range(number)]


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
    descriptor = _open_new(path)
    try:
        with closing(_Writers(descriptor)) as writers:
            for chunk, length in _filled(beginning, sources, writers):
                hasher.update(chunk[:length].data)
                writers.put(chunk, length, size)
                size += length
                beat()
            writers.finish()
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beat()
    return FileRecord(bytes=size, digest=hasher.hexdigest())


def _filled(
    beginning: bytes, sources: Iterable[Outgoing], writers: _Writers
) -> Iterator[tuple[Bytes, int]]:
    """Chunks, all but the last full, and how many bytes of them count."""
    chunk, used = writers.free_chunk(), 0
    for source in [Outgoing(torch.frombuffer(bytearray(beginning), dtype=torch.uint8)), *sources]:
        left = source.nbytes
        while left:
            count = min(left, CHUNK_BYTES - used)
            source.fill(chunk[used : used + count])
            left, used = left - count, used + count
            if used == CHUNK_BYTES:
                yield chunk, used
                chunk, used = writers.free_chunk(), 0
    if used:
        yield chunk, used


class _Writers:
    """Threads that write the chunks of one file, each at its place, in any order.

    To be closed before the file is: nothing is written after that.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._free: SimpleQueue[Bytes] = SimpleQueue()
        self._full: SimpleQueue[tuple[Bytes, int, int] | None] = SimpleQueue()
        self._errors: list[BaseException] = []
        for chunk in _chunks(CHUNKS_TO_WRITE, CHUNK_BYTES):
            self._free.put(chunk)
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint-writer-{number}", daemon=True)
            for number in range(WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def free_chunk(self) -> Bytes:
        """One that is not waiting to be written; raises what went wrong with any before."""
        chunk = self._free.get()
        self._raise_error()
        return chunk

    def put(self, chunk: Bytes, length: int, start: int) -> None:
        """Write `length` bytes of it at `start`, and what follows them up to a whole block."""
        self._full.put((chunk, length, start))

    def finish(self) -> None:
        """Wait until everything is written."""
        for _ in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._raise_error()

    def close(self) -> None:
        if self._threads:
            self._errors.append(Abandoned())  # what is left need not be written
        with suppress(Exception):
            self.finish()

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        while (given := self._full.get()) is not None:
            chunk, length, start = given
            try:
                if not self._errors:
                    _write(self._descriptor, chunk[: length + -length % BLOCK_BYTES], start)
            except BaseException as error:
                self._errors.append(error)
            self._free.put(chunk)


def _open_new(path: Path) -> int:
    """A descriptor; what is written to it goes past the page cache, where that can be."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):
            return os.open(path, flags | direct, 0o666)
    return os.open(path, flags, 0o666)


def _write(descriptor: int, blocks: Bytes, start: int) -> None:
    try:
        _write_all(descriptor, blocks, start)
    except OSError as error:
        # A file system may accept the flag and refuse its use.
        if error.errno != errno.EINVAL:
            raise
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
        _write_all(descriptor, blocks, start)


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
    for chunk in cycle(_chunks(CHUNKS_READ, READ_BYTES)):
        count = os.preadv(descriptor, [chunk.data], start)
        if count == 0:
            return
        start += count
        yield chunk, count
