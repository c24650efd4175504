"""Cached indices: whole or not there, never stale, shared by any number of builders."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.token_files import documents_of, write_megatron

from fourfold.data import Samples, SampleSpec, cache, index, open_datasets
from fourfold.data import samples as samples_module
from fourfold.errors import DataError

SIZES = [7, 0, 30, 11, 2, 19, 4, 4, 25, 13]


def open_train(directory: Path, **change: object) -> Samples:
    usual: dict = {"split": "1", "part": "train", "seq_len": 6, "num_samples": 40, "seed": 3}
    given = {**usual, **change}
    num_samples = given.pop("num_samples")
    return Samples.open(open_datasets(directory), SampleSpec(**given), num_samples)


def served(samples: Samples) -> list[list[int]]:
    return [samples[i].tolist() for i in range(len(samples))]


def entries(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    write_megatron(directory / "x", documents_of(SIZES))
    return directory


def forbid_building(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(samples_module, "build_indices", lambda *_: pytest.fail("built again"))


def test_the_second_opening_builds_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = served(open_train(data))
    forbid_building(monkeypatch)
    samples = open_train(data)
    assert served(samples) == built
    (entry,) = entries(data / ".fourfold_cache")
    assert entry.name == samples.fingerprint
    assert sorted(path.name for path in entry.iterdir()) == [
        "checksums.json",
        "document_index.npy",
        "sample_index.npy",
        "shuffle_index.npy",
    ]


def test_moved_data_finds_its_index(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = served(open_train(data))
    moved = data.rename(data.with_name("elsewhere"))
    os.utime(moved / "x.bin", (1, 1))
    forbid_building(monkeypatch)
    assert served(open_train(moved)) == built


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"split": "5,5,0"},
        {"seq_len": 5},
        {"num_samples": 400},
        {"order": "fleetx"},
        {"split": "5,5,0", "part": "valid"},
    ],
)
def test_any_changed_input_is_another_index(data: Path, change: dict[str, object]) -> None:
    open_train(data)
    cached = open_train(data, **change)
    fresh = open_train(data, **change, cache_dir=data.parent / "fresh")
    assert served(cached) == served(fresh)
    assert cached.fingerprint != open_train(data).fingerprint
    assert len(entries(data / ".fourfold_cache")) == 2


def test_changed_content_under_the_same_name(data: Path) -> None:
    before = open_train(data)
    kept = (data / "x.bin").stat()
    write_megatron(data / "x", documents_of(SIZES[::-1]))
    os.utime(data / "x.bin", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    after = open_train(data)
    assert after.fingerprint != before.fingerprint
    assert served(after) == served(open_train(data, cache_dir=data.parent / "fresh"))


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "dtype", "noise"])
def test_a_damaged_entry_is_built_again(data: Path, name: str, damage: str) -> None:
    built = served(open_train(data))
    (entry,) = entries(data / ".fourfold_cache")
    file = entry / f"{name}.npy"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "dtype":
        np.save(file, np.load(file).astype(np.int16))
    else:
        changed = {
            "empty": b"",
            "truncated": content[:-1],
            "longer": content + b"\0",
            "noise": b"\0" * len(content),
        }
        file.write_bytes(changed[damage])
    assert served(open_train(data)) == built
    assert file.read_bytes() == content
    assert [path.name for path in (data / ".fourfold_cache").iterdir()] == [entry.name]


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize("value", [0, 1, 2**31 - 1])
def test_changed_values_are_noticed_and_built_again(
    data: Path, name: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a damaged disk: sizes, dtypes and headers are right, and so may every value be."""
    built = served(open_train(data))
    (entry,) = entries(data / ".fourfold_cache")
    file = entry / f"{name}.npy"
    content = file.read_bytes()
    array = np.load(file)
    array[3:9] = value
    np.save(file, array)
    assert served(open_train(data)) == built
    assert file.read_bytes() == content
    assert [message for message in caplog.messages if str(file) in message] == [
        f"index cache is damaged, building it again: {file}: the values are not those that were "
        "written"
    ]


def test_an_entry_without_checksums_is_built_again(data: Path) -> None:
    built = served(open_train(data))
    (entry,) = entries(data / ".fourfold_cache")
    for content in (None, "[]", "{}", '{"sample_index": "x"}', "{"):
        (entry / "checksums.json").unlink()
        if content is not None:
            (entry / "checksums.json").write_text(content)
        assert served(open_train(data)) == built
        assert (entry / "checksums.json").stat().st_size > 10


