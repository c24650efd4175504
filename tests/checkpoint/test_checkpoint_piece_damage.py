"""Damaged and hostile checkpoints of many ranks, and of older versions: refused or read exactly."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_ranks import save_rows
from helpers.checkpoint_samples import blank, content, forge, same_bits, sample, state_of
from helpers.mutate import mutate

from fourfold import checkpoint
from fourfold.checkpoint.bounded import HASH, digest_of
from fourfold.checkpoint.index import Part, RankRecord, read_parts
from fourfold.checkpoint.manifest import checksum_of
from fourfold.errors import CheckpointError

GOLDEN_V2 = Path(__file__).parent / "golden_v2"
TENSORS = sample(2, floats=24)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Written by three ranks."""
    save_rows(tmp_path, 2, TENSORS, state_of(2), size=3)
    return tmp_path / "step_2"


def mutate_and_read(directory: Path, tensors: dict, state: dict, times: int, seed: int) -> int:
    """How many of `times` mutants of one file each were refused; the rest read as they were."""
    rng = random.Random(seed)
    original = content(directory)
    refused = 0
    for _ in range(times):
        # Half of them where everything else is decided.
        deciding = [name for name in sorted(original) if name.startswith(("manifest", "index"))]
        file = rng.choice(deciding if rng.random() < 0.5 else sorted(original))
        (directory / file).write_bytes(mutate(original[file], rng))
        into = blank(tensors)
        try:
            assert checkpoint.load(directory, into) == state
            assert same_bits(into, tensors)
        except CheckpointError:
            assert same_bits(into, blank(tensors)), "tensors were touched before all was verified"
            refused += 1
        (directory / file).write_bytes(original[file])
    return refused


def test_five_hundred_mutations_of_the_work_of_many_ranks(saved: Path) -> None:
    assert mutate_and_read(saved, TENSORS, state_of(2), 500, seed=0) > 400


def test_three_hundred_mutations_of_version_2(tmp_path: Path) -> None:
    directory = shutil.copytree(GOLDEN_V2 / "step_7", tmp_path / "step_7")
    assert mutate_and_read(directory, sample(7), state_of(7), 300, seed=1) > 240


@pytest.mark.slow
def test_ten_thousand_mutations_of_the_work_of_many_ranks(saved: Path) -> None:
    assert mutate_and_read(saved, TENSORS, state_of(2), 10_000, seed=2) > 8_000


# --- hostile: the checksum agrees with the damage ---------------------------------------------


NAME = "model.embed.weight"  # two rows: of three ranks the second and the third have one


def cut_of(index: dict[str, Any]) -> dict[str, Any]:
    return index["cuts"][index["tensors"][NAME]]


def boxes(index: dict[str, Any], *boxes: object) -> None:
    """In the place of the grid."""
    del cut_of(index)["grid"]
    cut_of(index)["boxes"] = boxes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: cut_of(m)["files"].pop(), "files for another number of cells"),
        (lambda m: cut_of(m)["files"].append(0), "files for another number of cells"),
        (lambda m: cut_of(m).update(files=[0, 0]), "twice in one file"),
        (lambda m: cut_of(m).update(files=[0, 9]), "in no listed file"),
        (lambda m: cut_of(m).update(files=[0, -1]), "files"),
        (lambda m: cut_of(m).update(grid=[[0, 1], []]), "borders"),
        (lambda m: cut_of(m).update(grid=[[0, 2], [0]]), "borders"),
        (lambda m: cut_of(m).update(grid=[[1, 0], [0]]), "borders"),
        (lambda m: cut_of(m).update(grid=[[0, 0], [0]]), "borders"),
        (lambda m: cut_of(m).update(grid=[[0, 1]]), "1 dimensions over 2"),
        (lambda m: cut_of(m).update(grid=[[0, 1.0], [0]]), "grid"),
        (lambda m: cut_of(m).update(grid=None), "either a grid or boxes"),
        (lambda m: cut_of(m).update(boxes=[]), "either a grid or boxes"),
        (lambda m: boxes(m, [[0, 0], [1, 12]]), "1 pieces in 2 files"),
        (lambda m: boxes(m, [[0, 0], [1, 12]], [[0, 0], [1, 12]]), "its pieces overlap"),
        (lambda m: boxes(m, [[0, 0], [1, 12]], [[1, 0], [1, 11]]), "1 of its 24 elements"),
        (lambda m: boxes(m, [[0, 0], [1, 12]], [[2, 0], [1, 12]]), "reaches beyond"),
        (lambda m: boxes(m, [[0, 0], [1, 12]], [[1], [1, 12]]), "reaches beyond"),
        (lambda m: boxes(m, [[0, 0], [1, 12]], [[1, 0], [2**63, 12]]), "boxes"),
        (lambda m: cut_of(m).update(shape=[2**60, 2**60]), "too small"),
        (lambda m: [record.update(bytes=10) for record in m["files"].values()], "too small"),
        (lambda m: m["tensors"].update({NAME: 99}), "a tensor has no cut"),
        (lambda m: m.update(more=1), "more"),
    ],
)
def test_forged_pieces(saved: Path, change, reason: str) -> None:
    forge(saved, change)
    with pytest.raises(CheckpointError, match=rf"index-model\.json is damaged: .*{reason}"):
        checkpoint.load(saved, blank(TENSORS))


