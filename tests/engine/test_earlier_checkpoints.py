"""Runs begun by an earlier Fourfold go on as it would have gone on itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.earlier_runs import (
    CASES,
    FOLDER,
    LAST,
    SAVED,
    digest,
    losses,
    processor,
    sums,
    tensors,
    train,
)


@pytest.mark.parametrize("case", CASES)
def test_an_earlier_checkpoint_goes_on_bit_for_bit(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back again
    expected = json.loads((FOLDER / case / "expected.json").read_text())
    step = tmp_path / "run" / f"step_{SAVED}"
    shutil.copytree(FOLDER / case / step.name, step)
    assert digest(tensors(step)) == expected["saved"]
    train(case, tmp_path)
    told, found = losses(tmp_path / "run"), tensors(tmp_path / "run" / f"step_{LAST}")
    assert set(told) == {str(number) for number in range(SAVED + 1, LAST + 1)}, "it did not resume"
    if processor() == expected["processor"]:
        assert digest(found) == expected["last"]
        assert told.items() <= expected["losses"].items()
    assert told == pytest.approx({number: expected["losses"][number] for number in told}, rel=1e-3)
    for name, pair in sums(found).items():
        assert pair == pytest.approx(expected["sums"][name], rel=2e-2, abs=2e-3), name
