"""The log of a run, checked against itself and against what its configuration says.

Most numbers of a training record are functions of the step: the learning rate, samples and tokens,
the epoch, the batch. Others follow from each other: rates from seconds. What is left is measured
(times, memory) and can only be compared with the seal that was put on the file when it was written.
The loss and the gradient norm are recomputed (`fourfold.question.prove`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from fourfold.config import Config
from fourfold.metrics.jsonl import RUN, RunFacts
from fourfold.metrics.meter import Step
from fourfold.optim import build_schedule

EVALUATIONS = ("eval", "test")
KINDS = ("train", *EVALUATIONS, "event", "notice", RUN)
STAMP = {"kind", "step", "time"}
EVALUATION_FIELDS = {
    *STAMP,
    *("epoch", "batch", "loss", "seconds", "batches", "batch_seconds", "steps_per_second"),
}
LEVELS = ("INFO", "WARNING", "ERROR")
TRAIN_FIELDS = {*STAMP, *(field.name for field in fields(Step))}
# Rates are products of rounded numbers.
ROUNDING = 1e-9

# The configuration that a step was computed with.
ConfigOf = Callable[[int], Config]


class RecordProblem(Exception):
    """One record that cannot be right."""


def record_problems(records: list[dict[str, Any]], config_of: ConfigOf) -> Iterator[str]:
    """Everything wrong with the records, in their order."""
    before = None
    seen: set[tuple[str, int]] = set()
    size = 1
    for number, record in enumerate(records, start=1):
        try:
            _check_stamp(record)
            if record["kind"] == RUN:
                _check_facts(record)
                size = record["world_size"]
            elif record["kind"] == "train":
                _check_train(record, config_of(record["step"]), size)
            elif record["kind"] in EVALUATIONS:
                _check_evaluation(record, config_of(max(record["step"], 1)))
            elif record["kind"] == "notice":
                _check_notice(record)
            if record["kind"] in ("train", *EVALUATIONS):
                key = (record["kind"], record["step"])
                if key in seen:
                    raise RecordProblem("is there twice")
                seen.add(key)
            time = datetime.fromisoformat(record["time"])
            if before is not None and time < before:
                raise RecordProblem("is older than the record before it")
            before = time
        except (RecordProblem, KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
            said = problem if isinstance(problem, RecordProblem) else f"is damaged ({problem!r})"
            yield f"record {number} ({record.get('kind')}, step {record.get('step')}) {said}"


def missing_records(
    records: list[dict[str, Any]], last_step: int, config_of: ConfigOf
) -> list[int]:
    """The steps up to `last_step` that were to be logged and are not there."""
    there = {record.get("step") for record in records if record.get("kind") == "train"}
    expected = [
        step for step in range(1, last_step + 1) if step % config_of(step).Engine.logging_freq == 0
    ]
    return [step for step in expected if step not in there]


def _check_stamp(record: Mapping[str, Any]) -> None:
    if record.get("kind") not in KINDS:
        raise RecordProblem("is of no known kind")
    if not isinstance(record.get("step"), int) or not isinstance(record.get("time"), str):
        raise RecordProblem("has no step or no time")


def _check_fields(record: Mapping[str, Any], expected: set[str], optional: set[str]) -> None:
    missing, more = expected - record.keys(), record.keys() - expected - optional
    if missing or more:
        named = [
            *(f"no {name}" for name in sorted(missing)),
            *(f"a {name}" for name in sorted(more)),
        ]
        raise RecordProblem(f"has {', '.join(named)}")


def _check_facts(record: Mapping[str, Any]) -> None:
    optional = {field.name for field in fields(RunFacts)}
    _check_fields(record, {*STAMP, "layout", "world_size"}, optional)


def _check_notice(record: Mapping[str, Any]) -> None:
    _check_fields(record, {*STAMP, "level", "text"}, set())
    if record["level"] not in LEVELS:
        raise RecordProblem(f"has the level {record['level']}")


def _check_train(record: Mapping[str, Any], config: Config, size: int) -> None:
    _check_fields(record, TRAIN_FIELDS, set())
    step, schedule = record["step"], config.batch_schedule
    length = config.Data.dataset.max_seq_len
    if step < 1 or step % config.Engine.logging_freq:
        raise RecordProblem("is of a step that is not logged")
    consumed = schedule.consumed(step)
    _equal(
        record,
        batch=step - 1,
        learning_rate=build_schedule(config).lr_at(step + 1),
        global_batch_size=schedule.batch_of(step - 1),
        samples=consumed,
        tokens=consumed * length,
    )
    seconds = record["batch_seconds"]
    window = min(config.Engine.logging_freq, step - schedule.first_step)
    read = consumed - schedule.consumed(step - window)
    if seconds > 0:
        _close(record, "steps_per_second", 1 / seconds)
        rate = record["steps_per_second"] * read / window * length
        # A window may be shorter after a resume.
        if window == 1:
            _close(record, "ips_total", rate)
    _close(record, "ips", record["ips_total"] / size)
    if record["reader_seconds"] != record["seconds"].get("reader", 0.0):
        raise RecordProblem("has two times of reading")


def _check_evaluation(record: Mapping[str, Any], config: Config) -> None:
    _check_fields(record, EVALUATION_FIELDS, {"ema_loss"})
    engine = config.Engine
    batches = engine.eval_iters if record["kind"] == "eval" else engine.test_iters
    _equal(record, batches=batches, batch=batches - 1)
    _close(record, "batch_seconds", record["seconds"] / batches)
    if record["batch_seconds"] > 0:
        _close(record, "steps_per_second", 1 / record["batch_seconds"])


def _equal(record: Mapping[str, Any], **expected: Any) -> None:
    for name, value in expected.items():
        if record[name] != value:
            raise RecordProblem(f"has {name} {record[name]!r}, which should be {value!r}")


def _close(record: Mapping[str, Any], name: str, value: float) -> None:
    if abs(record[name] - value) > ROUNDING * abs(value):
        raise RecordProblem(f"has {name} {record[name]!r}, which should be {value!r}")
