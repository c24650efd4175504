"""What a directory, a prefix or a file name opens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.token_files import write_fleetx, write_legacy, write_megatron

from fourfold.data import Samples, SampleSpec, open_datasets
from fourfold.errors import DataError


def names(*paths: Path) -> list[str]:
    return [dataset.path.name for dataset in open_datasets(list(paths))]


def test_a_directory_opens_every_dataset_sorted(tmp_path: Path) -> None:
    write_legacy(tmp_path / "c", [[1]])
    write_fleetx(tmp_path / "a", [[1]])
    write_megatron(tmp_path / "b", [[1]])
    assert names(tmp_path) == ["a_ids.npy", "b.bin", "c_ids.npz"]


@pytest.mark.parametrize("name", ["b", "b.bin", "b.idx"])
def test_a_prefix_or_a_file_opens_one(tmp_path: Path, name: str) -> None:
    write_megatron(tmp_path / "b", [[1]])
    write_megatron(tmp_path / "b2", [[1]])
    assert names(tmp_path / name) == ["b.bin"]


def test_fleetx_file_names(tmp_path: Path) -> None:
    write_fleetx(tmp_path / "a", [[1]])
    write_legacy(tmp_path / "train.data.json", [[1]])
    assert (
        names(tmp_path / "a_ids.npy", tmp_path / "a_idx.npz", tmp_path / "a") == ["a_ids.npy"] * 3
    )
    assert names(tmp_path / "train.data.json_ids.npz") == ["train.data.json_ids.npz"]


def test_caches_and_leftovers_are_not_data(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2, 3]] * 9)
    write_fleetx(tmp_path / "b", [[1, 2, 3]] * 9)
    for cached in (
        "b_gpt_train_indexmap_100ns_16sl_doc_idx.npy",
        "b_gpt_train_indexmap_100ns_16sl_sample_idx.npy",
        "b_ids.npz_gpt_train_indexmap_100ns_16sl_shuffle_idx.npy",
        "0123456789abcdef_doc_idx.npy",
        "0123456789abcdef.dsc",
        ".a.idx.123.tmp",
        ".hidden.idx",
        "pytorch_model.bin",
    ):
        (tmp_path / cached).write_bytes(b"not data")
    sources = open_datasets(tmp_path)
    Samples.open(sources, SampleSpec("1", "train", 2, 1), 5)
    sources[0].check_ids(4)
    assert (tmp_path / ".fourfold_cache").is_dir()
    assert names(tmp_path) == ["a.bin", "b_ids.npy"]


def test_missing_partner_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin: missing; a\.idx needs it"):
        open_datasets(tmp_path)
    (tmp_path / "a.idx").unlink()
    write_fleetx(tmp_path / "b", [[1]])
    (tmp_path / "b_idx.npz").unlink()
    with pytest.raises(DataError, match=r"b_idx\.npz: missing"):
        open_datasets(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no dataset; expected"):
        open_datasets(tmp_path)
    with pytest.raises(DataError, match="no such directory or dataset"):
        open_datasets(tmp_path / "absent")
    with pytest.raises(DataError, match="no dataset was named"):
        open_datasets([])


def test_one_prefix_in_two_formats_would_count_twice(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1]])
    write_fleetx(tmp_path / "a", [[1]])
    with pytest.raises(DataError, match="more than one format"):
        open_datasets(tmp_path)
    with pytest.raises(DataError, match="more than one format"):
        open_datasets(tmp_path / "a")
    assert names(tmp_path / "a.idx") == ["a.bin"]


def test_opening_data_does_not_wait_for_torch() -> None:
    program = "import sys, fourfold.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_output_prefix_of_preparing_names_its_dataset(tmp_path: Path) -> None:
    write_megatron(tmp_path / "wiki_text_document", [[1]])
    assert names(tmp_path / "wiki") == ["wiki_text_document.bin"]
    write_megatron(tmp_path / "wiki_title_document", [[1]])
    with pytest.raises(DataError, match="no such directory or dataset"):
        open_datasets(tmp_path / "wiki")
