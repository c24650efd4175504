"""Tensors in pieces: saved under one cut, read under any other, merged to whole ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_ranks import cut, dealt, on_all, rank_groups, save_rows, tilings
from helpers.checkpoint_samples import blank, same_bits, sample, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import checkpoint
from fourfold.checkpoint import RankGroup, Shard, tensor_files
from fourfold.errors import CheckpointError
from fourfold.shards import Box, tiling_problem


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# --- any cut to any other ---------------------------------------------------------------------

SHAPES = {
    "model.vector": (7,),
    "model.matrix": (5, 6),
    "model.cube": (3, 4, 2),
    "optim.scalar": (),
    "optim.empty": (0, 3),
    "optim.thin": (1, 9),
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_saved_under_one_cut_it_loads_under_any_other(data, writers, readers, seed) -> None:
    torch.manual_seed(seed)
    tensors = {
        name: torch.randint(0, 2, shape).to(dtype)
        for (name, shape), dtype in zip(SHAPES.items(), DTYPES, strict=True)
    }
    given_ = data.draw(dealt(SHAPES, writers))
    asked = data.draw(dealt(SHAPES, readers))
    into = blank(tensors)

    def save(ranks: RankGroup) -> Path:
        pieces = {name: cut(tensors[name], box) for name, box in given_[ranks.rank].items()}
        return checkpoint.save(folder, 3, pieces, {"step": 3}, ranks=ranks)

    def load(ranks: RankGroup) -> dict[str, Any]:
        pieces = {name: cut(into[name], box) for name, box in asked[ranks.rank].items()}
        return checkpoint.load(directory, pieces, ranks=ranks)

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "step_3"
        assert on_all(rank_groups(writers), save) == [directory] * writers
        assert checkpoint.verify(directory) == []
        assert on_all(rank_groups(readers), load) == [{"step": 3}] * readers
        assert same_bits(into, tensors)
        whole = checkpoint.merge(directory, Path(folder) / "whole")
        merged = blank(tensors)
        assert checkpoint.load(whole, merged) == {"step": 3}
        assert same_bits(merged, tensors) and checkpoint.verify(whole) == []


def test_ranks_may_ask_for_the_same_and_for_parts_only(tmp_path: Path) -> None:
    tensor = torch.arange(48.0).reshape(8, 6)
    save_rows(tmp_path, 1, {"model.w": tensor}, {}, size=4)
    into = torch.full((5, 2), -1.0)
    wanted = [torch.zeros(8, 6), torch.zeros(8, 6), into.t()[:, 1:4].t()]
    boxes = [(0, 0), (0, 0), (3, 4)]
    on_all(
        rank_groups(3),
        lambda ranks: checkpoint.load(
            tmp_path / "step_1",
            {"model.w": Shard(wanted[ranks.rank], (8, 6), boxes[ranks.rank])},
            ranks=ranks,
        ),
    )
    assert torch.equal(wanted[0], tensor) and torch.equal(wanted[1], tensor)
    assert torch.equal(into[1:4], tensor[3:6, 4:])
    assert (into[[0, 4]] == -1).all(), "written beside the piece"


def test_only_the_files_that_hold_something_of_it_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(8, 3)
    save_rows(tmp_path, 1, {"model.w": tensor}, {}, size=4)
    opened: list[str] = []
    real = tensor_files.open_shard
    monkeypatch.setattr(
        tensor_files, "open_shard", lambda path: opened.append(path.name) or real(path)
    )
    part = torch.zeros(3, 3)
    checkpoint.load(tmp_path / "step_1", {"model.w": Shard(part, (8, 3), (3, 0))})
    assert torch.equal(part, tensor[3:6])
    assert set(opened) == {f"model-rank0000{r}-00001-of-00001.safetensors" for r in (1, 2)}


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_tilings_are_told_from_everything_else(data, shape) -> None:
    boxes = data.draw(tilings(shape, 6))
    for change in data.draw(st.lists(st.sampled_from(["drop", "repeat", "move"]), max_size=2)):
        if not boxes:
            break
        box = boxes[data.draw(st.integers(0, len(boxes) - 1))]
        if change != "repeat":
            boxes.remove(box)
        if change == "repeat":
            boxes.append(box)
        if change == "move" and shape:
            offsets = tuple(data.draw(st.integers(0, 4)) for _ in shape)
            boxes.append(Box(offsets, box.shape))
    counts = torch.zeros([size + 9 for size in shape], dtype=torch.int64)
    for box in boxes:
        counts[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] += 1
    inside = counts[tuple(slice(0, n) for n in shape)]
    expected = bool((inside == 1).all()) and int(counts.sum()) == inside.numel()
    if all(box.fits_in(shape) for box in boxes):
        assert (tiling_problem(shape, boxes) is None) == expected
    else:
        assert tiling_problem(shape, boxes) == "a piece reaches beyond it"


def test_a_pinwheel_tiles_and_its_mirror_image_does_not() -> None:
    wheel = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    boxes = [Box(*box) for box in wheel]
    assert tiling_problem((3, 3), boxes) is None
    boxes[1] = Box((1, 2), (2, 1))  # the same volume, with a hole and an overlap
    assert tiling_problem((3, 3), boxes) == "its pieces overlap"
    many = Box((0,) * 7, (1,) * 7)
    assert "cut along 7 dimensions" in (tiling_problem((2,) * 7, [many]) or "")


# --- merging ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_merged_checkpoint_is_one_other_tools_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 300)
    tensors = {f"model.w{i}": torch.randn(4, 1 + 7 * i) for i in range(6)}
    save_rows(tmp_path / "run", 9, tensors | {"optim.m": torch.randn(8)}, state_of(9), size=3)
    merged = checkpoint.merge(tmp_path / "run/step_9", tmp_path / "to/model", prefix="model.")
    files = {path.name: path.stat().st_size for path in merged.glob("*.safetensors")}
    assert len(files) > 2 and all(name.startswith("model-0000") for name in files)
    assert names(tmp_path / "to") == {"model"}
    into = blank(tensors)
    assert checkpoint.resume(merged, into, pytest.fail) == (merged, state_of(9))
    assert same_bits(into, tensors)
    again = blank(tensors)
    dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(str(merged)), no_dist=True)
    assert same_bits(again, tensors)


def test_merging_refuses_damage_what_exists_and_what_is_not_there(tmp_path: Path) -> None:
    save_rows(tmp_path, 1, sample(1), state_of(1), size=2)
    source = tmp_path / "step_1"
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.merge(source, tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="no tensors whose names begin with 'mode1'"):
        checkpoint.merge(source, tmp_path / "whole", prefix="mode1")
    shard = source / "optim-rank00001-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"{shard.name} is corrupted"):
        checkpoint.merge(source, tmp_path / "whole")
    assert names(tmp_path) == {"step_1", "latest"}
    checkpoint.merge(source, tmp_path / "whole", prefix="model.")


def test_merging_does_not_disturb_a_save_beside_it(tmp_path: Path) -> None:
    save_rows(tmp_path, 1, sample(1), state_of(1), size=2)
    meeting = tmp_path / ".step_2.tmp-crew-00112233aabbccdd"
    meeting.mkdir()
    checkpoint.merge(tmp_path / "step_1", tmp_path / "whole")
    assert meeting.is_dir()
