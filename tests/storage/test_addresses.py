"""Addresses, their local faces, and what is said when something is wrong with them."""

from __future__ import annotations

import builtins
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold import storage
from fourfold.errors import UserError
from fourfold.storage import addresses

PARTS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1).filter(
        lambda part: part not in (".", "..") and "::" not in part
    ),
    min_size=1,
    max_size=4,
)


@given(protocol=st.sampled_from(["s3", "gs", "memory", "file"]), parts=PARTS)
def test_an_address_is_known_by_its_local_face(protocol: str, parts: list[str]) -> None:
    slash = "/" if protocol in addresses.ROOTED else ""
    address = f"{protocol}://{slash}{'/'.join(parts)}"
    path = storage.local_path(address)
    assert storage.address_of(path) == address
    assert path.is_relative_to(storage.cache_root())


def test_paths_are_their_own_faces(tmp_path: Path) -> None:
    for path in ("./output", "C:/x", str(tmp_path), "s3:/one/slash"):
        assert storage.local_path(path) == Path(path)
        assert storage.name_of(Path(path)) == str(Path(path))


@pytest.mark.parametrize(
    "address", ["s3://", "s3://b/../../etc", "s3://b//c", "simplecache::s3://b/x", "s3://b/./c"]
)
def test_what_could_leave_the_cache_is_refused(address: str, cache: Path) -> None:
    if address.startswith("simplecache"):
        assert not storage.is_address(address)  # and so is a path that does not exist
        return
    with pytest.raises(UserError, match="no address that can be used"):
        storage.local_path(address)


def test_without_the_extra_the_command_to_install_it_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "fsspec":
            raise ImportError("No module named 'fsspec'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'fourfold\[remote\]'"):
        storage.read("s3://bucket/x")


def test_unknown_protocols_are_refused(cache: Path) -> None:
    with pytest.raises(UserError, match="the protocols known here are"):
        storage.read("s4://bucket/x")


def test_other_file_systems_of_fsspec_do(cache: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/far"
    (tmp_path / "far").mkdir()
    storage.write(f"{address}/one", b"1")
    assert storage.create(f"{address}/two", b"2")
    assert not storage.create(f"{address}/two", b"3")
    assert storage.children(address).keys() == {"one", "two"}
    assert storage.read(f"{address}/two") == b"2"


def test_what_lasts_is_said_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PAUSE_SECONDS", (1000.0,))
    with pytest.raises(UserError, match="there is no such bucket"):
        storage.write("s3://no-such-bucket-here/x", b"")
    with pytest.raises(UserError, match="there is no such bucket"):
        storage.children("s3://no-such-bucket-here/x")
    with pytest.raises(storage.NotThereError, match="there is nothing at this address"):
        storage.read(f"{address}/nothing")
    assert storage.children(f"{address}/nothing") == {}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    addresses.file_system(address)[0].clear_instance_cache()
    try:
        with pytest.raises(UserError, match="AWS_ACCESS_KEY_ID"):
            storage.write(f"{address}/x", b"")
    finally:
        addresses.file_system(address)[0].clear_instance_cache()


def test_what_passes_is_tried_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def work(system: Any, path: str) -> str:
        calls.append(path)
        if len(calls) < 3:
            raise ConnectionResetError("gone for a moment")
        return "done"

    assert addresses.patiently(address, work) == "done"
    assert len(calls) == 3
    calls.clear()
    monkeypatch.setattr(addresses, "PAUSE_SECONDS", (0.01,))
    with pytest.raises(storage.StorageError, match=r"ConnectionResetError.*asked again"):
        addresses.patiently(address, work)


def test_copies_are_taken_again_when_the_object_changes(address: str) -> None:
    storage.write(f"{address}/a.json", b"old")
    storage.write(f"{address}/b.bin", b"large")
    face = storage.local_path(address)
    storage.refresh(face, lambda name: name.endswith(".json"))
    assert (face / "a.json").read_bytes() == b"old"
    assert not (face / "b.bin").exists()
    known = storage.status(face / "b.bin")
    assert known is not None and known.size == 5
    storage.write(f"{address}/a.json", b"new!")
    storage.remove(f"{address}/b.bin")
    storage.refresh(face, lambda name: name.endswith(".json"))
    assert (face / "a.json").read_bytes() == b"new!"
    assert storage.status(face / "b.bin") is None


def test_processes_look_at_what_is_not_complete_at_the_same_time(address: str) -> None:
    """None of them finds what another is just removing."""
    for number in range(5):
        storage.write(f"{address}/step_1/{number}.json", b"{}")
    face = storage.local_path(f"{address}/step_1")

    def look(_: int) -> None:
        found = storage.refresh(face, lambda name: name.endswith(".json"), required="last.json")
        assert len(found) == 5

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(look, range(40)))
    assert not face.exists()
    storage.write(f"{address}/step_1/last.json", b"{}")
    storage.refresh(face, lambda name: name.endswith(".json"), required="last.json")
    assert (face / "last.json").exists()
