"""A run that was killed and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.tiny_run import Configure, exit_status, start_child

from fourfold import checkpoint
from fourfold.engine import build_engine
from fourfold.metrics import read_jsonl


def losses(output_dir: Path) -> dict[tuple[str, int], float]:
    records = read_jsonl(output_dir / "metrics.jsonl")
    return {
        (record["kind"], record["step"]): record["loss"]
        for record in records
        if record["kind"] in ("train", "eval", "test")
    }


def contents(directory: Path) -> tuple[dict[str, torch.Tensor], dict]:
    names = checkpoint.tensor_names(directory)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
    state = checkpoint.load(directory, tensors)
    return tensors, state


def assert_same_end(one: Path, other: Path, step: int) -> None:
    ours, our_state = contents(one / f"step_{step}")
    theirs, their_state = contents(other / f"step_{step}")
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
    # The configurations name different directories; everything else is the run's own state.
    del our_state["config"], their_state["config"]
    assert our_state == their_state


def kill_after_step(pid: int, output_dir: Path, step: int) -> None:
    """SIGKILL once `step` is in the log: after its save, somewhere in what follows."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        file = output_dir / "metrics.jsonl"
        if file.exists() and f'"train", "step": {step},' in file.read_text():
            os.kill(pid, signal.SIGKILL)
            assert exit_status(pid) == -signal.SIGKILL
            return
        time.sleep(0.002)
    raise AssertionError("the run never got there")


PRECISIONS = {
    "float32": ["Engine.mix_precision.dtype=float32"],
    "bfloat16": ["Engine.mix_precision.dtype=bfloat16"],
    "bfloat16 O2": ["Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2"],
    "float16": ["Engine.mix_precision.dtype=float16", "Engine.mix_precision.scale_loss=1e9"],
    "fused": ["Fused.tensor_fusion=True"],
    "recompute": ["Model.use_recompute=True", "Model.recompute_granularity=full"],
}


QUICK = ("float32", "bfloat16 O2", "float16")


@pytest.mark.parametrize(
    "precision",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PRECISIONS],
)
def test_killed_and_resumed_equals_straight(
    precision: str, configure: Configure, tmp_path: Path
) -> None:
    overrides = [*PRECISIONS[precision], "Engine.max_steps=30", "Engine.save_load.save_steps=4"]
    overrides.append("Optimizer.lr.decay_steps=30")
    assert exit_status(start_child(build_engine(configure("straight", *overrides)).fit)) == 0
    child = start_child(lambda: build_engine(configure("killed", *overrides)).fit())
    kill_after_step(child, tmp_path / "killed", 5)
    assert checkpoint.candidates(tmp_path / "killed"), "nothing was committed before the kill"
    assert (
        exit_status(start_child(lambda: build_engine(configure("killed", *overrides)).fit())) == 0
    )

    straight = losses(tmp_path / "straight")
    assert len(straight) == 30 + 10 + 1
    assert straight == losses(tmp_path / "killed")
    assert_same_end(tmp_path / "straight", tmp_path / "killed", 30)
    last = [straight["train", step] for step in range(26, 31)]
    assert sum(last) / 5 < straight["train", 1] - 0.05, "the run must learn, or equality is cheap"


def test_fp16_overflow_is_skipped_and_the_scale_survives_resume(configure: Configure) -> None:
    overrides = PRECISIONS["float16"]
    first = build_engine(configure("run", *overrides, "Engine.max_steps=4"))
    first.fit()
    assert first.loss_scale is not None
    assert first.loss_scale.value == 1e9 / 2**4
    assert first.guard.skipped == 4 and first.optimizer.updates == 0
    again = build_engine(configure("run", *overrides, "Engine.max_steps=6"))
    again.fit()
    assert again.guard.skipped > 4
    assert again.loss_scale is not None
    assert again.loss_scale.value == 1e9 / 2**again.guard.skipped


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    configure: Configure, tmp_path: Path
) -> None:
    build_engine(configure("run", "Engine.max_steps=6")).fit()
    weights = next((tmp_path / "run" / "step_6").glob("model*.safetensors"))
    damaged = bytearray(weights.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    weights.write_bytes(damaged)
    engine = build_engine(configure("run"))
    engine.fit()
    assert any("step_6" in notice and "unusable" in notice for notice in engine.notices)
    assert any("resumed" in notice and "step_4" in notice for notice in engine.notices)
    assert engine.step == 8


def test_a_step_directory_is_obeyed(configure: Configure, tmp_path: Path) -> None:
    build_engine(configure("run")).fit()
    before = losses(tmp_path / "run")
    where = tmp_path / "run" / "step_4"
    engine = build_engine(configure("run", f"Engine.save_load.ckpt_dir={where}"))
    engine.fit()
    assert any("at step 4" in notice for notice in engine.notices)
    assert losses(tmp_path / "run") == before


def test_another_run_can_start_from_a_checkpoint_and_then_resumes_itself(
    configure: Configure, tmp_path: Path
) -> None:
    build_engine(configure("first", "Engine.max_steps=4")).fit()
    source = f"Engine.save_load.ckpt_dir={tmp_path / 'first'}"
    build_engine(configure("second", source, "Engine.max_steps=6")).fit()
    again = build_engine(configure("second", source))
    again.fit()
    assert any("resumed" in n and "second" in n and "step 6" in n for n in again.notices)


def test_auto_resume_can_be_turned_off(configure: Configure) -> None:
    build_engine(configure("run", "Engine.max_steps=4")).fit()
    engine = build_engine(
        configure("run", "Engine.save_load.auto_resume=False", "Engine.max_steps=2")
    )
    engine.fit()
    assert not any("resumed" in notice for notice in engine.notices)


def test_changed_data_order_is_said(configure: Configure) -> None:
    build_engine(configure("run", "Engine.max_steps=2")).fit()
    engine = build_engine(configure("run", "Engine.max_steps=4", "Data.dataset.split='80,18,2'"))
    engine.fit()
    assert any("samples seen before" in notice for notice in engine.notices)


def test_changed_masks_are_said(configure: Configure) -> None:
    build_engine(configure("run", "Engine.max_steps=2")).fit()
    engine = build_engine(
        configure("run", "Engine.max_steps=2", "Data.dataset.eod_mask_loss=False")
    )
    engine.fit()
    assert any("eod_mask_loss was True" in notice for notice in engine.notices)