def test_values_that_point_nowhere_are_noticed_by_those_who_trust(data: Path) -> None:
    open_train(data)
    (entry,) = entries(data / ".fourfold_cache")
    for name in ("document_index", "sample_index", "shuffle_index"):
        file = entry / f"{name}.npy"
        array = np.load(file)
        for value in (2**31 - 1, -5 if array.dtype.kind == "i" else 999):
            np.save(file, np.full_like(array, value))
            with pytest.raises(DataError, match="the cache is damaged, delete"), cache.trusting():
                open_train(data)[0]
        np.save(file, array)
    assert len(open_train(data)[0]) == 7


def test_an_entry_another_process_has_just_mended_is_left_to_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes find the same damage; the slower must not remove what the faster made."""
    built = served(open_train(data))
    (entry,) = entries(data / ".fourfold_cache")
    whole = data / "whole"
    shutil.copytree(entry, whole)
    (entry / "sample_index.npy").write_bytes(b"damaged")
    rename = Path.rename
    faster: list[int] = []

    def after_the_other(self: Path, target: Path) -> Path:
        if self == entry and not faster:  # about to move the damaged entry away
            shutil.rmtree(entry)
            rename(whole, entry)
            faster.append((entry / "sample_index.npy").stat().st_ino)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", after_the_other)
    assert served(open_train(data)) == built
    assert faster == [(entry / "sample_index.npy").stat().st_ino]
    assert entries(data / ".fourfold_cache") == [entry]


def test_unwritable_data_directory(data: Path, own_user_cache: Path) -> None:
    # A file in the way stops root too, whom permissions do not.
    (data / ".fourfold_cache").write_text("in the way")
    built = served(open_train(data))
    (entry,) = entries(own_user_cache)
    assert entry.name == open_train(data).fingerprint
    assert served(open_train(data)) == built


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_data_directory_of_another_user(data: Path, own_user_cache: Path) -> None:
    data.chmod(0o555)
    samples = open_train(data)
    data.chmod(0o755)
    assert [entry.name for entry in entries(own_user_cache)] == [samples.fingerprint]


def test_no_writable_place_at_all(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    built = served(open_train(data, cache_dir=data.parent / "fresh"))
    (data.parent / "file").write_text("in the way")
    assert served(open_train(data, cache_dir=data.parent / "file")) == built
    assert "index not kept here" in caplog.text


def test_an_index_in_a_read_only_place_is_used(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = served(open_train(data, cache_dir=data.parent / "built_ahead"))
    forbid_building(monkeypatch)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("tried to write"))
    assert served(open_train(data, cache_dir=data.parent / "built_ahead")) == built


def build_in_a_process(directory: Path, start: float, results: Path, number: int) -> None:
    time.sleep(max(start - time.time(), 0))
    np.save(results / f"{number}.npy", np.array(served(open_train(directory))))


def test_builders_at_once(data: Path) -> None:
    expected = served(open_train(data, cache_dir=data.parent / "fresh"))
    context = multiprocessing.get_context("fork")
    for round_ in range(3):
        results = data.parent / f"results{round_}"
        results.mkdir()
        start = time.time() + 0.1
        builders = [
            context.Process(target=build_in_a_process, args=(data, start, results, number))
            for number in range(4)
        ]
        for builder in builders:
            builder.start()
        for builder in builders:
            builder.join(60)
            assert builder.exitcode == 0
        for number in range(4):
            assert np.load(results / f"{number}.npy").tolist() == expected
        (entry,) = entries(data / ".fourfold_cache")
        # The next round starts from a damaged entry that all find at the same time.
        (entry / "sample_index.npy").write_bytes(b"damaged")


def test_a_builder_killed_before_the_rename_leaves_no_entry(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fourfold.data.cache._commit", killed)
        with pytest.raises(KeyboardInterrupt):
            open_train(data)
    assert list((data / ".fourfold_cache").iterdir()) == []


def test_abandoned_leftovers_are_swept(data: Path) -> None:
    place = data / ".fourfold_cache"
    place.mkdir()
    for name, age in ((".old.1.tmp", 10**6), (".new.2.tmp", 0)):
        (place / name).mkdir()
        os.utime(place / name, (time.time() - age,) * 2)
    open_train(data)
    assert not (place / ".old.1.tmp").exists()
    assert (place / ".new.2.tmp").exists()


def test_unaligned_sizes_are_gathered_from_a_copy(data: Path) -> None:
    (source,) = open_datasets(data)
    assert not source.sizes.flags.aligned
    plan = index.plan_indices(len(source), source.num_tokens, 6, 40)
    documents = np.arange(len(source), dtype=np.int32)
    aligned = index.build_sample_index(np.array(SIZES, np.int32), documents, plan)
    assert np.array_equal(index.build_sample_index(source.sizes, documents, plan), aligned)
