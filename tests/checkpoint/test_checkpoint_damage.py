"""Damaged and hostile checkpoints: refused with a clear error, or read exactly as they were."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_samples import (
    blank,
    content,
    forge,
    record_of,
    reseal,
    same_bits,
    sample,
    state_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import checkpoint
from fourfold.checkpoint.manifest import read_manifest
from fourfold.errors import CheckpointError

MODEL = "model-00001-of-00001.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """step_2, with a good step_1 before it."""
    checkpoint.save(tmp_path, 1, sample(1), state_of(1))
    return checkpoint.save(tmp_path, 2, sample(2), state_of(2))


def mutated(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    kind = rng.choice(["flip", "flip", "flip", "set", "cut", "drop", "insert", "append", "swap"])
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "set":
        return data[:at] + bytes([rng.choice(b'0159"{}[],: \0\xff')]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "drop":
        return data[:at] + data[at + 1 :]
    if kind == "insert":
        return data[:at] + rng.randbytes(1) + data[at:]
    if kind == "append":
        return data + rng.randbytes(rng.randrange(1, 9))
    other = rng.randrange(len(data))
    swapped = bytearray(data)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    return bytes(swapped)


def read_all(directory: Path) -> str:
    """Use everything that reads; "same" if it gave the original, else the error's message."""
    into = blank(sample(2))
    for reader in (checkpoint.read_state, checkpoint.tensor_names):
        try:
            reader(directory)
        except CheckpointError as error:
            assert directory.name in str(error)
    try:
        state = checkpoint.load(directory, into)
    except CheckpointError as error:
        assert same_bits(into, blank(into)), "tensors were touched before all was verified"
        return str(error)
    assert state == state_of(2) and same_bits(into, sample(2))
    return "same"


def mutate_and_read(directory: Path, times: int, seed: int) -> tuple[int, int]:
    rng = random.Random(seed)
    original = content(directory)
    detected = 0
    for _ in range(times):
        file = rng.choice(sorted(original))
        data = mutated(original[file], rng)
        (directory / file).write_bytes(data)
        outcome = read_all(directory)
        assert outcome != "same" or data == original[file]
        if outcome != "same":
            detected += 1
            assert file in outcome, "the error names the damaged file"
            assert checkpoint.verify(directory) != []
        (directory / file).write_bytes(original[file])
    assert read_all(directory) == "same"
    return detected, times


def test_some_hundred_mutations(saved: Path) -> None:
    detected, times = mutate_and_read(saved, 400, seed=2)
    # What is not detected is swaps of equal bytes.
    assert detected > 0.9 * times


@pytest.mark.slow
def test_ten_thousand_mutations(saved: Path) -> None:
    mutate_and_read(saved, 10_000, seed=1)


def test_every_truncation_of_every_file_falls_back(saved: Path) -> None:
    for file, data in content(saved).items():
        for size in {*range(0, len(data), 1 + len(data) // 24), len(data) - 1}:
            (saved / file).write_bytes(data[:size])
            notices: list[str] = []
            into = blank(sample(1))
            directory, state = checkpoint.resume(saved.parent, into, notices.append)
            assert directory == saved.parent / "step_1" and state == state_of(1)
            assert same_bits(into, sample(1))
            assert len(notices) == 1 and "step_2" in notices[0] and file in notices[0]
        (saved / file).write_bytes(data)


@pytest.mark.parametrize("file", ["manifest.json", "index-optim.json", "state.json", MODEL])
def test_a_missing_file_falls_back(saved: Path, file: str) -> None:
    (saved / file).unlink()
    notices: list[str] = []
    directory, _ = checkpoint.resume(saved, blank(sample(1)), notices.append)
    assert directory.name == "step_1"
    assert f"{saved / file} is missing" in notices[0]


def test_when_none_is_good_each_is_listed_with_its_reason(saved: Path) -> None:
    (saved / "state.json").write_text("{}")
    (saved.parent / "step_1" / MODEL).unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume(saved.parent, blank(sample(1)), lambda notice: None)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "step_2" in lines[1] and "state.json has 2 bytes and should have" in lines[1]
    assert "step_1" in lines[2] and f"{MODEL} is missing" in lines[2]


def test_verify_finds_every_problem_at_once(saved: Path) -> None:
    model, optim = saved / MODEL, saved / "optim-00001-of-00001.safetensors"
    model.write_bytes(bytes([model.read_bytes()[0] ^ 1]) + model.read_bytes()[1:])
    optim.unlink()
    (saved / "state.json").write_text("{}")
    (saved / "notes.txt").write_text("mine")
    problems = "\n".join(checkpoint.verify(saved))
    assert problems.count("\n") == 3
    for expected in (
        f"{MODEL} is corrupted",
        "optim-00001-of-00001.safetensors is missing",
        "state.json has 2 bytes",
        "notes.txt is not part of the checkpoint",
    ):
        assert expected in problems


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    into = blank(sample(1))
    with pytest.raises(CheckpointError, match="there is no such directory"):
        checkpoint.load(tmp_path / "nowhere", into)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.load(tmp_path, into)
    assert checkpoint.verify(tmp_path / "nowhere") != []


# --- hostile: the manifest agrees with the damage ---------------------------------------------


def refit(directory: Path) -> None:
    """Make the whole checkpoint agree with its files as they now are."""
    for group in ("model", "optim"):
        forge(
            directory,
            lambda index: index["files"].update(
                {file: record_of(directory / file) for file in index["files"]}
            ),
            group,
        )


def test_hostile_shards_raise_or_load_but_never_crash(saved: Path) -> None:
    rng = random.Random(4)
    original = content(saved)
    header_bytes = 8 + int.from_bytes(original[MODEL][:8], "little")
    refused = 0
    for _ in range(200):
        data = mutated(original[MODEL][:header_bytes], rng) + original[MODEL][header_bytes:]
        for file in ("manifest.json", "index-model.json", "index-optim.json"):
            (saved / file).write_bytes(original[file])
        (saved / MODEL).write_bytes(data)
        refit(saved)
        try:
            checkpoint.load(saved, blank(sample(2)))
        except CheckpointError as error:
            assert MODEL in str(error)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "file", ["../step_1/state.json", "/etc/passwd", "a/b", "..", ".hidden", ""]
)
def test_file_names_cannot_leave_the_directory(saved: Path, file: str) -> None:
    forge(saved, lambda index: index["files"].update({file: index["files"][MODEL]}))
    with pytest.raises(CheckpointError, match=r"index-model\.json is damaged: files"):
        checkpoint.load(saved, blank(sample(2)))


@pytest.mark.parametrize("group", ["../model", "", "a.b", "a" * 101, "index"])
def test_groups_cannot_leave_the_directory_either(saved: Path, group: str) -> None:
    reseal(saved, lambda root: root["groups"].update({group: root["groups"]["model"]}))
    with pytest.raises(CheckpointError, match=r"groups|index-index\.json is missing"):
        checkpoint.load(saved, blank(sample(2)))


def test_a_group_cannot_hold_the_tensors_of_another(saved: Path) -> None:
    forge(saved, lambda index: index["tensors"].update({"optim.step": 0}))
    with pytest.raises(CheckpointError, match=r"'optim\.step' is not of this group"):
        checkpoint.load(saved, blank(sample(2)))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1]},
        {"shape": [2**63]},
        {"shape": [2**40, 2**40]},
        {"shape": [4.0]},
        {"shape": "4"},
        {"dtype": "object"},
        {"dtype": 3},
        {"files": [7]},
        {"files": []},
        {"files": [0, 0]},
        {"grid": [[0, 2], [0]], "files": [0, 0]},
        {"extra": 1},
    ],
)
def test_forged_cuts(saved: Path, change: dict[str, object]) -> None:
    def apply(index: dict) -> None:
        index["cuts"][index["tensors"]["model.norm.weight"]] |= change

    forge(saved, apply)
    with pytest.raises(CheckpointError, match=r"index-model\.json is damaged"):
        checkpoint.tensor_names(saved)


