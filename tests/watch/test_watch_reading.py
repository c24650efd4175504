"""What a page is told of a run: where its time went, why it ended, curves, spikes."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.made_up_runs import COMPLETE, DOCUMENTS, MadeUpRun, whole_run
from helpers.tiny_run import TINY, exit_status, start_child
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import load_config
from fourfold.engine import build_engine
from fourfold.errors import UserError
from fourfold.metrics import read_jsonl
from fourfold.watch import RunReader, document_of, open_runs, write_report
from fourfold.watch.goodput import spend


def read(directory: Path, price: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run and its state, as the page is told."""
    (reader,) = open_runs([directory])
    reader.read()
    document = document_of([reader], price)
    json.dumps(document, allow_nan=False)
    return document["runs"][0], document["states"][0]


def adds_up(run: dict[str, Any]) -> bool:
    return sum(run["seconds"].values()) == pytest.approx(run["wall"], rel=0.01, abs=0.01)


# -- where the time went ------------------------------------------------------------------------


def test_the_seconds_of_a_whole_run(tmp_path: Path) -> None:
    run, state = read(whole_run(tmp_path / "run", steps=60).write(), price=3.6)
    assert state["state"] == "finished" and state["why"] == "all steps are done"
    expected = {
        "training": 60 * 0.9,
        "waiting": 60 * 0.1,
        "evaluation": 3 * 2.0 + 2.0,  # and the test
        "saving": 2 * 1.5 + 0.5,
    }
    assert {part: s for part, s in run["seconds"].items() if s} == pytest.approx(expected)
    assert run["wall"] == pytest.approx(60 + 8 + 3.5) and adds_up(run)
    assert run["cost"]["total"] == pytest.approx(run["wall"] / 1000)
    assert run["goodput"] == pytest.approx(54 / 71.5)


def lost_run(directory: Path, *, noted: bool) -> MadeUpRun:
    """Killed after step 7, 3 s later started again from step 4, which took 2 s to save."""
    run = MadeUpRun(directory, ranks=2)
    run.start()
    for step in range(1, 8):
        run.train(save=2.0 if step == 5 else 0.0)
    before, until = [*run.records], run.clock
    del run.records[5:]
    run.step = 4
    if noted:
        fields = {"last_step": 7, "until": until, "save_seconds": 2.0}
        run.add("event", 3.0, event="lost_steps", **fields)
    run.notice(f"{directory}: the file as it was is metrics.jsonl.bak", after=0 if noted else 3.0)
    run.start()
    run.train()
    run.notice("stopped by SIGTERM at step 5; the run is saved", after=1.0)
    run.write()
    if not noted:
        text = "".join(json.dumps(record) + "\n" for record in before)
        (directory / "metrics.jsonl.bak").write_text(text)
    return run


@pytest.mark.parametrize("noted", [True, False])
def test_lost_work_and_restarts(tmp_path: Path, noted: bool) -> None:
    run, state = read(lost_run(tmp_path / "run", noted=noted).directory, price=3600)
    assert state["state"] == "stopped" and "SIGTERM" in state["why"]
    seconds = run["seconds"]
    assert (run["starts"], seconds["restarts"]) == (2, pytest.approx(3.0))
    # A run that noted nothing counts the save it went on from with what was lost.
    assert seconds["lost work"] == pytest.approx(3.0 if noted else 5.0)
    assert seconds["training"] + seconds["waiting"] == pytest.approx(5.0)
    assert adds_up(run) and run["wall"] == pytest.approx(14.0)
    assert run["cost"]["total"] == pytest.approx(2 * 14.0)


def test_a_real_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """Against the clock of who started it, which knows of no records."""

    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    config = load_config(
        file,
        [
            f"Engine.save_load.output_dir={tmp_path / 'run'}",
            f"Data.dataset.cache_dir={tmp_path / 'cache'}",
            *("Engine.max_steps=30", "Engine.eval_freq=10", "Engine.save_load.save_steps=3"),
        ],
        world_size=1,
    )
    process = start_child(lambda: build_engine(config).fit())
    watched, deadline = RunReader(tmp_path / "run"), time.monotonic() + 120
    while watched.last.get("step", 0) < 4 and time.monotonic() < deadline:
        watched.read()
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    assert exit_status(process) == -signal.SIGKILL
    _, state = read(tmp_path / "run")
    assert state["state"] == "crashed" and "killed after step" in state["why"]
    began = datetime.fromisoformat(read_jsonl(tmp_path / "run/metrics.jsonl")[0]["time"])
    pause = 1.5
    time.sleep(pause)
    assert exit_status(start_child(lambda: build_engine(config).fit())) == 0
    wall = time.time() - began.timestamp()
    run, state = read(tmp_path / "run")
    assert (state["state"], run["step"], run["starts"]) == ("finished", 30, 2)
    assert run["max_steps"] == 30
    assert adds_up(run) and pause < run["seconds"]["restarts"] < run["wall"] <= wall
    assert run["seconds"]["lost work"] > 0 and run["seconds"]["evaluation"] > 0
    assert run["seconds"]["saving"] > 0
    assert run["curves"]["loss"]["x"] == [*range(1, 31)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_recorded_the_seconds_add_up(data: st.DataObject) -> None:
    run = MadeUpRun(Path("unused"))
    waits = st.floats(-5, 50)
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["train", "start", "eval", "notice", "lost"]))
        run.clock += data.draw(waits)
        if kind == "train":
            run.train(data.draw(st.floats(0, 9)), save=data.draw(st.floats(0, 9)))
        elif kind == "start":
            run.start()
        elif kind == "eval":
            run.evaluate(data.draw(st.floats(0, 9)))
        elif kind == "notice":
            run.notice(data.draw(st.sampled_from([COMPLETE, "x", "stopped by SIGINT"])))
        else:
            until = run.clock - data.draw(waits)
            run.add("event", event="lost_steps", until=until, save_seconds=data.draw(waits))
    reader = RunReader(Path("unused"))
    for record in run.records:
        reader._take(record)
    spent = spend(reader.entries)
    assert all(seconds >= -1e-6 for seconds in spent.seconds.values())
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall, abs=1e-3)


