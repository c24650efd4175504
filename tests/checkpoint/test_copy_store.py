"""What a machine holds of copies in memory: listed, verified and removed, whatever lies there."""

from __future__ import annotations

import json
import random
import stat
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.mutate import mutate
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.checkpoint import copy_store
from fourfold.checkpoint.bounded import HASH, digest_of
from fourfold.checkpoint.copy_store import (
    CopyOf,
    CopyStore,
    listed_files,
    new_timeline,
    record_name,
)
from fourfold.checkpoint.neighbours import ring
from fourfold.checkpoint.tensor_files import sources_of
from fourfold.engine.memory_copies import RunTimeline, read_timeline
from fourfold.errors import CheckpointError
from fourfold.shards import as_shards

COPY = CopyOf("0123456789abcdef", 7)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CopyStore:
    monkeypatch.setattr(copy_store, "MEMORY", tmp_path)
    made = CopyStore(tmp_path / "run")
    made.open()
    return made


def write(store: CopyStore, copy: CopyOf = COPY, rank: int = 0, ranks: int = 2) -> bytes:
    tensors = {"model.w": torch.arange(60.0), "optim.w.exp_avg": torch.ones(60)}
    shards = as_shards(tensors)
    return store.write(copy, (rank, ranks), shards, sources_of(shards), b"{}", lambda: None)


def problem(store: CopyStore, rank: int = 0) -> str | None:
    name = next(path.name for path in store.place(COPY).glob(f"rank{rank:05d}-of-*.json"))
    return store.problem(COPY, name, rank, lambda: None)


def test_what_is_written_is_held_and_sound(store: CopyStore) -> None:
    assert store.held() == {} and store.newest_step() is None
    write(store)
    write(store, rank=1)
    write(store, CopyOf(COPY.timeline, 5))
    assert {copy: set(parts.records) for copy, parts in store.held().items()} == {
        COPY: {0, 1},
        CopyOf(COPY.timeline, 5): {0},
    }
    assert store.newest_step() == 7
    assert problem(store) is None and problem(store, 1) is None
    assert store.used_bytes() > 4 * 60 * 4
    for path in (store.root, store.place(COPY)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_only_what_is_named_is_kept(store: CopyStore) -> None:
    others = [CopyOf(COPY.timeline, 6), CopyOf(new_timeline(), 7)]
    for copy in (COPY, *others):
        write(store, copy)
    (store.root / "whole").mkdir()
    (store.root / "stray").write_text("")
    store.keep([COPY])
    assert [*store.held()] == [COPY] and [path.name for path in store.root.iterdir()] == [
        COPY.timeline
    ]
    store.remove()
    assert not store.is_there
    store.remove()


def test_damaged_files_and_records_are_found(store: CopyStore) -> None:
    """Every byte counts."""
    write(store)
    rng = random.Random(5)
    for path in sorted(store.place(COPY).iterdir()):
        good = path.read_bytes()
        for _ in range(40):
            bad = mutate(good, rng)
            path.write_bytes(bad)
            if path.suffix == ".json" and path.name != "state.json":
                assert bad == good or COPY not in store.held()
                problem(store)  # says something or nothing, but does not raise
            else:
                assert bad == good or problem(store), f"{path.name} differs"
        path.write_bytes(good)
    assert problem(store) is None


@given(data=st.binary(max_size=300))
def test_any_bytes_for_a_record(data: bytes) -> None:
    try:
        files = listed_files(data, Path("rank00000-of-00001.json"), 0)
    except CheckpointError:
        return
    assert all("/" not in file for file in files)


@pytest.mark.parametrize(
    "file", ["../../x", "/etc/x", "model-rank00001-00001-of-00001.safetensors"]
)
def test_a_record_names_files_of_its_own_rank_only(store: CopyStore, file: str) -> None:
    record = write(store)
    name = "model-rank00000-00001-of-00001.safetensors"
    with pytest.raises(CheckpointError):
        listed_files(record.replace(name.encode(), file.encode()), Path("r"), 0)
    assert name in listed_files(record, Path("r"), 0)


def test_strange_names_are_no_copies(store: CopyStore) -> None:
    for name in ("step_7", "0123456789abcdeg/step_7", f"{COPY.timeline}/step_07", "whole/step_1"):
        place = store.root / name
        place.mkdir(parents=True)
        name = record_name(0, 1, digest_of(b"{}", HASH))
        (place / name).write_text("{}")
    (store.root / COPY.timeline / "step_8").write_text("a file")
    assert store.held() == {}
    (store.root / COPY.timeline / "step_07").rename(store.place(COPY))
    assert [*store.held()] == [COPY]


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(sizes=sizes)
def test_every_rank_sends_to_the_next_machine(sizes: list[int]) -> None:
    borders = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    machines = [[*range(a, b)] for a, b in pairwise(borders)]
    of_rank = {rank: number for number, ranks in enumerate(machines) for rank in ranks}
    sends = ring(machines)
    if len(machines) == 1:
        assert not sends
        return
    assert [sender for sender, _ in sends] == [*of_rank]
    for sender, taker in sends:
        assert of_rank[taker] == (of_rank[sender] + 1) % len(machines)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(value=json_values, text=st.binary(max_size=60))
def test_any_bytes_for_a_timeline(value: object, text: bytes) -> None:
    read_timeline(text)
    read_timeline(json.dumps(value).encode())
    for key in ("timeline", "origin", "settings"):
        good = {"timeline": COPY.timeline, "origin": [*COPY], "settings": {"a": "1"}}
        found = read_timeline(json.dumps({**good, key: value}).encode())
        assert found is None or found.timeline == COPY.timeline


def test_which_copies_count() -> None:
    line = RunTimeline("f" * 16, COPY, {"Model.num_layers": "2"})
    assert read_timeline(line.encode().encode()) == line
    assert line.counts(COPY) and line.counts(CopyOf("f" * 16, 99))
    assert not line.counts(CopyOf(COPY.timeline, 8)) and not line.counts(CopyOf("e" * 16, 7))
    assert read_timeline(RunTimeline("../..", None, {}).encode().encode()) is None