def test_a_consistent_lie_about_a_tensor_is_refused(saved: Path) -> None:
    name = "model.norm.weight"
    forge(saved, lambda index: index["cuts"][index["tensors"][name]].update(dtype="float16"))
    into = blank(sample(2)) | {name: torch.zeros(4, dtype=torch.float16)}
    with pytest.raises(CheckpointError, match="does not hold what the manifest says"):
        checkpoint.load(saved, into)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '"' + '\\"' * 3_000_000])
def test_deep_or_endless_json_is_refused(saved: Path, text: str) -> None:
    for file in ("manifest.json", "state.json", "index-model.json"):
        original = content(saved)
        (saved / file).write_text(text)
        if file != "manifest.json":
            reseal(saved)
        with pytest.raises(CheckpointError):
            checkpoint.load(saved, blank(sample(2)))
        for name, data in original.items():
            (saved / name).write_bytes(data)


def test_oversized_json_is_not_read(saved: Path) -> None:
    for file in ("manifest.json", "index-model.json"):
        os.truncate(saved / file, 1 << 40)
        with pytest.raises(CheckpointError, match="larger than the"):
            checkpoint.tensor_names(saved)
        shutil.copy(saved.parent / "step_1" / file, saved)


@pytest.mark.parametrize("file", ["manifest.json", "index-model.json", "state.json", MODEL])
def test_a_pipe_in_place_of_a_file_does_not_hang(saved: Path, file: str) -> None:
    (saved / file).unlink()
    os.mkfifo(saved / file)
    directory, _ = checkpoint.resume(saved, blank(sample(1)), lambda notice: None)
    assert directory.name == "step_1"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\ 0e-truefalsn', max_size=80))
def test_any_bytes_as_manifest(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    directory = tmp_path_factory.mktemp("any")
    path = directory / "manifest.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(CheckpointError, match="manifest"):
        read_manifest(directory)


# --- pickles ----------------------------------------------------------------------------------


class Payload:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.proof),))


opened: list[str] = []
watching = False


def watch(event: str, arguments: tuple) -> None:
    if watching and event in ("open", "pickle.find_class"):
        opened.append(f"{event} {arguments[0]}")


def test_planted_pickles_are_never_opened(saved: Path, tmp_path: Path) -> None:
    global watching
    payload = pickle.dumps(Payload(tmp_path / "proof"))
    planted = [".metadata", "__0_0.distcp", "optim.pt", "model.pdparams", "evil.safetensors"]
    for name in planted:
        (saved / name).write_bytes(payload)
    sys.addaudithook(watch)  # cannot be taken back, hence the switch
    watching = True
    try:
        directory, _ = checkpoint.resume(saved.parent, blank(sample(2)), pytest.fail)
        checkpoint.verify(saved)
    finally:
        watching = False
    assert directory == saved
    assert any("manifest.json" in line for line in opened), "the watch works"
    assert not [
        line for line in opened if line.startswith("pickle") or line.endswith(tuple(planted))
    ]


@pytest.mark.parametrize("file", ["state.json", MODEL])
def test_a_pickle_in_place_of_a_file_is_refused(saved: Path, tmp_path: Path, file: str) -> None:
    (saved / file).write_bytes(pickle.dumps(Payload(tmp_path / "proof")) + bytes(100))
    refit(saved)
    with pytest.raises(CheckpointError, match=file):
        checkpoint.load(saved, blank(sample(2)))
    assert not (tmp_path / "proof").exists()
