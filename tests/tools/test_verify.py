"""verify finds every kind of damage, names it, and says what it could not check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.file_commands import error_of, run
from helpers.token_files import WRITERS, write_fleetx, write_megatron
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data.datasets import FORMATS
from fourfold.tokenizer import train
from fourfold.tools.prepare.pipeline import prepare
from fourfold.tools.tokens import transform
from fourfold.tools.tokens.verify import verify

DOCUMENTS = [[5, 6, 7], [], [8, 9], [99]]


def made(prefix: Path, form: str = "megatron", **changes: Any) -> Path:
    """A good dataset with a manifest that knows the vocabulary; `changes` go into the manifest."""
    raw = WRITERS[form](prefix.with_name(f"raw_{prefix.name}"), DOCUMENTS)
    transform.convert(raw, form, prefix)
    for ending in FORMATS[form].endings:
        Path(f"{raw}{ending}").unlink()
    change_manifest(
        prefix, tokenizer={"identity": "1111", "vocab_size": 100, "eos_id": 99}, **changes
    )
    return prefix


def change_manifest(prefix: Path, **changes: Any) -> None:
    file = Path(f"{prefix}.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def problems(prefix: Path, vocab_size: int | None = None) -> list[str]:
    """What `verify` prints as problems, with its exit code."""
    words = () if vocab_size is None else ("--vocab-size", str(vocab_size))
    result = run("verify", prefix, *words)
    found = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert result.exit_code == (2 if found else 0), result.output
    assert result.stdout.splitlines()[-1].endswith("good") != bool(found)
    return found


@pytest.mark.parametrize("form", WRITERS)
def test_good_files(tmp_path: Path, form: str) -> None:
    prefix = made(tmp_path / "x", form)
    result = run("verify", prefix)
    names = ", ".join(f"x{ending}" for ending in FORMATS[form].endings)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"checked: every byte of {names}",
        "checked: headers, offsets and lengths",
        "checked: 4 documents and 6 tokens",
        "checked: every id within the vocabulary of 100",
        f"{prefix}: good",
    ]


def test_what_prepare_writes_is_good(tmp_path: Path) -> None:
    text = "the cat sat on the mat, the rat sat on the cat. " * 3
    prepare([text, "cat", text[:40]], tmp_path / "x", train([text], 270))
    assert problems(tmp_path / "x") == []
    assert problems(tmp_path / "x", vocab_size=100) != []


@pytest.mark.parametrize("form", WRITERS)
def test_a_flipped_bit_anywhere(tmp_path: Path, form: str) -> None:
    prefix = made(tmp_path / "x", form)
    for ending in FORMATS[form].endings:
        file = Path(f"{prefix}{ending}")
        content = file.read_bytes()
        for at in range(0, len(content), 7):
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            found = verify(prefix).problems
            assert any(f"{file}: sha256 is" in problem for problem in found), (at, found)
        file.write_bytes(content)
    assert problems(prefix) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0\0")


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize(
    ("damage", "word"), [(cut, "truncated"), (grow, "longer than it was")], ids=["cut", "grown"]
)
def test_another_size(tmp_path: Path, form: str, damage: Callable[[Path], None], word: str) -> None:
    prefix = made(tmp_path / "x", form)
    for ending in FORMATS[form].endings:
        file = Path(f"{prefix}{ending}")
        size = file.stat().st_size
        damage(file)
        found = problems(prefix)
        message = f"problem: {file}: {file.stat().st_size} bytes, the manifest says {size}"
        (named,) = (problem for problem in found if problem.startswith(message))
        assert word in named
    damaged = [line for line in problems(prefix) if "the manifest says" in line]
    assert len(damaged) == len(FORMATS[form].endings)


@pytest.mark.parametrize("form", WRITERS)
def test_a_missing_file(tmp_path: Path, form: str) -> None:
    for number, ending in enumerate(FORMATS[form].endings):
        prefix = made(tmp_path / str(number), form)
        Path(f"{prefix}{ending}").unlink()
        expected = f"problem: {prefix}{ending}: missing, but the manifest describes it"
        assert problems(prefix) == [expected]
        assert problems(Path(f"{prefix}.json")) == [expected]


def test_a_directory_reports_every_dataset(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b", "fleetx")
    (tmp_path / "b_idx.npz").unlink()
    made(tmp_path / "c")
    cut(tmp_path / "c.bin")
    write_megatron(tmp_path / "d", DOCUMENTS)
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"weights")
    result = run("verify", tmp_path)
    assert result.exit_code == 2
    verdicts = [line for line in result.stdout.splitlines() if line.startswith(str(tmp_path))]
    assert verdicts == [
        f"{tmp_path / 'a'}: good",
        f"{tmp_path / 'b'}: 1 problem",
        f"{tmp_path / 'c'}: 2 problems",
        f"{tmp_path / 'd'}: good",
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("documents", 5, "documents 4, the manifest says 5"),
        ("tokens", 7, "tokens 6, the manifest says 7"),
        ("dtype", "int32", "dtype uint16, the manifest says int32"),
        ("sha256", {}, "records no hashes"),
        ("sha256", None, "records no hashes"),
    ],
)
def test_a_manifest_of_other_data(tmp_path: Path, key: str, value: object, message: str) -> None:
    (problem,) = problems(made(tmp_path / "x", **{key: value}))
    assert message in problem


def test_a_manifest_with_one_hash_missing(tmp_path: Path) -> None:
    prefix = made(tmp_path / "x")
    hashes = json.loads(Path(f"{prefix}.json").read_text())["sha256"]
    change_manifest(prefix, sha256={"idx": hashes["idx"]})
    (problem,) = problems(prefix)
    assert "x.bin: the manifest records no hash of it" in problem


def test_a_torn_manifest(tmp_path: Path) -> None:
    prefix = made(tmp_path / "x")
    file = Path(f"{prefix}.json")
    file.write_bytes(file.read_bytes()[:200])
    assert problems(prefix) == [f"problem: {file}: the manifest is damaged"]


def test_text_of_the_manifests_name_is_no_manifest(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.json").write_text('{"text": "hello"}\n{"text": "world"}\n')
    result = run("verify", prefix)
    assert result.exit_code == 0
    assert "not checked: sizes and hashes of the files: there is no manifest" in result.stdout


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    prefix = made(tmp_path / "x")
    assert problems(prefix, vocab_size=100) == []
    (problem,) = problems(prefix, vocab_size=8)
    assert "3 of 6 ids are outside the vocabulary of 8" in problem
    assert "the first is 8 at token 3 (document 2)" in problem
    negative = write_megatron(tmp_path / "n", [[1], [2, -3]], "int32")
    (problem,) = problems(negative)
    assert "1 of 3 ids are negative, the first is -3 at token 2 (document 1)" in problem


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any),
    data=st.data(),
    block=st.sampled_from([1, 2, 1 << 22]),
)
@settings(max_examples=30, deadline=None)
def test_the_first_bad_id_is_placed(
    sizes: list[int], data: st.DataObject, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = [[1] * size for size in sizes]
    at = data.draw(st.integers(0, sum(sizes) - 1))
    place = int(np.searchsorted(np.cumsum(sizes), at, side="right"))
    documents[place][0] = 50
    start = sum(sizes[:place])
    prefix = write_megatron(tmp_path_factory.mktemp("ids") / "x", documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.data.datasets.BLOCK", block)
        (problem,) = verify(prefix, vocab_size=50).problems
    assert f"1 of {sum(sizes)} ids" in problem
    assert f"the first is 50 at token {start} (document {place})" in problem


def test_without_a_manifest_what_was_checked_is_said(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "x", DOCUMENTS)
    assert run("verify", prefix).stdout.splitlines() == [
        "checked: headers, offsets and lengths",
        "not checked: sizes and hashes of the files: there is no manifest",
        "not checked: ids within the vocabulary: no manifest says its size; give --vocab-size",
        f"{prefix}: good",
    ]
    index = tmp_path / "x.idx"
    index.write_bytes(index.read_bytes()[:34] + b"\x09" + index.read_bytes()[35:])
    (problem,) = problems(prefix)
    assert "pointer of sequence 1 is 6, the sizes before it give 18" in problem


def test_two_formats_under_one_name(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "x", DOCUMENTS)
    write_fleetx(prefix, DOCUMENTS)
    (problem,) = problems(prefix)
    assert "more than one format (megatron, fleetx)" in problem


def test_nothing_to_verify(tmp_path: Path) -> None:
    assert "no such directory or dataset" in error_of("verify", tmp_path / "absent")
    assert "holds no dataset" in error_of("verify", tmp_path)


@pytest.mark.parametrize("form", WRITERS)
def test_progress_ends_at_its_total(tmp_path: Path, form: str) -> None:
    calls: list[tuple[int, int]] = []
    verify(made(tmp_path / "x", form), progress=lambda *call: calls.append(call))
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert done[-1] <= calls[-1][1]
    assert calls[-1][1] - done[-1] < 600  # headers around the ids are read once, not twice
