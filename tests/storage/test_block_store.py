"""The block cache: any reads are the file's bytes, whatever happened to what was kept."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from helpers.bucket import forked
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import storage
from fourfold.storage import blocks
from fourfold.storage.blocks import BlockCache, BlockedFile

CONTENT = random.Random(0).randbytes(10_000)


class Source:
    """Bytes elsewhere, and how often they were asked for."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content, self.requests = content, 0

    def fetch(self, begin: int, end: int) -> bytes:
        self.requests += 1
        return self.content[begin:end]


def opened(directory: Path, source: Source, limit: int = 1 << 30, mark: str = "m") -> BlockedFile:
    cache = BlockCache(directory, limit)
    return BlockedFile("s3://b/x", mark, len(source.content), cache, source.fetch)


SPANS = st.lists(
    st.tuples(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT))).map(sorted), max_size=20
)
HARM = st.sampled_from(["none", "cut", "flip", "grow", "swap", "empty"])


def harm(directory: Path, kind: str, chance: random.Random) -> None:
    files = sorted(path for path in directory.glob("*/*") if path.is_file())
    if not files or kind == "none":
        return
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    if not data:
        return
    if kind == "cut":
        data = data[: chance.randrange(len(data))]
    elif kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "grow":
        data += b"more"
    elif kind == "swap":
        data = bytearray(chance.choice(files).read_bytes())
    else:
        data = bytearray()
    path.write_bytes(data)


@settings(max_examples=60, deadline=None)
@given(
    spans=SPANS,
    harms=st.lists(HARM, min_size=20, max_size=20),
    block=st.integers(1, 3000),
    limit=st.sampled_from([1, 3000, 1 << 30]),
    seed=st.integers(0, 1000),
)
def test_any_reads_are_the_files_bytes(
    spans: list[list[int]],
    harms: list[str],
    block: int,
    limit: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("blocks") / "blocks"
    source, chance = Source(), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", max(block, 200))
        patch.setattr(blocks, "BLOCKS_IN_MEMORY", 1)
        for (start, stop), kind in zip(spans, harms):
            harm(directory, kind, chance)
            # A process that opens it anew, or goes on.
            file = opened(directory, source, limit)
            assert file.read(start, stop) == CONTENT[start:stop]


def test_what_is_kept_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    source = Source()
    for _ in range(3):
        assert opened(tmp_path / "b", source).read(500, 2500) == CONTENT[500:2500]
    assert source.requests == 3
    # Another content under the same address has blocks of its own.
    other = Source(CONTENT[::-1])
    assert opened(tmp_path / "b", other, mark="n").read(0, 10) == CONTENT[::-1][:10]


def test_the_limit_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    source, limit = Source(), 3000
    file = opened(tmp_path / "b", source, limit)
    for start in range(0, 10_000, 100):
        file.read(start, start + 100)
        held = sum(path.stat().st_size for path in (tmp_path / "b").glob("*/*"))
        assert held <= limit + 132
    assert held > limit / 2


def test_a_full_disk_or_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("no directory")
    source = Source()
    assert opened(tmp_path / "b", source).read(10, 20) == CONTENT[10:20]
    assert opened(tmp_path / "b", source).read(10, 20) == CONTENT[10:20]
    assert source.requests == 2


def test_short_answers_are_no_bytes(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "b")
    file = BlockedFile("s3://b/x", "m", 100, cache, lambda begin, end: b"few")
    with pytest.raises(storage.StorageError, match="3 of 100 bytes arrived"):
        file.read(0, 10)


def test_ranks_read_harmed_blocks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes read at random while a fifth cuts, changes and removes what is kept."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500)
    monkeypatch.setattr(blocks, "BLOCKS_IN_MEMORY", 2)
    directory = tmp_path / "b"

    def read(seed: int) -> None:
        chance, file = random.Random(seed), opened(directory, Source(), limit=5000)
        for _ in range(300):
            start = chance.randrange(len(CONTENT))
            stop = min(len(CONTENT), start + chance.randrange(1500))
            assert file.read(start, stop) == CONTENT[start:stop]

    def destroy() -> None:
        chance = random.Random(9)
        for _ in range(300):
            try:
                harm(directory, chance.choice(["cut", "flip", "swap", "empty"]), chance)
            except OSError:
                continue

    children = [forked(lambda seed=seed: read(seed)) for seed in range(4)] + [forked(destroy)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 5


def test_a_file_of_a_bucket_is_read_in_blocks(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    storage.write(f"{address}/x.bin", CONTENT)
    face = storage.local_path(address)
    storage.refresh(face, lambda name: False)
    file = storage.open_blocks(face / "x.bin")
    assert file.size == len(CONTENT)
    assert file.read(123, 9876) == CONTENT[123:9876]
    assert not (face / "x.bin").exists()
