"""Blocks: a large file at an address, read in pieces that are kept on this machine's disk.

The token files of a run are read at random and over and over. So what is asked of one is fetched in
blocks of `BLOCK_BYTES`, and each block kept as a file of its own, below the user's cache directory:

    blocks/KEY/NUMBER   the bytes, then their BLAKE3 digest, keyed by address, content and number

KEY is of the address and the mark of its content: of a file that changes there, other blocks are
read. A block that was cut short, changed or put under another name does not have its digest, and is
fetched again. A block is never changed once it has its name and is read whole, so all processes of
a machine use the directory at once, and may remove blocks from it at any time: when those together
are larger than the limit, the ones used least recently go.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from blake3 import blake3

from fourfold.storage import objects
from fourfold.storage.addresses import StorageError, address_of, cache_root

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 32
DEFAULT_LIMIT_BYTES = 20 << 30
# What a process keeps in memory, of all its files.
BLOCKS_IN_MEMORY = 64
# Requests of one read that are under way together: a store answers late, but many at once.
FETCHES = 8
LOCKS = 64
# After having written so much of the limit a process looks at what all have written.
LOOK_SHARE = 1 / 32
TRIMMED_SHARE = 7 / 8

FetchRange = Callable[[int, int], bytes]


class BlockCache:
    """A directory of blocks that processes share, within a limit of bytes."""

    def __init__(self, directory: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._memory: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._written = 0

    def block(self, key: str, number: int, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Block `number`, of `size` bytes, of the content `key`: from memory, disk, or `fetch`."""
        with self._lock:
            if (held := self._memory.get((key, number))) is not None:
                self._memory.move_to_end((key, number))
                return held
        path = self.directory / key / str(number)
        content = self._load(path, size)
        if content is None:
            with self._alone(path):
                # Another process may have fetched it while we waited.
                content = self._load(path, size)
                if content is None:
                    content = fetch()
                    if len(content) != size:
                        raise StorageError(f"{len(content)} of {size} bytes arrived")
                    self._store(path, content)
        with self._lock:
            self._memory[key, number] = content
            while len(self._memory) > BLOCKS_IN_MEMORY:
                self._memory.popitem(last=False)
        return content

    def _load(self, path: Path, size: int) -> bytes | None:
        """A block that is there and as it was written."""
        try:
            with path.open("rb") as stream:
                stored = stream.read(size + DIGEST_BYTES + 1)
            os.utime(path)  # used just now
        except OSError:
            return None
        content = stored[:size]
        return content if stored[size:] == _digest(path, content) else None

    def _store(self, path: Path, content: bytes) -> None:
        """Keep a block; on a full disk, or where nothing can be written, it is not kept."""
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not synced: what a crash leaves of it does not have its digest.
            aside.write_bytes(content + _digest(path, content))
            aside.replace(path)
            self._written += len(content) + DIGEST_BYTES
        except OSError:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            return
        if self._written > self.limit_bytes * LOOK_SHARE:
            self._written = 0
            self.trim()

    def trim(self) -> None:
        """Remove the blocks used least recently, if all together are beyond the limit."""
        found = []
        for path in self.directory.glob("*/*"):
            with suppress(OSError):
                known = path.stat()
                found.append((known.st_mtime_ns, known.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= self.limit_bytes * (1 - LOOK_SHARE):
            return
        for _, size, path in sorted(found):
            if total <= self.limit_bytes * TRIMMED_SHARE:
                return
            with suppress(OSError):
                path.unlink()
            total -= size

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """One process at a time for a block, where the file system has locks: the ranks of a
        model-parallel group want the same ones at the same moment."""
        place = self.directory.with_name(f"{self.directory.name}.locks")
        number = int(hashlib.sha256(str(path).encode()).hexdigest()[:8], 16) % LOCKS
        try:
            place.mkdir(parents=True, exist_ok=True)
            stream = (place / str(number)).open("a")
        except OSError:
            yield
            return
        with stream:
            with suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _digest(path: Path, content: bytes) -> bytes:
    """Of the content and of the name it is kept under."""
    return blake3(f"{path.parent.name}/{path.name}\0".encode() + content).digest()


class BlockedFile:
    """The bytes of a file that is elsewhere; `read` has any of them."""

    def __init__(self, name: str, mark: str, size: int, cache: BlockCache, fetch: FetchRange):
        self.name = name
        self.size = size
        self.cache = cache
        self._fetch = fetch
        self._key = hashlib.sha256(f"{name}\n{mark}\n{size}".encode()).hexdigest()[:32]

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start` to before `stop`."""
        assert 0 <= start <= stop <= self.size, (start, stop, self.size)
        if start == stop:
            return b""
        numbers = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)
        if len(numbers) == 1:
            blocks = [self._block(numbers[0])]
        else:
            with ThreadPoolExecutor(min(FETCHES, len(numbers))) as pool:
                blocks = list(pool.map(self._block, numbers))
        first = numbers[0] * BLOCK_BYTES
        return b"".join(blocks)[start - first : stop - first]

    def _block(self, number: int) -> bytes:
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.size)
        return self.cache.block(self._key, number, end - begin, lambda: self._fetch(begin, end))


_caches: dict[Path, BlockCache] = {}


def block_cache() -> BlockCache:
    """The one of this process."""
    directory = cache_root() / "blocks"
    return _caches.setdefault(directory, BlockCache(directory))


def limit_blocks(limit_bytes: int) -> None:
    """How much disk the blocks of all files may take on this machine."""
    block_cache().limit_bytes = limit_bytes


def open_blocks(path: Path) -> BlockedFile:
    """The file whose local face `path` is, as it was when its directory was last refreshed."""
    address, known = address_of(path), objects.status(path)
    assert address is not None and known is not None, path

    def fetch(begin: int, end: int) -> bytes:
        return objects.read(address, begin, end)

    return BlockedFile(address, known.mark, known.size, block_cache(), fetch)