# -- the rest -----------------------------------------------------------------------------------


def test_a_run_that_spiked_names_its_documents(tmp_path: Path) -> None:
    made = MadeUpRun(tmp_path / "run")
    made.start()
    made.train()
    made.spike(DOCUMENTS)
    made.add("event", event="rewind", spike_step=9, loss=7.5, loss_limit=4.0, report="../../x.json")
    made.train(loss=math.nan)
    run, _ = read(made.write())
    first, second = run["spikes"]
    assert (first["step"], first["loss"], first["action"]) == (1, 8.25, "warn")
    worst = first["documents"][0]
    assert (worst["file"], worst["document"], worst["share"]) == ("part_3.bin", 41, 0.62)
    assert first["gradient_norms"]["layer 1"] == 26.5
    # A path out of the directory of reports is not followed.
    assert (second["step"], second["action"], second["documents"]) == (9, "rewind", [])
    assert run["not_finite"] == [2] and run["curves"]["loss"]["x"] == [1]


def test_what_is_new_is_read_and_what_is_replaced_is_read_again(tmp_path: Path) -> None:
    made = MadeUpRun(tmp_path / "run")
    made.start()
    for _ in range(3):
        made.train()
    made.write(torn=True)
    (reader,) = open_runs([tmp_path / "run"])
    assert reader.read() and not reader.read()
    assert (reader.version, reader.last["step"], reader.damaged) == (1, 3, 0)
    assert document_of([reader], known=[1])["runs"] == [None]
    made.train()
    made.write()
    assert reader.read() and (reader.version, reader.last["step"]) == (2, 4)
    del made.records[2:]
    made.write()
    assert reader.read() and reader.last["step"] == 1
    assert reader.curves["loss"][0] == [1]


def test_a_run_at_work_is_known_by_its_process(tmp_path: Path) -> None:
    made = MadeUpRun(tmp_path / "run")
    made.start()
    made.train()
    made.write()
    assert read(tmp_path / "run")[1]["state"] == "crashed"
    lock = tmp_path / "run/.lock"
    lock.write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
    assert read(tmp_path / "run")[1]["state"] == "running"
    process = start_child(lambda: None)
    exit_status(process)
    lock.write_text(json.dumps({"pid": process, "host": os.uname().nodename}))
    logs = tmp_path / "run/logs"
    logs.mkdir()
    (logs / "rank_0.log").write_text("Traceback ...\nValueError: no such thing\n")
    assert "ValueError: no such thing" in read(tmp_path / "run")[1]["why"]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_record_is_too_odd(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Fields of any kind where numbers are expected: a document is made, and it is JSON."""
    directory = tmp_path_factory.mktemp("odd")
    made = MadeUpRun(directory)
    made.start()
    made.train()
    made.spike(data.draw(st.just(DOCUMENTS) | st.dictionaries(st.just("documents"), junk)))
    made.evaluate()
    made.add("event", event="prediction", predicted_bytes=1)
    for record in made.records:
        for name in data.draw(st.lists(st.sampled_from(sorted(record)), max_size=2)):
            record[name] = data.draw(junk)
    made.write()
    content = (directory / "metrics.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    (directory / "metrics.jsonl").write_bytes(content[:cut] + data.draw(st.binary(max_size=9)))
    read(directory, price=1.0)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        open_runs([tmp_path / "none"])
    whole_run(tmp_path / "a", steps=1).write()
    with pytest.raises(UserError, match="has runs inside: a"):
        open_runs([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="nothing is recorded"):
        write_report(open_runs([tmp_path / "empty"]), tmp_path / "r.html")
