"""The three formats read alike, and what is wrong with a file is named."""

from __future__ import annotations

import json
import mmap
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.token_files import (
    CODES,
    WRITERS,
    Numbers,
    idx_bytes,
    write_fleetx,
    write_legacy,
    write_megatron,
)

from fourfold.data import TokenDataset, cache, npy, open_datasets
from fourfold.data import datasets as datasets_module
from fourfold.errors import DataError
from fourfold.tools.prepare.pipeline import prepare

DOCUMENTS = [[5, 6, 7], [], [8, 9], [300]]


def read(path: Path) -> TokenDataset:
    (dataset,) = open_datasets(path)
    return dataset


def contents(dataset: TokenDataset) -> list[list[int]]:
    return [dataset.tokens(document).tolist() for document in range(len(dataset))]


def refused(path: Path, *words: str) -> None:
    with pytest.raises(DataError) as error:
        open_datasets(path)
    for word in words:
        assert word in str(error.value), f"{word!r} not in {error.value}"


@pytest.mark.parametrize("form", WRITERS)
def test_every_format_gives_the_documents(tmp_path: Path, form: str) -> None:
    dataset = read(WRITERS[form](tmp_path / "x", DOCUMENTS))
    assert contents(dataset) == DOCUMENTS
    assert dataset.sizes.tolist() == [3, 0, 2, 1]
    assert dataset.sizes.dtype == np.int32
    assert dataset.num_tokens == 6
    assert dataset.dtype == np.uint16
    assert dataset.tokens(0, 1, 2).tolist() == [6]
    assert dataset.max_id() == 300


def test_fingerprint_is_of_the_content_not_the_format_or_place(tmp_path: Path) -> None:
    prints = {WRITERS[form](tmp_path / form, DOCUMENTS): form for form in WRITERS}
    assert len({read(prefix).fingerprint for prefix in prints}) == 1
    changed = [
        [[5, 6, 7], [], [8, 9], [301]],
        [[5, 6, 7], [8], [9], [300]],
        [[5, 6, 7], [], [8, 9, 300]],
    ]
    others = {
        read(write_megatron(tmp_path / str(i), documents)).fingerprint
        for i, documents in enumerate([*changed, DOCUMENTS])
    }
    assert len(others) == 4


