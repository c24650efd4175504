"""`Engine.samples` and `Engine.eval_tasks`: what a run writes and measures between its steps."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import on_ranks
from helpers.tiny_text_run import TextRun, make_run, sentences

from fourfold.config import load_config
from fourfold.engine import Engine, build_engine
from fourfold.errors import UserError
from fourfold.evaluate import evaluate
from fourfold.evaluate.in_loop import WeightsInLoop, harness_numbers
from fourfold.metrics import read_jsonl
from fourfold.metrics.prometheus import NewestNumbers
from fourfold.metrics.trackers import scalars

SHORT = (
    "Engine.max_steps=4",
    "Engine.eval_freq=2",
    "Engine.logging_freq=1",
    "Engine.save_load.save_steps=2",
    "Data.dataset.max_seq_len=16",
    "Data.batch_size.micro_batch_size=2",
    # Where rounding decides which token is the best, there would be another text.
    "Optimizer.lr.max_lr=0.01",
    "Engine.samples.prompts=[the cat]",
    "Engine.samples.number=2",
    "Engine.samples.prompt_tokens=3",
    "Engine.samples.length=6",
    "Generation.top_k=3",
)
LAYOUTS = {
    "alone": (),
    "dp2": ("Distributed.dp_degree=2",),
    "mp2 sp": ("Distributed.mp_degree=2", "Model.sequence_parallel=True"),
    "pp2": ("Distributed.pp_degree=2",),
    "sh2 stage3": (
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=3",
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    made = make_run(tmp_path_factory.mktemp("in_loop"))
    texts = sentences(21, seed=5)
    lines = [json.dumps({"text": text}) for text in texts]
    (made.directory / "words.jsonl").write_text("\n".join(lines) + "\n")
    (made.directory / "text.txt").write_text("\n".join(texts))
    return made


def tasks(run: TextRun) -> str:
    cloze = f"{{name: words, kind: cloze, path: {run.directory / 'words.jsonl'}}}"
    text = f"{{name: text, kind: perplexity, path: {run.directory / 'text.txt'}}}"
    return f"Engine.eval_tasks=[{cloze}, {text}]"


def build(run: TextRun, name: str, world: int, *overrides: str) -> Engine:
    place = f"Engine.save_load.output_dir={run.directory / name}"
    config = load_config(run.config, [place, *SHORT, *overrides], world_size=world)
    return build_engine(config, world, open_in_loop=WeightsInLoop)


@cache
def trained(run: TextRun, layout: str, dropout: float = 0.0) -> Path:
    """The directory of a run with samples and tasks."""
    world = 1 if layout == "alone" else 2
    name = f"{layout.replace(' ', '_')}_{dropout}"
    keys = (tasks(run), *LAYOUTS[layout], f"Model.hidden_dropout_prob={dropout}")
    on_ranks(world, lambda _: build(run, name, world, *keys).fit())
    return run.directory / name


def samples_of(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "samples.jsonl").read_text().splitlines()]


def records(place: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in read_jsonl(place / "metrics.jsonl") if one["kind"] == kind]


# -- samples --------------------------------------------------------------------------------------


def test_a_run_writes_texts_at_each_evaluation(run: TextRun) -> None:
    rows = samples_of(trained(run, "alone"))
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4]
    assert rows[0]["prompt"] == "the cat" and all(row["text"] for row in rows)
    told = records(trained(run, "alone"), "samples")
    assert [(one["step"], one["number"]) for one in told] == [(2, 3), (4, 3)]


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one != "alone"])
def test_every_layout_writes_and_measures_the_same(run: TextRun, layout: str) -> None:
    place, alone = trained(run, layout), trained(run, "alone")
    assert samples_of(place) == samples_of(alone)
    for ours, theirs in zip(records(place, "task"), records(alone, "task"), strict=True):
        assert ours["task"] == theirs["task"]
        assert ours["numbers"] == pytest.approx(theirs["numbers"], rel=1e-5)


@pytest.mark.parametrize("layout", ["alone", "sh2 stage3"])
def test_training_has_the_same_bits_with_and_without(run: TextRun, layout: str) -> None:
    world, name = (1 if layout == "alone" else 2), f"{layout.replace(' ', '_')}_plain"
    off = ("Engine.samples.prompts=[]", "Engine.samples.number=0", "Model.hidden_dropout_prob=0.1")
    on_ranks(world, lambda _: build(run, name, world, *off, *LAYOUTS[layout]).fit())
    for kind, names in {"train": ("loss", "grad_norm"), "eval": ("loss",)}.items():
        on, without = (
            [[one[key] for key in names] for one in records(place, kind)]
            for place in (trained(run, layout, 0.1), run.directory / name)
        )
        assert on == without
    assert not (run.directory / name / "samples.jsonl").exists()


def test_a_resumed_run_drops_what_came_after(run: TextRun) -> None:
    place = "again"
    on_ranks(1, lambda _: build(run, place, 1).fit())
    before = samples_of(run.directory / place)
    (run.directory / place / "latest").write_text("step_2\n")
    shutil.rmtree(run.directory / place / "step_4")
    on_ranks(1, lambda _: build(run, place, 1).fit())
    assert samples_of(run.directory / place) == before


def test_texts_that_cannot_be_written_end_no_run(run: TextRun) -> None:
    def train(rank: int) -> None:
        engine = build(run, "not_finite", 1, tasks(run))
        broken = UserError("the logits are not finite")
        engine.in_loop.samples = lambda runner: (_ for _ in ()).throw(broken)  # type: ignore[union-attr,method-assign]
        engine.fit()

    on_ranks(1, train)
    told = [one["text"] for one in records(run.directory / "not_finite", "notice")]
    assert "after step 2: the logits are not finite" in told
    assert told[-1] == "The training process is complete."


# -- tasks ----------------------------------------------------------------------------------------


def test_tasks_are_what_evaluate_measures_on_the_checkpoint(run: TextRun) -> None:
    place = trained(run, "alone")
    measured = {(one["step"], one["task"]): one["numbers"] for one in records(place, "task")}
    assert {*measured} == {(2, "words"), (2, "text"), (4, "words"), (4, "text")}
    for step in (2, 4):
        for name, file, cloze in (("words", "words.jsonl", True), ("text", "text.txt", False)):
            keys = [
                f"Engine.save_load.ckpt_dir={place / f'step_{step}'}",
                f"Eval.eval_path={run.directory / file}",
                f"Eval.cloze_eval={cloze}",
                "Data.dataset.max_seq_len=16",
            ]
            offline = evaluate(run.load(*keys), on_notice=lambda text: None).numbers
            assert measured[step, name] == pytest.approx(offline, rel=1e-5)


def test_trackers_and_prometheus_have_the_results(run: TextRun) -> None:
    one = records(trained(run, "alone"), "task")[0]
    assert scalars(one)["task/words/accuracy"] == one["numbers"]["accuracy"]
    numbers = NewestNumbers(None, 0)
    numbers.take(one)
    (family,) = (metric for metric in numbers.collect() if metric.name == "fourfold_task")
    found = {sample.labels["number"]: sample.value for sample in family.samples}
    assert found == one["numbers"] and math.isfinite(found["word_perplexity"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("Engine.eval_tasks=[{name: a, kind: cloze, path: nowhere.jsonl}]", "no such file"),
        ("Engine.eval_tasks=[{name: a, kind: perplexity, path: /dev/null}]", "no such file"),
        ("Engine.eval_tasks=[{name: a, kind: lm_eval, path: nowhere}]", "lm_eval"),
        ("Engine.samples.length=47", "48 positions"),
        ("Engine.samples.prompts=['']", "empty"),
        ("Engine.samples.number=100000", "validation data"),
        ("Generation.stop=['']", "stop string"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_first_step(
    run: TextRun, override: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(run, "refused", 1, override)


def test_numbers_of_the_harness() -> None:
    told = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 1, "samples": 3}
    assert harness_numbers(told) == {"acc": 0.5, "em_strict": 1.0}