def test_pieces_that_lie_about_where_they_are_do_not_get_past_the_header(saved: Path) -> None:
    """A consistent tiling of another cut, which the files do not have."""
    forge(saved, lambda index: cut_of(index).update(grid=[[0], [0, 6]]))
    with pytest.raises(CheckpointError, match="does not hold what the manifest says"):
        checkpoint.load(saved, blank(TENSORS))
    assert "does not hold what the manifest says" in checkpoint.verify(saved)[0]


def test_ranks_cut_in_every_dimension_are_refused_quickly(saved: Path) -> None:
    """2^60 corners would be looked at for ever."""

    def deep(index: dict[str, Any]) -> None:
        cut_of(index)["shape"] = [2] * 60
        boxes(index, *([[number] * 60, [1] * 60] for number in range(2)))

    forge(saved, deep)
    with pytest.raises(CheckpointError, match="cut along 60 dimensions"):
        checkpoint.tensor_names(saved)


OLD_NAME = "model.layers.0.attn.out.weight"  # 8 x 8 in four quarters


def old_pieces(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return manifest["tensors"][OLD_NAME]["pieces"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: old_pieces(m).pop(), "16 of its 64 elements are in no piece"),
        (lambda m: old_pieces(m).clear(), "pieces"),
        (lambda m: old_pieces(m)[1].update(offsets=[0, 0]), "its pieces overlap"),
        (lambda m: old_pieces(m)[1].update(offsets=[5, 4]), "reaches beyond"),
        (lambda m: old_pieces(m)[1].update(shape=[1, 12, 1]), "reaches beyond"),
        (lambda m: old_pieces(m)[1].update(offsets=[-1, 0]), "offsets"),
        (lambda m: old_pieces(m)[1].update(file="state.json"), "in no listed file"),
        (lambda m: old_pieces(m)[1].update(file="../step_1/x"), "file"),
        (lambda m: old_pieces(m)[1].update(file=old_pieces(m)[0]["file"]), "twice in one file"),
        (lambda m: m["files"][old_pieces(m)[1]["file"]].update(bytes=10), "too small"),
        (lambda m: m["files"].pop("state.json"), "must list state.json"),
    ],
)
def test_forged_pieces_of_version_2(tmp_path: Path, change, reason: str) -> None:
    path = shutil.copytree(GOLDEN_V2 / "step_2", tmp_path / "step_2") / "manifest.json"
    forged = json.loads(path.read_text())
    change(forged)
    path.write_text(json.dumps(forged | {"checksum": checksum_of(forged)}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json is damaged: .*{reason}"):
        checkpoint.tensor_names(path.parent)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"files": {"../x": {}}}', '{"problem": 3}', '{"more": 1}', "{}\n{", "{}\n[]"],
)
def test_a_record_planted_in_a_meeting_is_not_believed(tmp_path: Path, text: str) -> None:
    """What ranks tell each other goes through the same strict reader."""
    path = tmp_path / "rank00001.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_parts({1: path})


def test_a_record_with_the_table_of_another_is_not_believed(tmp_path: Path) -> None:
    large = Part.of({}, {}).table | {"model.w": (0, 0)}
    data = json.dumps(large, separators=(",", ":")).encode()
    record = RankRecord(table_digest=digest_of(data, HASH)).model_dump_json().encode()
    path = tmp_path / "rank00001.json"
    path.write_bytes(record + b"\n" + data)
    with pytest.raises(CheckpointError, match="its table is of another record"):
        read_parts({1: path})


def test_version_2_reads_in_shards() -> None:
    half = torch.zeros(2, 2)
    piece = checkpoint.Shard(half, (2, 4), (0, 1))
    into = blank(sample(7)) | {NAME: piece}
    assert checkpoint.load(GOLDEN_V2 / "step_7", into) == state_of(7)
    assert torch.equal(half, sample(7)[NAME][:, 1:3])
