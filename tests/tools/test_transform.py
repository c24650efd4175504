"""merge, split and convert: nothing lost, the originals' bytes, nothing half-written."""

from __future__ import annotations

import json
import struct
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from helpers.file_commands import contents, error_of, read, run
from helpers.token_files import (
    CODES,
    WRITERS,
    Documents,
    documents_of,
    idx_bytes,
    write_fleetx,
    write_megatron,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cli import data as data_commands
from fourfold.config.recipe import Rounding
from fourfold.data.datasets import FORMATS
from fourfold.data.readers import document_index
from fourfold.data.samples import PARTS, document_ranges
from fourfold.errors import DataError
from fourfold.tools.tokens import transform
from fourfold.tools.tokens.verify import verify

NAMES = list(WRITERS)
SENTENCES = [[1, 2], [3], [], [4, 5, 6], [7]]
DOCS = [0, 2, 2, 5]  # two sentences, an empty document, three sentences


def with_manifest(
    prefix: Path, documents: Documents, identity: str, form: str = "megatron"
) -> Path:
    """A dataset with a manifest that names a tokenizer."""
    raw = WRITERS[form](prefix.with_name(f"raw_{prefix.name}"), documents)
    transform.convert(raw, form, prefix)
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    manifest["tokenizer"] = {"identity": identity, "vocab_size": 100, "eos_id": 99}
    Path(f"{prefix}.json").write_text(json.dumps(manifest))
    return prefix


def sentence_megatron(prefix: Path) -> Path:
    sizes = [len(sentence) for sentence in SENTENCES]
    index = bytearray(idx_bytes(sizes))
    index[26:34] = struct.pack("<Q", len(DOCS))
    index[34 + 12 * len(sizes) :] = np.array(DOCS, "<i8").tobytes()
    write_megatron(prefix, SENTENCES)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def sentence_fleetx(prefix: Path) -> Path:
    write_fleetx(prefix, SENTENCES)
    lens = np.array([len(sentence) for sentence in SENTENCES], np.int32)
    np.savez(f"{prefix}_idx.npz", lens=lens, docs=np.array(DOCS))
    return prefix


@given(
    documents=st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=12),
    forms=st.permutations(NAMES),
    block=st.sampled_from([1, 3, 1 << 22]),
)
@settings(max_examples=40, deadline=None)
def test_round_trips_through_all_formats(
    documents: list[list[int]],
    forms: list[str],
    block: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("round")
    source = WRITERS[forms[0]](directory / "source", documents)
    with pytest.MonkeyPatch.context() as patch:
        # Documents and their index across the borders of blocks.
        patch.setattr("fourfold.data.datasets.BLOCK", block)
        patch.setattr("fourfold.tools.prepare.writers.BLOCK", block)
        for step, form in enumerate([*forms[1:], forms[0]]):
            target = directory / str(step)
            manifest = transform.convert(source, form, target)
            assert contents(target) == documents
            assert read(target).dtype == np.uint16
            assert manifest["documents"] == len(documents)
            source = target
    first, last = directory / "source", source
    for ending in FORMATS[forms[0]].endings:
        assert Path(f"{first}{ending}").read_bytes() == Path(f"{last}{ending}").read_bytes()


@pytest.mark.parametrize(("source", "target"), product(NAMES, NAMES))
def test_conversion_gives_the_bytes_of_the_original_writers(
    tmp_path: Path, source: str, target: str
) -> None:
    documents = documents_of([3, 0, 5, 1])
    WRITERS[source](tmp_path / "source", documents)
    expected = WRITERS[target](tmp_path / "expected", documents)
    transform.convert(tmp_path / "source", target, tmp_path / "made")
    for ending in FORMATS[target].endings:
        made = (tmp_path / f"made{ending}").read_bytes()
        assert made == Path(f"{expected}{ending}").read_bytes()


@pytest.mark.parametrize("write", [sentence_megatron, sentence_fleetx])
@pytest.mark.parametrize("target", ["megatron", "fleetx"])
def test_sentences_stay_grouped(tmp_path: Path, write: object, target: str) -> None:
    write(tmp_path / "source")  # type: ignore[operator]
    transform.convert(tmp_path / "source", target, tmp_path / "made")
    assert contents(tmp_path / "made") == SENTENCES
    index = document_index(read(tmp_path / "made"))
    assert index is not None and index.tolist() == DOCS


def test_legacy_cannot_group_sentences(tmp_path: Path) -> None:
    sentence_fleetx(tmp_path / "source")
    with pytest.raises(DataError, match=r"split into sentences.*--force"):
        transform.convert(tmp_path / "source", "legacy", tmp_path / "made")
    assert sorted(tmp_path.glob(".*")) == []
    manifest = transform.convert(tmp_path / "source", "legacy", tmp_path / "made", force=True)
    assert contents(tmp_path / "made") == SENTENCES
    notes = manifest["derived"]["notes"]
    assert "1 documents without a sequence are left out" in notes[0]
    assert "sentences became documents" in notes[1]
    assert document_index(read(tmp_path / "made")) is None


def test_empty_documents_of_megatron_are_kept_where_they_can_be(tmp_path: Path) -> None:
    index = bytearray(idx_bytes([2, 1]))
    index[26:34] = struct.pack("<Q", 5)
    index[34 + 24 :] = np.array([0, 0, 1, 1, 2], "<i8").tobytes()
    write_megatron(tmp_path / "source", [[1, 2], [3]])
    (tmp_path / "source.idx").write_bytes(index)
    transform.convert(tmp_path / "source", "fleetx", tmp_path / "fleetx")
    transform.convert(tmp_path / "fleetx", "megatron", tmp_path / "back")
    assert (tmp_path / "back.idx").read_bytes() == index
    assert "  documents  2, and 2 empty\n" in run("inspect", tmp_path / "back").stdout
    result = run(
        "convert", tmp_path / "back", "--to", "legacy", "--output-prefix", tmp_path / "legacy"
    )
    assert "note: 2 documents without a sequence are left out" in result.stdout
    assert contents(tmp_path / "legacy") == [[1, 2], [3]]


def test_legacy_refuses_a_document_its_lengths_cannot_hold(tmp_path: Path) -> None:
    source = write_megatron(tmp_path / "source", [[1], [7] * 65536, [2]])
    message = error_of("convert", source, "--to", "legacy", "--output-prefix", tmp_path / "made")
    assert "document 1 has 65536 tokens" in message
    assert "up to 65535; choose fleetx or megatron" in message
    assert not list(tmp_path.glob("*made*"))
    wide = write_megatron(tmp_path / "wide", [[1], [7] * 65536, [2]], "int32")
    transform.convert(wide, "legacy", tmp_path / "made")
    assert contents(tmp_path / "made") == contents(wide)


@pytest.mark.parametrize(
    ("source", "target", "stored"),
    [(">u2", "megatron", "<u2"), ("uint32", "megatron", "<i8"), ("uint32", "legacy", "<u4")],
)
def test_dtypes_a_format_cannot_store_are_widened(
    tmp_path: Path, source: str, target: str, stored: str
) -> None:
    write_fleetx(tmp_path / "source", [[1, 300], [2]], source)
    transform.convert(tmp_path / "source", target, tmp_path / "made")
    assert contents(tmp_path / "made") == [[1, 300], [2]]
    assert read(tmp_path / "made").dtype == np.dtype(stored)


def test_ids_beyond_every_type_are_refused(tmp_path: Path) -> None:
    write_fleetx(tmp_path / "source", [[1, 2**63]], "uint64")
    with pytest.raises(DataError, match=f"token id {2**63} does not fit in int64"):
        transform.convert(tmp_path / "source", "megatron", tmp_path / "made")


def test_mode_bytes_are_left_out_and_said(tmp_path: Path) -> None:
    write_megatron(tmp_path / "source", [[1, 2], [3]], modes=b"\x00\x01")
    result = run(
        "convert", tmp_path / "source", "--to", "megatron", "--output-prefix", tmp_path / "made"
    )
    assert "note: the mode bytes" in result.stdout
    assert (tmp_path / "made.idx").read_bytes() == idx_bytes([2, 1])


def test_merge_is_the_concatenation_with_shifted_indices(tmp_path: Path) -> None:
    first = sentence_megatron(tmp_path / "a")
    second = write_megatron(tmp_path / "b", [[8], [9, 10]])
    third = write_megatron(tmp_path / "c", [])
    fourth = sentence_megatron(tmp_path / "d")
    transform.merge([first, second, third, fourth], tmp_path / "made")
    parts = [Path(f"{prefix}.bin").read_bytes() for prefix in (first, second, third, fourth)]
    assert (tmp_path / "made.bin").read_bytes() == b"".join(parts)
    sizes = [2, 1, 0, 3, 1, 1, 2, 2, 1, 0, 3, 1]
    pointers = (np.cumsum([0, *sizes])[:-1] * 2).tolist()
    index = [0, 2, 2, 5, 6, 7, 9, 9, 12]
    assert (tmp_path / "made.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, CODES["uint16"], len(sizes), len(index))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(sizes)}q", *pointers)
        + struct.pack(f"<{len(index)}q", *index)
    )


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 6), max_size=5)),
        min_size=1,
        max_size=4,
    ),
    target=st.sampled_from(NAMES),
)
@settings(max_examples=30, deadline=None)
def test_merge_of_any_formats_equals_concatenation(
    parts: list[tuple[str, list[int]]], target: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("merge")
    sources, everything = [], []
    for number, (form, sizes) in enumerate(parts):
        documents = documents_of(sizes, first=100 * number)
        sources.append(WRITERS[form](directory / f"source{number}", documents))
        everything += documents
    transform.merge(sources, directory / "made", target)
    assert contents(directory / "made") == everything
    expected = WRITERS[target](directory / "expected", everything)
    for ending in FORMATS[target].endings:
        made = (directory / f"made{ending}").read_bytes()
        assert made == Path(f"{expected}{ending}").read_bytes()


@pytest.mark.parametrize(
    ("dtypes", "stored"),
    [
        (["uint16", "int32"], "int32"),
        (["int32", "uint16"], "int32"),
        (["uint16", "int16"], "int32"),
        (["uint8", "uint16"], "uint16"),
        (["int32", "int64"], "int64"),
    ],
)
def test_merge_widens_the_dtype(tmp_path: Path, dtypes: list[str], stored: str) -> None:
    sources = [write_megatron(tmp_path / dtype, [[1, 2], [3]], dtype) for dtype in dtypes]
    transform.merge(sources, tmp_path / "made")
    assert read(tmp_path / "made").dtype == np.dtype(stored)
    assert contents(tmp_path / "made") == [[1, 2], [3], [1, 2], [3]]


def test_merge_wants_one_tokenizer(tmp_path: Path) -> None:
    one = with_manifest(tmp_path / "one", [[1]], "1111")
    same = with_manifest(tmp_path / "same", [[2]], "1111", "fleetx")
    other = with_manifest(tmp_path / "other", [[3]], "2222")
    unknown = write_megatron(tmp_path / "unknown", [[4]])
    made = tmp_path / "made"

    assert transform.merge([one, same], made)["tokenizer"]["identity"] == "1111"
    for sources, identity in (([one, other], "2222"), ([one, unknown], "unknown")):
        message = error_of("merge", *sources, "--output-prefix", tmp_path / "refused")
        assert f"{sources[0]}: 1111" in message
        assert f"{sources[1]}: {identity}" in message
        assert "--force" in message
    assert not list(tmp_path.glob("*refused*"))
    result = run("merge", one, other, "--output-prefix", tmp_path / "forced", "--force")
    assert result.exit_code == 0
    assert "note: the sources' tokenizers differ" in result.stdout
    assert "tokenizer" not in read(tmp_path / "forced").manifest
    foreign = run("merge", unknown, unknown, "--output-prefix", tmp_path / "foreign")
    assert "note: no source says which tokenizer" in foreign.stdout


def test_the_manifest_carries_what_the_sources_were(tmp_path: Path) -> None:
    one = with_manifest(tmp_path / "one", [[1], [2, 3]], "1111")
    two = with_manifest(tmp_path / "two", [[4]], "1111")
    transform.merge([one, two], tmp_path / "made")
    transform.convert(tmp_path / "made", "fleetx", tmp_path / "last")
    manifest = read(tmp_path / "last").manifest
    assert manifest is not None
    assert (manifest["documents"], manifest["tokens"], manifest["format"]) == (3, 4, "fleetx")
    assert manifest["tokenizer"]["eos_id"] == 99
    (merged,) = manifest["derived"]["sources"]
    assert merged["manifest"]["derived"]["command"] == "merge"
    sources = merged["manifest"]["derived"]["sources"]
    assert [source["prefix"] for source in sources] == [str(one), str(two)]
    assert [source["documents"] for source in sources] == [[0, 2], [0, 1]]
    assert sources[0]["manifest"] == read(one).manifest
    assert verify(tmp_path / "last").problems == []


@given(sizes=st.lists(st.integers(0, 5), max_size=40), form=st.sampled_from(NAMES))
@settings(max_examples=25, deadline=None)
def test_split_cuts_where_training_cuts(
    sizes: list[int], form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("split")
    documents = documents_of(sizes)
    source = WRITERS[form](directory / "source", documents)
    manifests = transform.split(source, "7,2,1", directory / "made")
    for part, (first, stop) in zip(PARTS, document_ranges("7,2,1", len(documents))):
        if first == stop:
            assert manifests[part] is None
            assert not list(directory.glob(f"made_{part}*"))
        else:
            assert contents(directory / f"made_{part}") == documents[first:stop]


def test_split_says_which_part_is_empty(tmp_path: Path) -> None:
    source = write_megatron(tmp_path / "source", documents_of([2] * 20))
    result = run("split", source, "--parts", "949,50,1", "--output-prefix", tmp_path / "q")
    assert result.exit_code == 0
    assert f"{tmp_path / 'q'}_train: 19 documents, 38 tokens, megatron, uint16" in result.stdout
    assert f"{tmp_path / 'q'}_valid: 1 documents" in result.stdout
    assert f"{tmp_path / 'q'}_test: empty, not written" in result.stdout
    assert "give one to three shares" in error_of(
        "split", source, "--parts", "a,b", "--output-prefix", tmp_path / "r"
    )


def test_split_inside_a_document_of_sentences(tmp_path: Path) -> None:
    source = sentence_fleetx(tmp_path / "source")
    transform.split(source, "4,1,0", tmp_path / "made")
    train, valid = read(tmp_path / "made_train"), read(tmp_path / "made_valid")
    train_index = document_index(train)
    assert train_index is not None and train_index.tolist() == [0, 2, 2, 4]
    assert document_index(valid) is None
    assert contents(tmp_path / "made_valid") == SENTENCES[4:]


def test_the_prefix_given_to_prepare_names_its_result(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x_text_document", [[1, 2], [3]])
    made = tmp_path / "made"
    assert run("verify", tmp_path / "x").stdout.endswith("x_text_document: good\n")
    assert run("inspect", tmp_path / "x").stdout.startswith(f"{tmp_path / 'x_text_document'}\n")
    assert run("merge", tmp_path / "x", "--output-prefix", f"{made}1").exit_code == 0
    assert run("split", tmp_path / "x", "--parts", "1", "--output-prefix", made).exit_code == 0
    words = ("convert", tmp_path / "x", "--to", "fleetx", "--output-prefix", f"{made}2")
    assert run(*words).exit_code == 0
    assert contents(f"{made}1") == contents(f"{made}_train") == contents(f"{made}2")
    write_megatron(tmp_path / "x_title_document", [[1]])
    assert "no such directory or dataset" in error_of("inspect", tmp_path / "x")


def test_the_command_line_offers_every_format_and_rounding() -> None:
    """Its literals are written out there, for --help has no time to import these tables."""
    assert get_args(data_commands.Format) == tuple(FORMATS)
    assert data_commands.Rounding == Rounding
