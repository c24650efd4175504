"""Recipes beyond one straight run: another batch or optimizer, annealing, averaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.tiny_run import TINY, Configure

from fourfold import checkpoint
from fourfold.cli import main
from fourfold.config import Config, load_config
from fourfold.engine import Engine, build_engine, loop
from fourfold.metrics import read_jsonl

Rows = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "plot_losses", lambda directory: None)


def fit(config: Config) -> tuple[Engine, Rows]:
    """Train to the end; the samples that were trained on, in their order, as their tokens."""
    engine, rows = build_engine(config), list[tuple[int, ...]]()
    run = engine.runner.run

    def spied(batch: Any, *given: Any) -> torch.Tensor:
        rows.extend(tuple(row) for row in batch.tokens.tolist())
        return run(batch, *given)

    engine.runner.run = spied  # type: ignore[method-assign]
    engine.fit()
    return engine, rows


def said(engine: Engine) -> str:
    return "\n".join(engine.notices)


def trained(directory: Path) -> list[dict[str, Any]]:
    return [one for one in read_jsonl(directory / "metrics.jsonl") if one["kind"] == "train"]


def batch(size: int) -> list[str]:
    sizes = [f"Data.batch_size.{which}_batch_size={size}" for which in ("global", "local")]
    return [*sizes, "Data.batch_size.micro_batch_size=4"]


# -- another global batch -------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(8, 16), (16, 12)])
def test_another_batch_repeats_and_loses_nothing(
    first: int, second: int, configure: Configure, tmp_path: Path
) -> None:
    elastic = "Data.dataset.order=elastic"
    _, before = fit(configure("run", elastic, *batch(first), "Engine.max_steps=3"))
    engine, after = fit(configure("run", elastic, *batch(second), "Engine.max_steps=9"))
    assert engine.config.Engine.max_steps == 9
    total = 3 * first + 6 * second
    assert f"The run continues with sample {3 * first} and batches of {second}" in said(engine)
    assert before + after == served(configure, total, elastic)
    state = checkpoint.read_state(tmp_path / "run" / "step_9")
    assert (state["step"], state["consumed_samples"]) == (9, total)
    # And once more, from a checkpoint that has both behind it.
    _, rest = fit(configure("run", elastic, *batch(second), "Engine.max_steps=11"))
    assert before + after + rest == served(configure, total + 2 * second, elastic)


def served(configure: Configure, count: int, *overrides: str) -> Rows:
    """The first samples of the training data, whatever the batch."""
    config = configure("straight", *overrides, *batch(4), f"Engine.max_steps={count // 4}")
    samples = build_engine(config).data.samples["train"]
    row, rows = np.empty(samples.seq_len + 1, np.int64), list[tuple[int, ...]]()
    for number in range(count):
        samples.read(number, row)
        rows.append(tuple(row[:-1].tolist()))
    return rows


def test_a_run_of_so_many_samples_ends_with_them(configure: Configure, tmp_path: Path) -> None:
    length = ["Engine.train_samples=72", "Optimizer.lr.decay_samples=72", "Engine.max_steps=99"]
    length += ["Optimizer.lr.decay_style=linear", "Optimizer.lr.min_lr=0.0"]
    fit(configure("run", *length, *batch(8), "Engine.max_steps=3"))
    engine, _ = fit(configure("run", *length, *batch(16)))
    # 24 samples in three steps, 48 in three more; and the rate follows samples.
    assert (engine.step, engine.batch_schedule.consumed(engine.step)) == (6, 72)
    assert engine.schedule.lr_at(7) == 0.0
    assert [record["samples"] for record in trained(tmp_path / "run")] == [8, 16, 24, 40, 56, 72]


# -- another optimizer ----------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("AdamW", "Muon"), ("Muon", "AdamW")])
def test_another_optimizer_begins_anew_and_says_so(
    first: str, second: str, configure: Configure, tmp_path: Path
) -> None:
    fit(configure("run", f"Optimizer.name={first}", "Engine.max_steps=2"))
    engine, _ = fit(configure("run", f"Optimizer.name={second}", "Engine.max_steps=5"))
    assert "the optimizer's state begins anew" in said(engine)
    assert f"{first}'s, and Optimizer.name={second}" in said(engine)
    assert (engine.step, engine.optimizer.updates) == (5, 3)
    again, _ = fit(configure("run", f"Optimizer.name={second}", "Engine.max_steps=6"))
    assert "begins anew" not in said(again)
    assert again.optimizer.updates == 4
    state = checkpoint.read_state(tmp_path / "run" / "step_6")
    assert state["optimizer_updates"] == 4


def test_muon_and_the_average_resume_to_the_bit(configure: Configure, tmp_path: Path) -> None:
    asked = ("Optimizer.name=Muon", "Optimizer.ema_decay=0.9", "Data.dataset.order=elastic")
    fit(configure("straight", *asked))
    for steps in (4, 8):
        fit(configure("cut", *asked, f"Engine.max_steps={steps}"))
    ours, theirs = (contents(tmp_path / name / "step_8") for name in ("cut", "straight"))
    assert ours.keys() == theirs.keys()
    assert {name.split(".")[0] for name in ours} == {"model", "optim", "ema"}
    assert sum(name.endswith("momentum_buffer") for name in ours) == 2 * 4
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def contents(directory: Path) -> dict[str, torch.Tensor]:
    names = checkpoint.tensor_names(directory)
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
    checkpoint.load(directory, found)
    return found


# -- annealing ------------------------------------------------------------------------------------


def test_three_lines_anneal_from_a_checkpoint(tmp_path: Path) -> None:
    """Of a stable phase, saved on its way: down to zero, with the samples that come next."""
    tiny = {**TINY, "Optimizer": {"lr": {"max_lr": 1e-2, "decay_style": "constant"}}}
    tiny["Engine"] = {**TINY["Engine"], "save_load": {"save_steps": 6}, "test_iters": 0}  # type: ignore[dict-item]
    tiny["Data"] = {**TINY["Data"], "dataset": {**TINY["Data"]["dataset"], "order": "elastic"}}  # type: ignore[dict-item]
    base = tmp_path / "stable.yaml"
    base.write_text(yaml.safe_dump(tiny))
    place = f"Engine.save_load.output_dir={tmp_path / 'stable'}"
    _, stable = fit(load_config(base, [place, "Engine.max_steps=10"]))
    anneal = tmp_path / "anneal.yaml"
    places = f"ckpt_dir: {tmp_path}/stable/step_6, output_dir: {tmp_path}/end"
    anneal.write_text(
        "_base_: stable.yaml\n"
        f"Engine: {{max_steps: 10, save_load: {{{places}}}}}\n"
        "Optimizer: {lr: {decay_style: wsd, wsd_decay_steps: 4, min_lr: 0.0}}\n"
    )
    engine, rows = fit(load_config(anneal))
    assert rows == stable[6 * 8 : 10 * 8]
    rates = [engine.schedule.lr_at(step) for step in (6, 7, 8, 9, 10)]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0])
    assert [record["step"] for record in trained(tmp_path / "end")] == [7, 8, 9, 10]


# -- averaged weights -----------------------------------------------------------------------------


def test_the_average_is_evaluated_and_leaves_the_run_as_it_was(
    configure: Configure, tmp_path: Path
) -> None:
    fit(configure("plain", "Optimizer.name=AdamW"))
    fit(configure("averaged", "Optimizer.ema_decay=0.5"))
    plain, averaged = contents(tmp_path / "plain/step_8"), contents(tmp_path / "averaged/step_8")
    assert all(torch.equal(averaged[name], tensor) for name, tensor in plain.items())
    told = list(read_jsonl(tmp_path / "averaged" / "metrics.jsonl"))
    evaluations = [one for one in told if one["kind"] in ("eval", "test")]
    assert evaluations and all(one["ema_loss"] != one["loss"] for one in evaluations)


def test_the_average_becomes_weights_that_every_command_reads(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(configure("run", "Optimizer.ema_decay=0.9"))
    fit(configure("none"))
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "merge", str(tmp_path / "run"), str(tmp_path / "ema"), "--ema"])
    assert ended.value.code == 0
    run, merged = contents(tmp_path / "run/step_8"), contents(tmp_path / "ema")
    assert merged.keys() == {name for name in run if name.startswith("model.")}
    for name, tensor in merged.items():
        assert torch.equal(tensor, run[name.replace("model.", "ema.", 1)])
    engine, _ = fit(configure("on", f"Engine.save_load.ckpt_dir={tmp_path / 'ema'}"))
    assert "starting at step 0 with the weights of" in said(engine)
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "merge", str(tmp_path / "none"), str(tmp_path / "x"), "--ema"])
    assert ended.value.code == 2
    assert "has no average of the weights" in capsys.readouterr().err


def test_an_average_may_begin_and_end_with_a_resumed_run(configure: Configure) -> None:
    fit(configure("run", "Engine.max_steps=2"))
    engine, _ = fit(configure("run", "Engine.max_steps=4", "Optimizer.ema_decay=0.9"))
    assert "the average of weights begins with the weights of the checkpoint" in said(engine)
    engine, _ = fit(configure("run", "Engine.max_steps=5"))
    assert "average of weights is left behind" in said(engine)
