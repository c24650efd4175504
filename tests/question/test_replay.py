"""`fourfold replay`: a step again has the run's bits, on every layout; and whose loss it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ranks import on_ranks
from helpers.tiny_run import Configure
from helpers.tiny_text_run import make_run

from fourfold.engine import build_engine
from fourfold.question.history import RunHistory
from fourfold.question.replay import Replay, agree

LAYOUTS = {
    "dp2": ["Distributed.dp_degree=2"],
    "mp2": ["Distributed.mp_degree=2", "Model.sequence_parallel=True"],
    "pp2": ["Distributed.pp_degree=2"],
    "sh2": [
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=3",
        "Model.use_recompute=True",
    ],
    "mp2 pp2": ["Distributed.mp_degree=2", "Distributed.pp_degree=2"],
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "mp2", "pp2", "sh2")]


def tree(directory: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def answers(run: Path, scratch: Path, steps: list[int], world: int, **asked: bool) -> list[dict]:
    """What rank 0 answers to each of these steps."""
    given = []
    for step in steps:
        replay = Replay(RunHistory(run), step, **asked)
        config = replay.segment.config(scratch, world_size=world)
        given.append(on_ranks(world, lambda _, r=replay, c=config: r.run(c, world))[0])
    return given


@pytest.mark.parametrize("layout", [*SLOW, "mp2 pp2"])
def test_the_same_bits_on_the_layout_of_the_run(
    configure: Configure, tmp_path: Path, layout: str
) -> None:
    world = 2 ** len(layout.split())
    degrees = [text for text in LAYOUTS[layout] if "degree" in text]
    batch = [
        f"Data.batch_size.{key}_batch_size={size}"
        for key, size in [
            ("global", 8),
            ("local", 4 if layout in ("dp2", "sh2") else 8),
            ("micro", 2),
        ]
    ]
    config = configure("run", *LAYOUTS[layout], *batch, world_size=world)
    assert degrees
    on_ranks(world, lambda _: build_engine(config, world).fit())
    before = tree(tmp_path / "run")
    whole = answers(tmp_path / "run", tmp_path / "scratch", [1, 6], world, per_sample=True)
    alone = answers(tmp_path / "run", tmp_path / "scratch", [6], 1, per_sample=True)
    assert tree(tmp_path / "run") == before
    assert [answer["equal"] for answer in whole] == [True, True]
    assert [answer["tolerance"] for answer in whole] == [0.0, 0.0]
    assert [answer["from_step"] for answer in whole] == [0, 4]
    if layout != "mp2":  # there each rank drops its own positions
        assert alone[0]["equal"] is True and alone[0]["tolerance"] == 1e-5
        ours, theirs = whole[1]["report"], alone[0]["report"]
        assert {d["document"]: pytest.approx(d["loss"], rel=1e-4) for d in ours["documents"]} == {
            d["document"]: d["loss"] for d in theirs["documents"]
        }
        for what in ("gradient_norms", "activations"):
            assert ours[what] == pytest.approx(theirs[what], rel=1e-3)
        assert ours["logits"] == pytest.approx(theirs["logits"], rel=1e-4)


def test_the_sums_add_up_to_the_loss(configure: Configure, tmp_path: Path) -> None:
    build_engine(configure("run")).fit()
    (answer,) = answers(tmp_path / "run", tmp_path / "scratch", [5], 1, per_sample=True)
    report = answer["report"]
    counted = sum(one["counted"] for one in report["documents"])
    assert sum(one["loss"] for one in report["documents"]) / counted == pytest.approx(
        answer["loss"]
    )
    assert sum(one["share"] for one in report["samples"]) == pytest.approx(1.0)
    squares = sum(norm**2 for norm in report["gradient_norms"].values())
    assert squares**0.5 == pytest.approx(answer["grad_norm"])
    order = [one["excess"] for one in report["documents"]]
    assert order == sorted(order, reverse=True)


def test_the_command(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    make_run(tmp_path)
    run = tmp_path / "output"
    code, out, _ = command("replay", run, "--step", 30, "--per-sample", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["equal"] is True
    worst = answer["report"]["documents"][0]["worst"]
    assert worst[0]["loss"] >= worst[-1]["loss"] and "ids" not in worst[0]["text"]
    code, out, _ = command("replay", run, "--step", 29)
    assert code == 0 and "did not log this step" in out
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"kind": "train"' in line)
    record = json.loads(lines[place])
    lines[place] = json.dumps(record | {"loss": record["loss"] * (1 + 1e-9)})
    log.write_text("\n".join(lines) + "\n")
    code, out, _ = command("replay", run, "--step", 30)
    assert code == 1 and "DIFFERENT" in out
    code, _, said = command("replay", tmp_path / "data", "--step", 30)
    assert code == 2 and "no checkpoint" in said


def test_agreement() -> None:
    assert agree(1.0, 1.0, 0.0) and not agree(1.0, 1.0 + 1e-15, 0.0)
    assert agree(1.0, 1.0 + 9e-6, 1e-5) and not agree(1.0, 1.0 + 2e-5, 1e-5)
    assert agree(float("nan"), float("nan"), 0.0) and agree(None, None, 0.0)
    assert not agree(None, 1.0, 1e-5)
