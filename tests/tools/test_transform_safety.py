"""What merge, split and convert write is whole or not there, and nothing is replaced unasked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.file_commands import contents, error_of, run
from helpers.token_files import WRITERS, documents_of, write_fleetx, write_megatron

from fourfold.data import open_datasets
from fourfold.data.datasets import FORMATS
from fourfold.errors import DataError
from fourfold.tools.prepare import writers
from fourfold.tools.tokens import transform
from fourfold.tools.tokens.verify import verify

NAMES = list(WRITERS)


@pytest.mark.parametrize("form", NAMES)
def test_existing_outputs_are_kept_unless_told(tmp_path: Path, form: str) -> None:
    source = write_megatron(tmp_path / "source", [[1, 2]])
    made = WRITERS[form](tmp_path / "made", [[9]])
    words = ("convert", source, "--to", form, "--output-prefix", made)
    assert "exists already; choose another prefix or give --overwrite" in error_of(*words)
    assert contents(made) == [[9]]
    assert run(*words, "--overwrite").exit_code == 0
    assert contents(made) == [[1, 2]]
    assert verify(made).problems == []


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = write_megatron(tmp_path / "source", [[1, 2]])
    fleetx = write_fleetx(tmp_path / "other", [[1]])
    (tmp_path / "text.json").write_text('{"text": "hello"}\n')
    for output, words in (
        (source, "is a source"),
        (fleetx, "exists in the fleetx format"),
        (tmp_path / "text", "is not a manifest"),
        (tmp_path, "is a directory"),
    ):
        message = error_of(
            "convert", source, "--to", "megatron", "--output-prefix", output, "--overwrite"
        )
        assert words in message
    assert contents(source) == [[1, 2]]
    assert "name one of them" in error_of(
        "split", tmp_path, "--parts", "1", "--output-prefix", tmp_path / "q"
    )
    assert run("convert", source, "--to", "paper", "--output-prefix", "x").exit_code == 2


def test_a_refused_part_leaves_no_half_split(tmp_path: Path) -> None:
    source = write_megatron(tmp_path / "source", documents_of([1] * 10))
    write_megatron(tmp_path / "q_valid", [[1]])
    with pytest.raises(DataError, match="q_valid: exists already"):
        transform.split(source, "8,2", tmp_path / "q")
    assert not list(tmp_path.glob("q_train*"))


@pytest.mark.parametrize("form", NAMES)
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_megatron(tmp_path / "source", [[1, 2], [3]])
    before = sorted(tmp_path.iterdir())

    def full_disk(files: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writers, "commit", full_disk)
    with pytest.raises(DataError, match=r"made: cannot be written \(No space left on device\)"):
        transform.convert(source, form, tmp_path / "made")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", NAMES)
def test_final_names_appear_last_and_the_manifest_after_all(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_megatron(tmp_path / "source", [[1, 2], [3]])
    WRITERS[form](tmp_path / "made", [[9]])
    order: list[str] = []
    replace, unlink = Path.replace, Path.unlink

    def noted_replace(self: Path, target: Path) -> Path:
        order.append(Path(target).name)
        return replace(self, target)

    def noted_unlink(self: Path, missing_ok: bool = False) -> None:
        if not self.name.startswith("."):
            order.append(f"-{self.name}")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "replace", noted_replace)
    monkeypatch.setattr(Path, "unlink", noted_unlink)
    transform.convert(source, form, tmp_path / "made", overwrite=True)
    names = [f"made{ending}" for ending in FORMATS[form].endings] + ["made.json"]
    assert order == [f"-{name}" for name in reversed(names[1:])] + names


def test_progress_is_lines_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_megatron(tmp_path / "source", documents_of([40, 60]))
    words = ("convert", source, "--to", "fleetx", "--output-prefix")
    assert run(*words, tmp_path / "quick").stderr == ""
    monkeypatch.setattr("fourfold.cli.progress.SECONDS_BETWEEN_LINES", 1e-9)
    monkeypatch.setattr("fourfold.data.datasets.BLOCK", 50)
    first, last = run(*words, tmp_path / "slow").stderr.splitlines()
    assert first.startswith("convert: 50% of 0 MB, ") and last.startswith("convert: 100% of ")
    assert last.endswith(" MB/s, 0 s left")


SLOW_WRITER = """
import sys, time
from fourfold.tools.tokens import transform

def wait(done, total):
    print("writing", flush=True)
    time.sleep(60)

transform.convert(sys.argv[1], sys.argv[2], sys.argv[3], progress=wait)
"""


@pytest.mark.parametrize("form", ["megatron", "legacy"])
def test_killed_while_writing_no_dataset_is_seen(tmp_path: Path, form: str) -> None:
    source = write_megatron(tmp_path / "source", documents_of([5, 5]))
    target = tmp_path / "out" / "made"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(source), form, str(target)],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    left = list(target.parent.iterdir())
    assert left and all(file.name.startswith(".") for file in left)
    with pytest.raises(DataError, match="holds no dataset"):
        open_datasets(target.parent)
    transform.convert(source, form, target)
    assert contents(target) == contents(source)
