"""Damaged and hostile checkpoints of many ranks, and of version 1: refused, or read exactly."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import save_rows
from checkpoint_samples import blank, content, same_bits, sample, state_of
from mutate import mutate

from fourfold import checkpoint
from fourfold.checkpoint.manifest import checksum_of
from fourfold.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden_v1" / "step_7"
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
        # Half of them in the manifest, where everything else is decided.
        file = "manifest.json" if rng.random() < 0.5 else rng.choice(sorted(original))
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


def test_five_hundred_mutations_of_version_1(tmp_path: Path) -> None:
    directory = shutil.copytree(GOLDEN, tmp_path / "step_7")
    assert mutate_and_read(directory, sample(7), state_of(7), 500, seed=1) > 400


@pytest.mark.slow
def test_ten_thousand_mutations_of_the_work_of_many_ranks(saved: Path) -> None:
    assert mutate_and_read(saved, TENSORS, state_of(2), 10_000, seed=2) > 8_000


# --- hostile: the checksum agrees with the damage ---------------------------------------------


def forge(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "manifest.json"
    forged = json.loads(path.read_text())
    change(forged)
    path.write_text(json.dumps(forged | {"checksum": checksum_of(forged)}))


NAME = "model.embed.weight"  # two rows: of three ranks the second and the third have one


def pieces_of(forged: dict[str, Any]) -> list[dict[str, Any]]:
    return forged["tensors"][NAME]["pieces"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: pieces_of(m).pop(), "12 of its 24 elements are in no piece"),
        (lambda m: pieces_of(m).clear(), "pieces"),
        (lambda m: pieces_of(m)[1].update(offsets=[0, 0]), "its pieces overlap"),
        (lambda m: pieces_of(m)[1].update(offsets=[2, 0]), "reaches beyond"),
        (lambda m: pieces_of(m)[1].update(offsets=[1]), "reaches beyond"),
        (lambda m: pieces_of(m)[1].update(shape=[1, 12, 1]), "reaches beyond"),
        (lambda m: pieces_of(m)[1].update(offsets=[-1, 0]), "offsets"),
        (lambda m: pieces_of(m)[1].update(offsets=[1.0, 0]), "offsets"),
        (lambda m: pieces_of(m)[1].update(shape=[2**63, 1]), "shape"),
        (lambda m: pieces_of(m)[1].update(file="state.json"), "in no listed file"),
        (lambda m: pieces_of(m)[1].update(file="../step_1/x"), "file"),
        (lambda m: pieces_of(m)[1].update(file=pieces_of(m)[0]["file"]), "twice in one file"),
        (lambda m: pieces_of(m)[1].update(extra=1), "extra"),
        (lambda m: m["tensors"][NAME].update(shape=[3, 12]), "12 of its 36 elements"),
        (lambda m: m["tensors"][NAME].update(shape=[2**60, 2**60]), "elements are in no piece"),
        (lambda m: m["files"][pieces_of(m)[1]["file"]].update(bytes=10), "too small"),
        (lambda m: m["tensors"][NAME].update(file="a"), "file"),
        (lambda m: m.update(version=1), "tensors"),
    ],
)
def test_forged_pieces(saved: Path, change, reason: str) -> None:
    forge(saved, change)
    with pytest.raises(CheckpointError, match=rf"manifest\.json is damaged: .*{reason}"):
        checkpoint.load(saved, blank(TENSORS))


def test_pieces_that_lie_about_where_they_are_do_not_get_past_the_header(saved: Path) -> None:
    """A consistent tiling of another cut, which the files do not have."""

    def turn(forged: dict[str, Any]) -> None:
        first, second = pieces_of(forged)
        first.update(offsets=[0, 0], shape=[2, 6])
        second.update(offsets=[0, 6], shape=[2, 6])

    forge(saved, turn)
    with pytest.raises(CheckpointError, match="does not hold what the manifest says"):
        checkpoint.load(saved, blank(TENSORS))
    assert "does not hold what the manifest says" in checkpoint.verify(saved)[0]


def test_ranks_cut_in_every_dimension_are_refused_quickly(saved: Path) -> None:
    """2^60 corners would be looked at for ever."""
    sixty = [2] * 60

    def deep(forged: dict[str, Any]) -> None:
        record = copy.deepcopy(forged["tensors"][NAME])
        record["shape"] = sixty
        for number, piece in enumerate(record["pieces"]):
            piece.update(offsets=[number] * 60, shape=[1] * 60)
        forged["tensors"][NAME] = record

    forge(saved, deep)
    with pytest.raises(CheckpointError, match="cut along 60 dimensions"):
        checkpoint.tensor_names(saved)


def test_a_record_planted_in_a_meeting_is_not_believed(tmp_path: Path) -> None:
    """What ranks tell each other goes through the same strict reader."""
    from fourfold.checkpoint.manifest import parse_record
    from fourfold.checkpoint.meeting import RankRecord

    for text in ("{", "[]", '{"files": {"../x": {}}}', '{"problem": 3}', '{"more": 1}'):
        with pytest.raises(CheckpointError, match="is damaged"):
            parse_record(RankRecord, text.encode(), tmp_path / "rank00001.json")


def test_version_1_reads_in_pieces(tmp_path: Path) -> None:
    half = torch.zeros(2, 2)
    piece = checkpoint.Piece(half, (2, 4), (0, 1))
    into = blank(sample(7)) | {NAME: piece}
    assert checkpoint.load(GOLDEN, into) == state_of(7)
    assert torch.equal(half, sample(7)[NAME][:, 1:3])
