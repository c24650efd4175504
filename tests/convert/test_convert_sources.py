"""Which checkpoint is it: directories, archives, mixtures, and things that are none."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch
from helpers.foreign_files import (
    FLEETX_TINY,
    HEADS,
    assert_same,
    fleetx_tree,
    megatron_tree,
    weights,
)
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.convert import Kind, convert, load_foreign, open_weights
from fourfold.errors import CheckpointError, UserError

KINDS = ("fourfold", "hf", "fleetx", "megatron")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_to_every_format(tmp_path: Path, kind: str) -> None:
    expected = dict(load_foreign(FLEETX_TINY, 4).tensors())
    convert(FLEETX_TINY, tmp_path / kind, kind, num_attention_heads=4)  # type: ignore[arg-type]
    assert open_weights(tmp_path / kind).kind == kind
    for other in KINDS:
        convert(tmp_path / kind, tmp_path / f"to_{other}", other)  # type: ignore[arg-type]
        with load_foreign(tmp_path / f"to_{other}") as model:
            assert_same(model, expected)
            assert model.model["num_attention_heads"] == 4
        with pytest.raises(CheckpointError, match="has 4 attention heads, but 8 were given"):
            load_foreign(tmp_path / f"to_{other}", 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["hf", "fleetx", "megatron"])
def test_weights_are_written_in_another_type(
    tmp_path: Path, kind: Kind, dtype: torch.dtype
) -> None:
    convert(FLEETX_TINY, tmp_path / "whole", "fourfold", num_attention_heads=4)
    whole = {name: tensor.clone() for name, tensor in load_foreign(tmp_path / "whole").tensors()}
    convert(tmp_path / "whole", tmp_path / "out", kind, dtype=dtype)
    with load_foreign(tmp_path / "out") as model:
        assert_same(model, {name: tensor.to(dtype) for name, tensor in whole.items()})


def test_types_that_cannot_be_had(tmp_path: Path) -> None:
    large = weights()
    large["norm.weight"][3] = 1e6
    megatron_tree(tmp_path / "source", large)
    with pytest.raises(CheckpointError, match=r"norm.weight holds 1e\+06, .* range of float16"):
        convert(tmp_path / "source", tmp_path / "out", "hf", dtype=torch.float16)
    with pytest.raises(UserError, match="--dtype bfloat16 is not for --to fourfold"):
        convert(tmp_path / "source", tmp_path / "out", "fourfold", dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_steps_of_our_own(tmp_path: Path) -> None:
    convert(FLEETX_TINY, tmp_path / "run", "fourfold", num_attention_heads=4)
    for place in (tmp_path / "run" / "step_0", tmp_path / "run" / "latest"):
        assert open_weights(place).kind == "fourfold"
    # A directory of another format beside our steps is not ours.
    convert(FLEETX_TINY, tmp_path / "run" / "step_5", "fleetx", num_attention_heads=4)
    assert open_weights(tmp_path / "run" / "step_5").kind == "fleetx"


def test_none_and_mixed_are_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_weights(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(CheckpointError, match="no checkpoint Fourfold knows"):
        open_weights(tmp_path)
    (tmp_path / "model.pdparams").write_bytes(b"")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several kinds of checkpoint \(hf, fleetx\)"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="is empty"):
        load_foreign(tmp_path, 4)


def test_layer_files_of_paddle_are_said(tmp_path: Path) -> None:
    (tmp_path / "layer_00-tensor_00-model_states.pdparams").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="single layers"):
        open_weights(tmp_path)


# --- archives ---------------------------------------------------------------------------------


def packed(path: Path, source: Path, name: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, arcname=name)
    return path


def test_release_archive(tmp_path: Path) -> None:
    ours = weights()
    tree = tmp_path / "GPT_345M_300B_DP"
    fleetx_tree(tree, ours, 1, 1)
    (tree / "mp_00_sharding_00_pp_00" / "model_state.pdopt").write_bytes(b"moments")
    archive = packed(tmp_path / "release.tgz", tree, "GPT_345M_300B_DP")
    space = tmp_path / "space"
    space.mkdir()
    with load_foreign(archive, HEADS, space) as model:
        assert_same(model, ours)
        assert not list(space.rglob("*.pdopt"))
    assert not any(space.iterdir())
    convert(archive, tmp_path / "own", "fourfold", num_attention_heads=HEADS)
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [
        "config.yaml",
        "latest",
        "step_0",
    ]


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    "harmful",
    [
        member("../../outside.json", size=4),
        member("/outside.json", size=4),
        member("link.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("hard.json", type=tarfile.LNKTYPE, linkname="../outside.json"),
        member("device.bin", type=tarfile.CHRTYPE),
    ],
    ids=lambda info: info.name,
)
def test_archives_that_reach_outside(tmp_path: Path, harmful: tarfile.TarInfo) -> None:
    space = tmp_path / "a" / "b"
    space.mkdir(parents=True)
    with tarfile.open(tmp_path / "bad.tgz", "w:gz") as archive:
        archive.addfile(harmful, io.BytesIO(b"harm"))
    with pytest.raises(CheckpointError):
        open_weights(tmp_path / "bad.tgz", space)
    assert not any(space.iterdir())
    assert not list(tmp_path.rglob("outside.json")) and not Path("/outside.json").exists()


def test_archives_that_swell_or_are_cut_off(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bomb.tgz", "w:gz") as archive:
        info = member("skipped.dat", size=150 << 20)
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(CheckpointError, match="no packed weights"):
        open_weights(tmp_path / "bomb.tgz")
    whole = packed(tmp_path / "cut.tgz", FLEETX_TINY, "tiny")
    whole.write_bytes(whole.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"cannot be unpacked|cut off"):
        load_foreign(whole, 4)


# --- the command ------------------------------------------------------------------------------


def test_command_converts_and_tells(tmp_path: Path) -> None:
    arguments = ["convert", str(FLEETX_TINY), str(tmp_path / "hf"), "--to", "hf"]
    result = CliRunner().invoke(command_line(), arguments)
    assert isinstance(result.exception, CheckpointError)
    assert not (tmp_path / "hf").exists() and not list(tmp_path.iterdir())
    result = CliRunner().invoke(command_line(), [*arguments, "--num-attention-heads", "4"])
    assert result.exit_code == 0, result.output
    assert "hf from fleetx, 3 layers of 32, 4 heads, vocabulary of 128" in result.output
    assert "no tokenizer was found" in result.output
    again = CliRunner().invoke(command_line(), [*arguments, "--num-attention-heads", "4"])
    assert "exists and is not empty" in str(again.exception)


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    megatron_tree(tmp_path / "in", weights())
    file = tmp_path / "in" / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError):
        convert(tmp_path / "in", tmp_path / "out", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
