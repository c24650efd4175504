"""inspect: the numbers are right, the picture fits, foreign text cannot steer the terminal."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers.file_commands import error_of, run
from helpers.token_files import WRITERS, documents_of, write_fleetx, write_megatron
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data import open_datasets
from fourfold.tokenizer import Tokenizer, train
from fourfold.tools.prepare.pipeline import prepare
from fourfold.tools.tokens import transform
from fourfold.tools.tokens.histogram import bars, bin_edges, count_lengths, draw
from fourfold.tools.tokens.inspect import inspect, length_statistics, render
from fourfold.tools.tokens.verify import verify

TEXTS = ["the cat sat on the mat", "the rat", "\x1b[2Jthe\tcat\u202e sat\nand the rat"]


MANIFEST_WORDS = """version fourfold tokenizer identity vocab_size eos_id name path append_eod
documents tokens dtype format inputs bytes sha256 bin idx _ids.npy a/b derived command sources notes
prefix dropped count short_documents"""
KEYS = st.sampled_from(MANIFEST_WORDS.split())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["the cat sat on the mat, the rat sat on the cat. " * 3], 270)


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(tmp_path / "tokenizer.json")
    prepare(TEXTS, tmp_path / "data" / "x", tokenizer)
    return tmp_path / "data" / "x"


def test_key_lines(prepared: Path, tokenizer: Tokenizer) -> None:
    lines = run("inspect", prepared).stdout.splitlines()
    assert lines[0] == str(prepared)
    assert "  format     megatron (x.bin, x.idx)" in lines
    assert "  documents  3" in lines
    tokens = sum(len(ids) + 1 for ids in tokenizer.encode_batch(TEXTS))
    assert f"  tokens     {tokens}, largest id 269" in lines
    assert "  endings    100.00% of documents end with id 269" in lines
    assert any(
        line.startswith("  tokenizer  ") and tokenizer.identity[:16] in line for line in lines
    )
    assert any(line.startswith("  origin     fourfold ") for line in lines)
    assert "    │ the cat sat on the mat<|endoftext|>" in lines


def test_control_characters_are_escaped(prepared: Path) -> None:
    output = run("inspect", prepared).stdout
    assert all(char.isprintable() or char == "\n" for char in output)
    assert "    │ \\x1b[2Jthe\\tcat\\u202e sat\n    │ and the rat<|endoftext|>" in output


def test_json_is_for_machines(prepared: Path) -> None:
    (report,) = json.loads(run("inspect", prepared, "--json", "--samples", "1").stdout)
    assert report["documents"] == 3
    assert (
        report["tokens"]
        == sum(entry["tokens"] for entry in report["histogram"])
        == report["manifest"]["tokens"]
    )
    assert sum(entry["documents"] for entry in report["histogram"]) == 3
    assert report["bytes"] == sum(report["files"].values()) > 0
    assert report["eos_terminated"] == 1.0
    assert [sample["text"] for sample in report["samples"]] == [TEXTS[0] + "<|endoftext|>"]


@pytest.mark.parametrize("form", WRITERS)
def test_every_format_and_no_manifest(tmp_path: Path, form: str) -> None:
    WRITERS[form](tmp_path / "x", documents_of([3, 0, 2]))
    output = run("inspect", tmp_path / "x").stdout
    assert f"  format     {form} (" in output
    assert "  lengths    min 0, median 2, mean 1.7, p99 3, max 3\n" in output
    assert "  tokens     5, largest id 5\n" in output
    assert "  origin     unknown (no manifest)\n" in output
    assert "  endings    unknown" in output
    assert "  Document 0 (3 tokens)\n    ids 1 2 3\n" in output
    assert "give --tokenizer" in output


def test_a_directory_shows_every_dataset(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1]])
    write_fleetx(tmp_path / "b", [[1], [2]])
    output = run("inspect", tmp_path, "--samples", "0").stdout
    assert output.startswith(f"{tmp_path / 'a'}\n")
    assert f"\n\n{tmp_path / 'b'}\n" in output
    assert len(json.loads(run("inspect", tmp_path, "--json").stdout)) == 2
    assert "name one of them" in error_of("inspect", tmp_path, "--png", tmp_path / "p.png")


def test_share_of_terminated_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_id
    documents = [[1, eos], [eos, 1], [], [eos], [2]]
    tokenizer.save(tmp_path / "t.json")
    prefix = write_megatron(tmp_path / "x", documents)
    (report,) = json.loads(
        run("inspect", prefix, "--tokenizer", tmp_path / "t.json", "--json").stdout
    )
    assert report["eos_terminated"] == 2 / 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.data.datasets.BLOCK", 2)
        (dataset,) = open_datasets(prefix)
        assert inspect(dataset, tokenizer)["eos_terminated"] == 2 / 5


def test_another_tokenizer_is_pointed_out(prepared: Path, tmp_path: Path) -> None:
    train(["a dog and a log and a fog " * 9], 262).save(tmp_path / "other.json")
    output = run("inspect", prepared, "--tokenizer", tmp_path / "other.json").stdout
    assert "Note: the tokenizer given is not the one the data was made with" in output
    assert "is not in the tokenizer's vocabulary of 262" in output
    (tmp_path / "tokenizer.json").unlink()
    assert "Note: the tokenizer of the data was not found" in run("inspect", prepared).stdout
    train(["a dog and a log and a fog " * 9], 262).save(tmp_path / "tokenizer.json")
    assert "Note: the tokenizer of the data was not found" in run("inspect", prepared).stdout


def test_sentences_and_documents(tmp_path: Path) -> None:
    write_fleetx(tmp_path / "x", [[1], [2], [3]])
    lens = np.ones(3, np.int32)
    np.savez(tmp_path / "x_idx.npz", lens=lens, docs=np.array([0, 2, 3]))
    assert "  documents  3 sequences of 2 documents" in run("inspect", tmp_path / "x").stdout


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("\x1b[2J"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(manifest=st.dictionaries(KEYS, VALUES))
@settings(max_examples=150, deadline=None)
def test_any_manifest_is_survived(
    manifest: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = write_megatron(tmp_path_factory.mktemp("manifest") / "x", [[1, 2], [3]])
    Path(f"{prefix}.json").write_text(json.dumps({"fourfold": "0", **manifest}))
    (dataset,) = open_datasets(prefix)
    report = inspect(dataset)
    assert all(char.isprintable() or char == "\n" for char in render(report))
    json.dumps(report)
    verify(prefix)
    transform.merge([prefix, prefix], prefix.with_name("y"))


def test_nothing_in_it(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [])
    output = run("inspect", tmp_path / "x").stdout
    assert "  documents  0\n" in output
    assert "by length" not in output
    assert "nothing to draw" in error_of("inspect", tmp_path / "x", "--png", tmp_path / "p.png")
    assert "no such directory or dataset" in error_of("inspect", tmp_path / "absent")


LENGTHS = st.lists(st.integers(0, 50) | st.integers(0, 2**31 - 1), min_size=1, max_size=30)


@given(lengths=LENGTHS, most=st.integers(8, 80))
@settings(max_examples=200)
def test_bins_hold_every_document(lengths: list[int], most: int) -> None:
    sizes = np.array(lengths, np.int32)
    histogram = count_lengths(sizes, most)
    assert len(histogram) <= most
    for entry in histogram:
        inside = sizes[(sizes >= entry["first"]) & (sizes <= entry["last"])]
        assert entry["documents"] == len(inside)
        assert entry["tokens"] == inside.sum(dtype=np.int64)
    assert sum(entry["documents"] for entry in histogram) == len(lengths)
    assert histogram[0]["documents"] > 0 and histogram[-1]["documents"] > 0
    assert all(len(line) <= 78 for line in bars(histogram))


def test_bins_are_logarithmic() -> None:
    assert bin_edges(4, 100_000, 22).tolist() == [2**power for power in range(2, 18)]
    assert bin_edges(100, 300, 8).tolist() == [91, 108, 128, 152, 181, 215, 256, 304]
    assert bin_edges(0, 0, 8).tolist() == [0, 1]
    assert bin_edges(7, 7, 8).tolist() == [7, 8]


def test_bars_are_as_long_as_their_counts() -> None:
    lines = bars(count_lengths(np.array([1] * 8 + [2] * 4 + [4]), 22))
    eighths = [
        sum(
            8 if char == "█" else " ▏▎▍▌▋▊▉".index(char)
            for char in line.split("│")[1].split("  ")[0]
        )
        for line in lines[1:]
    ]
    assert eighths[0] == 2 * eighths[1] == 8 * eighths[3]
    assert eighths[2] == 0
    assert lines[1].endswith("8  61.5%  40.0%")


@given(lengths=LENGTHS)
@settings(max_examples=100)
def test_length_statistics(lengths: list[int]) -> None:
    statistics = length_statistics(np.array(lengths, np.int32))
    assert statistics is not None
    assert statistics["min"] == min(lengths)
    assert statistics["max"] == max(lengths)
    assert statistics["median"] == np.median(np.array(lengths, np.float64))
    assert statistics["mean"] == pytest.approx(np.mean(np.array(lengths, np.float64)))
    at_most = sum(length <= statistics["p99"] for length in lengths)
    assert statistics["p99"] in lengths
    assert at_most >= 0.99 * len(lengths) > sum(length < statistics["p99"] for length in lengths)


@pytest.mark.parametrize("lengths", [[0], [5] * 9, [0, 1, 1], [3, 40, 900_000], [0, 2**31 - 1]])
def test_the_picture(tmp_path: Path, lengths: list[int]) -> None:
    sizes = np.array(lengths, np.int32)
    statistics = length_statistics(sizes)
    assert statistics is not None
    file = draw(sizes, statistics, "$odd_name$", tmp_path / "new" / "p.png")
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1350, 825)
    assert [entry.name for entry in file.parent.iterdir()] == ["p.png"]


def test_the_picture_by_command(prepared: Path, tmp_path: Path) -> None:
    result = run("inspect", prepared, "--png", tmp_path / "p.png")
    assert result.stdout.endswith(f"Picture: {tmp_path / 'p.png'}\n")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_a_picture_that_cannot_be_written(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = error_of("inspect", prepared, "--png", tmp_path / "file" / "p.png")
    assert "p.png: cannot be written (" in message
