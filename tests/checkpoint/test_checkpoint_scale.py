"""What a checkpoint costs beside its tensors: nothing that grows with ranks times tensors."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_ranks import on_all, rank_groups, rows_of, save_rows
from helpers.checkpoint_samples import blank, same_bits, sample, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import checkpoint
from fourfold.checkpoint import RankGroup, Shard, directory, index, manifest, reading
from fourfold.checkpoint.index import Cut
from fourfold.errors import CheckpointError
from fourfold.shards import Box

LAYERS = {f"model.layers.{i}.weight": torch.randn(8, 6) for i in range(40)}


def index_of(step: Path, group: str = "model") -> dict:
    return json.loads((step / f"index-{group}.json").read_text())


def test_tensors_that_are_cut_alike_share_one_grid(tmp_path: Path) -> None:
    save_rows(tmp_path, 1, LAYERS, {}, size=4)
    (cut,) = index_of(tmp_path / "step_1")["cuts"]
    assert cut["grid"] == [[0, 2, 4, 6], [0]] and cut["files"] == [0, 1, 2, 3]


def test_a_cut_in_two_dimensions_is_a_grid_too(tmp_path: Path) -> None:
    """As model parallelism over columns and sharding over rows leave it."""

    def quarters(ranks: RankGroup) -> dict[str, Shard]:
        row, column = divmod(ranks.rank, 2)
        return {
            name: Shard(tensor[4 * row :][:4, 3 * column :][:, :3], (8, 6), (4 * row, 3 * column))
            for name, tensor in LAYERS.items()
        }

    on_all(
        rank_groups(4), lambda ranks: checkpoint.save(tmp_path, 1, quarters(ranks), {}, ranks=ranks)
    )
    (cut,) = index_of(tmp_path / "step_1")["cuts"]
    assert cut["grid"] == [[0, 4], [0, 3]] and cut["files"] == [0, 1, 2, 3]
    into = blank(LAYERS)
    checkpoint.load(tmp_path / "step_1", into)
    assert same_bits(into, LAYERS)


def test_rank_0_reads_a_table_that_many_ranks_share_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = index._parse_table, []

    def counted(data: bytes, digest: str, path: Path) -> object:
        read.append(path.name)
        return real(data, digest, path)

    monkeypatch.setattr(index, "_parse_table", counted)
    save_rows(tmp_path, 1, LAYERS, {}, size=8)
    assert len(read) == 1


def test_which_checkpoints_there_are_is_known_without_any_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_rows(tmp_path, step, sample(step), state_of(step), size=2)
    monkeypatch.setattr(manifest, "_read_index", lambda *given: pytest.fail("an index was read"))
    assert [entry.step for entry in directory.history(tmp_path)] == [2, 1]
    assert checkpoint.read_state(tmp_path / "step_2") == state_of(2)


def test_which_checkpoints_there_are_is_known_without_parsing_manifests_of_version_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    golden = Path(__file__).parent / "golden_v2"
    monkeypatch.setattr(manifest, "read_legacy", lambda *given: pytest.fail("it was parsed"))
    # Both are the first save of their run.
    assert {entry.step: entry.serial for entry in directory.history(golden)} == {7: 1, 2: 1}


def test_whoever_wants_the_weights_reads_no_other_index(tmp_path: Path) -> None:
    tensors = sample(5)
    step = checkpoint.save(tmp_path, 5, tensors, state_of(5))
    (step / "index-optim.json").unlink()
    weights = {name: t for name, t in tensors.items() if name.startswith("model.")}
    into = blank(weights)
    assert checkpoint.load(step, into, prefix="model.") == state_of(5)
    assert same_bits(into, weights)


def test_each_file_is_hashed_once_by_a_rank_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what was read from the disk to be hashed is then read from memory."""
    save_rows(tmp_path, 1, LAYERS, {}, size=4)
    real, hashed = reading.file_problems, []

    def watched(place: Path, known: object, files: list[str], *rest: object) -> list[str]:
        hashed.append(files)
        return real(place, known, files, *rest)

    monkeypatch.setattr(reading, "file_problems", watched)
    into = blank(LAYERS)

    def load(ranks: RankGroup) -> list[str]:
        pieces = rows_of(into, ranks)
        checkpoint.load(tmp_path / "step_1", pieces, ranks=ranks)
        return sorted(reading.parts_by_file(reading.read_manifest(tmp_path / "step_1"), pieces))

    read = on_all(rank_groups(4), load)
    assert same_bits(into, LAYERS)
    assert sorted(hashed) == sorted(read) and all(len(files) == 1 for files in read)


def test_hashes_can_be_left_out_but_sizes_and_headers_cannot(tmp_path: Path) -> None:
    step = checkpoint.save(tmp_path, 5, sample(5), state_of(5))
    path = step / "model-00001-of-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    into = blank(sample(5))
    with pytest.raises(CheckpointError, match="is corrupted"):
        checkpoint.load(step, into)
    assert checkpoint.load(step, into, hashes=False) == state_of(5)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="bytes and should have"):
        checkpoint.load(step, into, hashes=False)


def grids(shape: tuple[int, ...]) -> st.SearchStrategy[list[list[int]]]:
    """Where the cells of a grid over `shape` begin, in each dimension."""
    borders = (st.sets(st.integers(0, size - 1), max_size=4) for size in shape)
    return st.tuples(*borders).map(lambda sets: [sorted({0, *inner}) for inner in sets])


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(1, 9), max_size=3).map(tuple))
def test_what_a_grid_says_overlaps_is_what_overlaps(data: st.DataObject, shape) -> None:
    grid = data.draw(grids(shape))
    ends = [[*starts[1:], size] for starts, size in zip(grid, shape, strict=True)]
    cells = [Box((), ())]
    for starts, stops in zip(grid, ends, strict=True):
        cells = [
            Box((*box.offsets, a), (*box.shape, b - a))
            for box in cells
            for a, b in zip(starts, stops, strict=True)
        ]
    filed = [(box, f"file{number}") for number, box in enumerate(cells)]
    random.Random(0).shuffle(filed)
    cut = Cut.of(shape, "float32", filed)
    assert cut.grid is not None and sorted(cut.cells()) == sorted(filed)
    begin = [data.draw(st.integers(0, size)) for size in shape]
    wanted = Box(
        tuple(begin),
        tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, begin, strict=True)),
    )
    expected = [cell for cell in filed if cell[0].overlap(wanted) is not None]
    assert sorted(cut.overlapping(wanted)) == sorted(expected)
