"""`fourfold target`: what it says about logs and run directories, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli import main

PUBLISHED = Path(__file__).parent.parent / "metrics" / "log_megatron_175b.txt"


def target(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code, and all that was said."""
    with pytest.raises(SystemExit) as ended:
        main(["target", *map(str, words)])
    said = capsys.readouterr()
    return int(str(ended.value.code)), said.out + said.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 30 steps, logged every 10, evaluated after 20."""
    losses = {10: 5.0, 20: 4.0, 30: 3.0}
    records = [
        {"kind": "train", "step": step, "loss": loss, "ips": 100.0 + step}
        for step, loss in losses.items()
    ]
    records.insert(2, {"kind": "eval", "step": 20, "loss": 4.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return tmp_path


def test_the_published_run_misses_its_own_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = target(capsys, PUBLISHED, "--preset", "gpt3-175b")
    assert code == 1
    assert "met          loss 9.002386 at step 2400, wanted below 9.01" in said
    assert "not met      ppl 8181.144 evaluated at step 2400, wanted below 8181" in said
    assert "a floor" in said


def test_what_is_given_goes_over_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--preset", "gpt3-175b", "--ppl", 8182, "--tgs", 142)
    code, said = target(capsys, PUBLISHED, *words)
    assert code == 0
    assert "tgs 142.332, the median of 7 lines, wanted at least 142" in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--loss", 3.5], 0, "loss 3.000000 at step 30"),
        (["--loss", 3.0], 1, "not met      loss 3.000000"),
        (["--step", 20, "--loss", 4.5], 0, "loss 4.000000 at step 20"),
        (["--step", 29, "--loss", 4.5], 0, "loss 4.000000 at step 20"),
        (["--step", 20, "--ppl", 91], 0, "ppl 90.017 evaluated at step 20"),
        (["--step", 30, "--ppl", 91], 0, "ppl 90.017 evaluated at step 20"),
        (["--step", 10, "--ppl", 91], 1, "ppl 148.413 from the training loss at step 10"),
        (["--tgs", 120], 0, "tgs 120.000, the median of 3 lines"),
        (["--tgs", 120.5], 1, "not met      tgs"),
        (["--step", 31, "--loss", 9], 2, "step 31 is not reached: the log ends at step 30"),
        (["--step", 31, "--ppl", 9], 2, "not reached"),
        (["--step", 31, "--loss", 9, "--tgs", 500], 1, "not reached"),
        (["--step", 9, "--loss", 9], 2, "no training line up to step 9"),
        (["--step", 9, "--ppl", 9], 2, "no training line up to step 9"),
        ([], 2, "no target is given"),
        (["--loss", "nan"], 2, "--loss nan"),
        (["--preset", "gpt5"], 2, "gpt5"),
    ],
)
def test_targets_of_a_run(
    run: Path, words: list[object], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text = target(capsys, run, *words)
    assert (found, said in text) == (code, True), text


def test_steps_that_were_done_again_count_as_done_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = " iteration {:8d}/     100 | lm loss: {:.6E} |\n"
    log = tmp_path / "log.txt"
    steps = [(10, 5.0), (20, 4.0), (30, 1.0), (20, 4.5)]
    log.write_text("".join(line.format(*each) for each in steps))
    assert target(capsys, log, "--step", 20, "--loss", 4.2)[0] == 1
    code, said = target(capsys, log, "--step", 30, "--loss", 4.2)
    assert code == 2 and "the log ends at step 20" in said


def test_a_loss_that_is_no_number_is_not_met(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "step": 40, "loss": "NaN", "ips": 1}\n')
    assert target(capsys, run, "--loss", 9)[0] == 1


def test_a_line_without_a_loss_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(" iteration       10/     100 | consumed samples: 5 |\n")
    code, said = target(capsys, log, "--loss", 9)
    assert code == 2 and "Megatron leaves out one that is not a number" in said


@pytest.mark.parametrize("name", ["missing", "empty", "other.txt"])
def test_what_is_no_log_is_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.txt").write_text("nothing of the kind\n")
    code, said = target(capsys, tmp_path / name, "--loss", 9)
    assert code == 2 and name in said and "Traceback" not in said