def test_fingerprint_of_a_big_file_covers_both_ends(tmp_path: Path) -> None:
    count = 1_000_000
    ids = np.zeros(count, np.uint16)
    prints = set()
    for at in (None, 0, count - 1):
        changed = ids.copy()
        if at is not None:
            changed[at] = 1
        np.save(tmp_path / "x_ids.npy", changed)
        np.savez(tmp_path / "x_idx.npz", lens=np.array([count], np.int32))
        prints.add(read(tmp_path / "x").fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize("dtype", CODES)
def test_megatron_integer_dtypes(tmp_path: Path, dtype: str) -> None:
    dataset = read(write_megatron(tmp_path / "x", [[1, 2], [3]], dtype))
    assert contents(dataset) == [[1, 2], [3]]
    assert dataset.dtype == np.dtype(dtype)


def test_megatron_golden_bytes(tmp_path: Path) -> None:
    golden = (
        "4d4d49444944580000 0100000000000000 08 0200000000000000 0300000000000000 03000000 "
        "02000000 0000000000000000 0600000000000000 0000000000000000 0100000000000000 "
        "0200000000000000"
    )
    (tmp_path / "x.idx").write_bytes(bytes.fromhex(golden))
    (tmp_path / "x.bin").write_bytes(np.arange(1, 6, dtype="<u2").tobytes())
    assert contents(read(tmp_path / "x")) == [[1, 2, 3], [4, 5]]


def test_megatron_mode_bytes_are_accepted(tmp_path: Path) -> None:
    dataset = read(write_megatron(tmp_path / "x", [[1, 2], [3]], modes=b"\x00\x01"))
    assert contents(dataset) == [[1, 2], [3]]


def test_megatron_documents_of_several_sequences(tmp_path: Path) -> None:
    index = bytearray(idx_bytes([2, 1, 1]))
    index[26:34] = struct.pack("<Q", 3)
    index[34 + 36 :] = np.array([0, 2, 3], "<i8").tobytes()
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(np.arange(4, dtype="<u2").tobytes())
    assert contents(read(tmp_path / "x")) == [[0, 1], [2], [3]]


def test_empty_datasets_are_read(tmp_path: Path) -> None:
    for form, write in WRITERS.items():
        assert len(read(write(tmp_path / form, []))) == 0
        assert contents(read(write(tmp_path / (form + "2"), [[], []]))) == [[], []]


def test_documents_ending_with_a_page_of_memory(tmp_path: Path) -> None:
    documents = [[], list(range(mmap.PAGESIZE // 2)), []]
    assert contents(read(write_megatron(tmp_path / "x", documents))) == documents


@pytest.mark.parametrize("compressed", [False, True])
def test_npz_stored_or_compressed(tmp_path: Path, compressed: bool) -> None:
    assert (
        contents(read(write_fleetx(tmp_path / "a", DOCUMENTS, compressed=compressed))) == DOCUMENTS
    )
    assert (
        contents(read(write_legacy(tmp_path / "b", DOCUMENTS, compressed=compressed))) == DOCUMENTS
    )


def test_stored_npz_is_mapped_not_loaded(tmp_path: Path) -> None:
    dataset = read(write_legacy(tmp_path / "x", DOCUMENTS))
    owner: object = dataset.ids
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, mmap.mmap)


def test_big_endian_npy(tmp_path: Path) -> None:
    write_fleetx(tmp_path / "x", DOCUMENTS, dtype=">u2")
    assert contents(read(tmp_path / "x")) == DOCUMENTS


@pytest.mark.parametrize(
    ("at", "new", "words"),
    [
        (0, b"TNTIDX\x00\x00", ["TNTIDX", "prepare"]),
        (0, b"MMIDIDY", ["not a Megatron index"]),
        (9, struct.pack("<Q", 2), ["version 2"]),
        (17, b"\x07", ["dtype code 7", "float32"]),
        (17, b"\x63", ["dtype code 99"]),
        (18, struct.pack("<Q", 2**61), ["sequences", "bytes"]),
        (26, struct.pack("<Q", 3), ["document entries"]),
        (34, struct.pack("<i", -3), ["size of sequence 0", "-3"]),
        (34, struct.pack("<i", 4), ["pointer of sequence 1"]),
        (50, struct.pack("<q", 2), ["pointer of sequence 0"]),
        (58, struct.pack("<q", -(2**63)), ["pointer of sequence 1"]),
        (82, struct.pack("<q", 1), ["document index", "from 1"]),
        (90, struct.pack("<q", 3), ["document index decreases"]),
        (114, struct.pack("<q", 5), ["document index", "to 5"]),
    ],
)
def test_doctored_idx(tmp_path: Path, at: int, new: bytes, words: list[str]) -> None:
    write_megatron(tmp_path / "x", DOCUMENTS)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[at : at + len(new)] = new
    (tmp_path / "x.idx").write_bytes(index)
    refused(tmp_path / "x", str(tmp_path / "x.idx"), *words)


def test_truncated_files(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", DOCUMENTS)
    index = (tmp_path / "x.idx").read_bytes()
    tokens = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(tokens[:-1])
    refused(tmp_path / "x", "x.bin", "11 bytes", "12 bytes")
    (tmp_path / "x.idx").write_bytes(index[:-3])
    refused(tmp_path / "x", "x.idx", "truncated")
    (tmp_path / "x.idx").write_bytes(b"")
    refused(tmp_path / "x", "x.idx")


def test_append_eod_bug_is_explained(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1, 2], [3]])
    with open(tmp_path / "x.bin", "ab") as file:
        file.write(bytes(4))
    refused(tmp_path / "x", "--append-eod", "prepare")


def test_lens_that_wrapped_around(tmp_path: Path) -> None:
    long = [0] * 70_000
    write_legacy(tmp_path / "x", [long, [1]])
    refused(tmp_path / "x_ids.npz", "x_ids.npz", "65535", "prepare the data again")


def test_fleetx_lens_and_docs_are_checked(tmp_path: Path) -> None:
    def with_index(**arrays: object) -> Path:
        np.save(tmp_path / "x_ids.npy", np.arange(6, dtype=np.uint16))
        np.savez(tmp_path / "x_idx.npz", **arrays)
        return tmp_path / "x"

    refused(with_index(lens=np.array([3, 2], np.int32)), "lens adds up to 5", "6 ids")
    refused(with_index(lens=np.array([9, -3], np.int32)), "lens has the entry -3")
    refused(with_index(lens=np.array([2**63, 2**63 + 6], np.uint64)), "lens has the entry")
    refused(with_index(lens=np.array([6.0])), "dtype", "not an integer")
    refused(with_index(lens=np.array([[6]])), "one-dimensional")
    refused(with_index(lens=np.array([None])), "dtype '|O'")
    refused(with_index(docs=np.array([0, 1])), "'lens' is missing")
    refused(with_index(lens=np.array([4, 2]), docs=np.array([0, 1])), "docs runs from 0 to 1")
    refused(with_index(lens=np.array([4, 2]), docs=np.array([0, 3, 2])), "docs decreases")
    assert contents(read(with_index(lens=np.array([4, 2])))) == [[0, 1, 2, 3], [4, 5]]


def npy_with_header(
    header: bytes, version: bytes = b"\x01\x00", length: int | None = None
) -> bytes:
    size = len(header) if length is None else length
    packed = struct.pack("<H" if version[0] == 1 else "<I", size)
    return b"\x93NUMPY" + version + packed + header


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not a .npy file"),
        (b"PK\x03\x04not numpy", "not a .npy file"),
        (npy_with_header(b"", b"\x09\x00"), "version 9.0"),
        (npy_with_header(b"{}", b"\x02\x00", 2**32 - 1), "header length 4294967295"),
        (npy_with_header(b"(" * 4000), "malformed"),
        (npy_with_header(b"-" * 4000), "malformed"),
        (npy_with_header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"), "integer"),
        (npy_with_header(b"{'descr': '|O8', 'fortran_order': False, 'shape': (1,), }"), "integer"),
        (npy_with_header(b"{'descr': '<u2', 'fortran_order': False, 'shape': (), }"), "shape"),
        (
            npy_with_header(b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,), }" % 10**17),
            "truncated",
        ),
        (
            npy_with_header(b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,), }" % 10**40),
            "shape",
        ),
        (
            npy_with_header(b"{'descr': __import__('os').abort(), 'shape': (1,), }"),
            "malformed",
        ),
    ],
)
def test_hostile_npy_headers(tmp_path: Path, content: bytes, word: str) -> None:
    write_fleetx(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x_ids.npy").write_bytes(content)
    refused(tmp_path / "x", "x_ids.npy", word)


def test_zip_bomb_is_refused_without_expanding_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x_ids.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,), }" % (1 << 26)
        with archive.open("ids.npy", "w") as member:
            member.write(npy_with_header(header))
            for _ in range(128):
                member.write(bytes(1 << 20))
        archive.writestr("lens.npy", b"")
    assert (tmp_path / "x_ids.npz").stat().st_size < 1 << 20
    refused(tmp_path / "x", "x_ids.npz[ids]", "expands", "beyond the limits")


