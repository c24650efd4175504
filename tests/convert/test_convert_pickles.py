"""Files made to harm: nothing they name is run, and no damage makes the readers hang or swell."""

from __future__ import annotations

import argparse
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import FLEETX_TINY, attack, megatron_tree, weights

from fourfold.convert import load_foreign, pickles
from fourfold.convert.fleetx import read_pdparams
from fourfold.convert.imported import LazyTensor
from fourfold.convert.torch_files import read_torch_file
from fourfold.errors import CheckpointError

GOLDEN = (FLEETX_TINY / "model.pdparams").read_bytes()


class Bomb:
    """Pickled, it makes a directory where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.place),)


class Evaluated:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return eval, ("__import__('os').mkdir('ran')", {"data": 1})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_paddle_file_that_would_run_code_is_refused(tmp_path: Path, protocol: int) -> None:
    for bomb in (Bomb(tmp_path / "ran"), Evaluated()):
        content = pickle.loads(GOLDEN) | {"gpt.extra": bomb}  # noqa: S301
        (tmp_path / "model.pdparams").write_bytes(pickle.dumps(content, protocol=protocol))
        with pytest.raises(CheckpointError, match="Nothing was run"):
            load_foreign(tmp_path, 4)
        assert not (tmp_path / "ran").exists() and not Path("ran").exists()


@pytest.mark.parametrize("new_layout", [True, False])
def test_torch_file_that_would_run_code_is_refused(tmp_path: Path, new_layout: bool) -> None:
    megatron_tree(tmp_path, weights())
    file = tmp_path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["args"] = Bomb(tmp_path / "ran")
    torch.save(content, file, _use_new_zipfile_serialization=new_layout)
    with pytest.raises(CheckpointError, match=r"'(posix|nt)\.mkdir'"):
        load_foreign(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_names_of_megatron_are_inert(tmp_path: Path) -> None:
    """Its enumerations stand in saved arguments; they are neither imported nor believed."""
    values = b"\x80\x02}X\x04\x00\x00\x00kindcmegatron.core.enums\nModelType\nK\x01\x85Rs."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", values)
    assert list(read_torch_file(tmp_path / "a.pt")) == ["kind"]


def nested_tuples(depth: int) -> bytes:
    """t = (t, t), again and again: few bytes, and a hash that takes for ever."""
    return b"\x80\x04}N" + b"2\x86" * depth + b"Ns."


ENCODED = b"c_codecs\nencode\nh\x00\x8c\x06latin1\x86R0"
TEXT = b"\x8c\xff" + b"x" * 255
EXPANDED = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00(J\x00\x00\x00\x40J\x00\x00\x00\x40t"
    b"(K\x00K\x00t\x89}tR."
)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04}",
        b"\x80\x09}.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x04B" + struct.pack("<I", 2**32 - 1) + b"x.",
        b"\x80\x04\x8b" + struct.pack("<i", 2**30) + b"x.",
        b"\x80\x04\x8b" + struct.pack("<i", -1) + b"x.",
        b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".",
        nested_tuples(100),
        b"\x80\x04}" + b"N\x85" * 100_000 + b"Ns.",
        b"\x80\x04]\x94" + b"h\x00a" * 1000 + b".",
        b"\x80\x04}\x94X\x01\x00\x00\x00ah\x00s.",
        b"\x80\x04c" + b"a" * 5000,
        b"\x80\x04" + TEXT + b"\x94" + ENCODED * 50_000 + b"N.",
        b"I1\n.",
    ],
    ids=range(16),
)
def test_crafted_programs(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.pdparams").write_bytes(data)
    with pytest.raises(CheckpointError):
        read_pdparams(tmp_path / "model.pdparams")


def test_programs_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_STEPS", 100)
    (tmp_path / "model.pdparams").write_bytes(b"}" * 99 + b".")
    assert read_pdparams(tmp_path / "model.pdparams") == {}
    (tmp_path / "model.pdparams").write_bytes(b"}" * 100 + b".")
    with pytest.raises(CheckpointError, match="over 100 steps"):
        read_pdparams(tmp_path / "model.pdparams")


def test_tensors_larger_than_their_storage(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", EXPANDED)
        archive.writestr("a/data/0", bytes(4))
    with pytest.raises(CheckpointError):
        read_torch_file(tmp_path / "a.pt")


def test_packed_entries_are_not_unpacked(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as sound,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in sound.namelist():
            packed.writestr(name, sound.read(name))
    assert read_torch_file(tmp_path / "a.pt")["a"].read().tolist() == [0] * 4
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_file(tmp_path / "b.pt")


def test_views_strides_and_empty_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "turned": base.T,
        "part": base[1:3, 2:4],
        "none": torch.empty(0, 3),
        "one": base[0, 0],
    }
    for new_layout in (True, False):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=new_layout)
        for name, stored in read_torch_file(tmp_path / "a.pt").items():
            assert torch.equal(stored.read(), content[name]) and stored.read().is_contiguous()


# --- mutants ----------------------------------------------------------------------------------


def small_paddle_file() -> bytes:
    arrays = {"a": np.ones((2, 3), np.float32), "b": ("name", np.ones(3, np.float16))}
    return pickle.dumps(arrays | {"StructuredToParameterName@@": {"a": "b"}}, protocol=4)


def read_paddle(path: Path) -> None:
    for stored in read_pdparams(path).values():
        assert stored.nbytes <= path.stat().st_size
        stored.read()


def read_torch(path: Path) -> None:
    content = read_torch_file(path)
    for stored in content.values() if isinstance(content, dict) else ():
        if isinstance(stored, LazyTensor):
            assert stored.nbytes <= path.stat().st_size
            stored.read()


def torch_files(tmp_path: Path) -> list[bytes]:
    content = {"a": torch.ones(2, 3), "args": argparse.Namespace(n=1), "n": np.ones(2)}
    found = []
    for new_layout in (True, False):
        torch.save(content, tmp_path / "sound", _use_new_zipfile_serialization=new_layout)
        found.append((tmp_path / "sound").read_bytes())
    return found


@pytest.mark.parametrize(
    "rounds", [1_000, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_mutants_are_read_or_refused(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "mutant"
    program = small_paddle_file()
    assert 0 < attack(path, [program, program[:200], GOLDEN], read_paddle, rounds) < rounds
    assert 0 < attack(path, torch_files(tmp_path), read_torch, rounds) < rounds
