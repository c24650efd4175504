"""A file named SAVE asks for a checkpoint now, on all ranks at the same step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.tiny_run import Configure

from fourfold import checkpoint
from fourfold.engine import build_engine
from fourfold.signals import SaveRequest

FEW = (
    "Engine.max_steps=4",
    "Engine.eval_freq=0",
    "Engine.test_iters=0",
    "Engine.save_load.save_steps=0",
    "Engine.save_load.keep_last=0",
)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_is_made_when_it_is_asked_for(
    configure: Configure, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(configure("run", *FEW, f"Engine.save_load.async_save={in_background}"))
    real = engine.schedule.lr_at

    def asking(step: int) -> float:
        if step == 2:
            (engine.output_dir / "SAVE").touch()
        return real(step)

    monkeypatch.setattr(engine, "schedule", type("Asking", (), {"lr_at": staticmethod(asking)}))
    engine.fit()
    found = {path.name for path in checkpoint.candidates(engine.output_dir)}
    assert "step_4" in found and found & {"step_2", "step_3"}
    assert len(found) <= 3
    assert not (engine.output_dir / "SAVE").exists()


def test_a_request_is_used_up_by_a_commit_and_by_nothing_else(tmp_path: Path) -> None:
    request, file = SaveRequest(tmp_path), tmp_path / "SAVE"
    assert not request.asked()
    request.committed()
    file.touch()
    assert request.asked()
    assert not SaveRequest(tmp_path, watches_file=False).asked()
    request.take()
    assert not request.asked() and file.exists()
    request.committed()
    assert not file.exists()
    # One that comes while a save is under way is another.
    file.touch()
    request.take()
    os.utime(file, ns=(1, 1))
    assert request.asked()
    request.committed()
    assert file.exists() and request.asked()