def test_compressed_member_announcing_more_than_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_legacy(tmp_path / "x", DOCUMENTS, compressed=True)
    content = bytearray((tmp_path / "x_ids.npz").read_bytes())
    central = content.index(b"PK\x01\x02")
    content[central + 24 : central + 28] = struct.pack("<I", 1 << 25)
    (tmp_path / "x_ids.npz").write_bytes(content)
    refused(tmp_path / "x", "x_ids.npz[ids]")
    monkeypatch.setattr(npy, "MAX_COMPRESSED_BYTES", 10)
    refused(tmp_path / "x", "beyond the limits")


def test_unsupported_or_encrypted_archives(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x_ids.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("ids.npy", b"")
    refused(tmp_path / "x", "x_ids.npz[ids]", "compression")
    write_legacy(tmp_path / "x", DOCUMENTS)
    content = bytearray((tmp_path / "x_ids.npz").read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the flag in the archive's directory
    (tmp_path / "x_ids.npz").write_bytes(content)
    refused(tmp_path / "x", "x_ids.npz[ids]")


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    dataset = read(write_megatron(tmp_path / "x", DOCUMENTS))
    dataset.check_ids(301)
    with pytest.raises(DataError, match=r"x\.bin: token id 300 is outside the vocabulary of 300"):
        dataset.check_ids(300)
    negative = read(write_megatron(tmp_path / "y", [[1, -7]], "int32"))
    with pytest.raises(DataError, match="token id -7"):
        negative.check_ids(100)


def test_id_check_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_megatron(tmp_path / "x", DOCUMENTS, "int32")
    read(tmp_path / "x").check_ids(301)
    with monkeypatch.context() as patch:
        patch.setattr(TokenDataset, "_id_range", lambda *_: pytest.fail("read again"))
        read(tmp_path / "x").check_ids(301)
    for record in (tmp_path / ".fourfold_cache").glob("*.json"):
        record.write_text("[damaged")
    read(tmp_path / "x").check_ids(301)
    write_megatron(tmp_path / "x", [[5, 6, 7], [], [8, 9], [400]], "int32")
    with pytest.raises(DataError, match="token id 400"):
        read(tmp_path / "x").check_ids(301)


def test_an_interrupted_id_check_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [[number % 300 for number in range(100)]] * 50
    write_megatron(tmp_path / "x", ids, "int32")
    monkeypatch.setattr(datasets_module, "BLOCK", 100)
    monkeypatch.setattr(datasets_module, "KEEP_SECONDS", 0.0)
    alive: list[int] = []

    def killed() -> None:
        alive.append(1)
        if len(alive) == 30:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fourfold.heartbeat.alive", killed)
        with pytest.raises(KeyboardInterrupt):
            read(tmp_path / "x").check_ids(301)
    begun: list[int] = []
    id_range = TokenDataset._id_range

    def seen(self: TokenDataset, begin: int = 0, *rest: object) -> tuple[int, int]:
        begun.append(begin)
        return id_range(self, begin, *rest)

    monkeypatch.setattr(TokenDataset, "_id_range", seen)
    with pytest.raises(DataError, match="token id 99 is outside"):
        read(tmp_path / "x").check_ids(50)
    assert 0 < begun[0] < 5000
    with pytest.raises(DataError, match="token id 99 is outside"):
        read(tmp_path / "x").check_ids(50)
    assert len(begun) == 1, "the result was kept"


def test_ids_of_prepared_data_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest vouches for them, as long as it fits the files and the vocabulary."""
    prepare(["1 2 3", "4 5"], tmp_path / "x", Numbers(vocab_size=100))
    manifest = json.loads((tmp_path / "x.json").read_text())
    looked: list[TokenDataset] = []
    look = TokenDataset._cached_id_range

    def recorded(self: TokenDataset) -> tuple[int, int]:
        looked.append(self)
        return look(self)

    monkeypatch.setattr(TokenDataset, "_cached_id_range", recorded)
    read(tmp_path / "x").check_ids(100)
    with cache.trusting():
        read(tmp_path / "x").check_ids(50)
    assert not looked
    with pytest.raises(DataError, match="token id 99 is outside the vocabulary of 50"):
        read(tmp_path / "x").check_ids(50)
    changes = [{"bytes": {"bin": 3}}, {"tokens": 6}, {"sha256": None}, {"tokenizer": None}]
    for change in changes:
        (tmp_path / "x.json").write_text(json.dumps(manifest | change))
        read(tmp_path / "x").check_ids(100)
    assert len(looked) == 1 + len(changes)


def test_a_rank_that_trusts_reads_no_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_megatron(tmp_path / "x", DOCUMENTS)
    first = read(tmp_path / "x")
    first.keep_fingerprint()
    with cache.trusting(), monkeypatch.context() as patch:
        patch.setattr("fourfold.data.readers._check_sequences", lambda *_: pytest.fail("read"))
        patch.setattr(TokenDataset, "_hashed", lambda *_: pytest.fail("read"))
        second = read(tmp_path / "x")
        assert second.fingerprint == first.fingerprint
        assert [second.tokens(d).tolist() for d in range(len(second))] == DOCUMENTS
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-2])
    with cache.trusting():
        refused(tmp_path / "x", "x.bin")


def test_manifest_beside_the_data(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", DOCUMENTS)
    assert read(tmp_path / "x").manifest is None
    manifest = {"fourfold": "0.1.0", "documents": 4}
    (tmp_path / "x.json").write_text(json.dumps(manifest))
    assert read(tmp_path / "x").manifest == manifest
    for foreign in ('{"text": "raw input"}', "[" * 100_000, '{"text": 1}\n{"text": 2}', "\xff"):
        (tmp_path / "x.json").write_text(foreign)
        assert read(tmp_path / "x").manifest is None
