"""`Engine.trackers`: one interface, the real packages, and trackers that fail."""

from __future__ import annotations

import inspect
import json
import sqlite3
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.peers import ROOT

from fourfold.metrics import trackers
from fourfold.metrics.jsonl import read_jsonl
from fourfold.metrics.sinks import open_sinks
from fourfold.metrics.trackers import TRACKERS, TrackerSink, flat

CONFIG = {"Engine": {"max_steps": 3, "eval_tasks": []}, "Global": {"api_key": "hush", "seed": 7}}
TRAIN = {
    **dict.fromkeys(name for names in trackers.GROUPS.values() for name in names),
    "kind": "train",
    "loss": 2.5,
    "learning_rate": 1e-3,
    "grad_norm": float("nan"),
    "seconds": {"reader": 0.1},
    "layer_norms": {"layers.0-5": 0.25},
}
EVAL = {"kind": "eval", "loss": 2.25}
TASK = {"kind": "task", "task": "words", "numbers": {"accuracy": 0.5}}
ENVIRONMENT = ROOT / ".venv-trackers"


def steps(sink: TrackerSink, *numbers: int) -> None:
    for step in numbers:
        sink.write(TRAIN | {"step": step})
    sink.write(EVAL | {"step": numbers[-1]})
    sink.write(TASK | {"step": numbers[-1]})
    sink.write({"kind": "notice", "step": numbers[-1], "text": "no number"})
    sink.close()


# -- stand-ins with the packages' own signatures --------------------------------------------------


class Recorder:
    """Keeps the calls made to it, and checks each against a signature."""

    def __init__(self, **signatures: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for name, signature in signatures.items():
            setattr(self, name, self._function(name, signature))

    def _function(self, name: str, signature: str) -> Any:
        space: dict[str, Any] = {}
        exec(f"def function({signature}): pass", space)
        form = inspect.signature(space["function"])

        def call(*given: Any, **named: Any) -> Any:
            form.bind(*given, **named)
            self.calls.append((name, given, named))
            return types.SimpleNamespace(
                info=types.SimpleNamespace(run_id="run"), experiment_id="7", hash="run"
            )

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, named) for called, given, named in self.calls if called == name]


@pytest.fixture
def swanlab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder(
        init="project=None, workspace=None, experiment_name=None, description=None, config=None, "
        "logdir=None, mode=None, id=None, resume=None, reinit=None",
        log="data, step=None, print_to_console=False",
        finish="state='success', error=None",
    )
    made.config = Recorder(update="data=None, **more")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swanlab", made)  # type: ignore[arg-type]
    yield made


def test_numbers_by_step_config_and_summary(tmp_path: Path, swanlab: Recorder) -> None:
    steps(TrackerSink("swanlab", tmp_path, CONFIG), 1, 2)
    ((_, begun),) = swanlab.named("init")
    assert begun["mode"] == "offline" and begun["logdir"] == str(tmp_path / "swanlab")
    assert begun["config"]["Engine.max_steps"] == "3"
    assert begun["config"]["Global.api_key"] == "[redacted]"
    first, second, evaluated, task = swanlab.named("log")
    assert first[1] == {"step": 1} and second[1] == {"step": 2}
    assert first[0][0]["train/loss"] == 2.5 and first[0][0]["grad_norm/layers.0-5"] == 0.25
    assert "train/grad_norm" not in first[0][0]  # no number
    assert evaluated[0][0]["eval/loss"] == 2.25 and task[0][0] == {"task/words/accuracy": 0.5}
    (((summary,), _),) = swanlab.config.named("update")  # type: ignore[attr-defined]
    assert summary["summary/eval/least_loss"] == 2.25 and summary["summary/step"] == 2
    assert len(swanlab.named("finish")) == 1


def test_a_resumed_run_continues_the_tracker_s(tmp_path: Path, swanlab: Recorder) -> None:
    steps(TrackerSink("swanlab", tmp_path, CONFIG), 1)
    steps(TrackerSink("swanlab", tmp_path, CONFIG, resume_step=1), 2)
    steps(TrackerSink("swanlab", tmp_path, CONFIG), 1)  # begun anew
    first, resumed, anew = (named["id"] for _, named in swanlab.named("init"))
    assert first == resumed != anew and len(first) == 21


def test_mlflow_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Recorder(
        get_experiment_by_name="name",
        create_experiment="name, artifact_location=None, tags=None",
        create_run="experiment_id, start_time=None, tags=None, run_name=None",
        log_batch="run_id, metrics=(), params=(), tags=(), synchronous=None",
        update_run="run_id, status=None, name=None",
        set_tag="run_id, key, value, synchronous=None",
        set_terminated="run_id, status=None, end_time=None",
    )
    asked: list[str] = []
    tracking = types.ModuleType("mlflow.tracking")
    tracking.MlflowClient = lambda uri: asked.append(uri) or client  # type: ignore[attr-defined]
    entities = types.ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: (key, value, step)  # type: ignore[attr-defined]
    entities.Param = lambda key, value: (key, value)  # type: ignore[attr-defined]
    for name, module in {"mlflow": types.ModuleType("mlflow"), "mlflow.tracking": tracking}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracker.example")
    steps(TrackerSink("mlflow", tmp_path, CONFIG), 1)
    steps(TrackerSink("mlflow", tmp_path, CONFIG, resume_step=1), 2)
    assert asked == ["https://tracker.example"] * 2 and len(client.named("create_run")) == 1
    batches = [named for _, named in client.named("log_batch")]
    assert ("Engine.max_steps", "3") in batches[0]["params"]
    logged = [metric for batch in batches for metric in batch.get("metrics", ())]
    assert ("train/loss", 2.5, 1) in logged and ("train/loss", 2.5, 2) in logged
    assert len(client.named("set_terminated")) == 2


def test_values_by_their_names() -> None:
    assert dict(flat({"a": {"b": None, "c": [1, {"d": 2}]}, "e": True})) == {
        "a.b": "None",
        "a.c": "[1, {'d': 2}]",
        "e": "True",
    }


# -- trackers that fail ---------------------------------------------------------------------------


def warnings_of(directory: Path) -> list[str]:
    found = [one for one in read_jsonl(directory / "metrics.jsonl") if one["kind"] == "notice"]
    return [one["text"] for one in found if one["level"] == "WARNING"]


def record_steps(directory: Path, *names: str) -> list[str]:
    with open_sinks(directory, tensorboard=False, trackers=names, config=CONFIG) as sinks:
        for step in range(1, 4):
            sinks.task("words", "cloze", {"accuracy": 0.5}, step=step, seconds=0.1)
            for thread in threading.enumerate():
                if thread.name.startswith("tracker "):
                    thread.join(0.05)
    return warnings_of(directory)


def test_a_missing_package_is_one_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aim", None)
    (told,) = record_steps(tmp_path, "aim")
    assert told.startswith("aim cannot be written") and "pip install aim" in told


class Broken:
    id = "run"

    def __init__(self, *given: object) -> None:
        if self.fails == "open":
            raise SystemExit("no account")

    fails = ""

    def log(self, step: int, numbers: object) -> None:
        if self.fails == "log":
            raise ConnectionError("the network is away")

    def end(self, summary: object) -> None:
        if self.fails == "end":
            raise RuntimeError("not sent")


@pytest.mark.parametrize(
    ("fails", "words"), [("open", "no account"), ("log", "network is away"), ("end", "not sent")]
)
def test_a_tracker_that_fails_is_one_notice_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, words: str
) -> None:
    monkeypatch.setitem(TRACKERS, "comet", type("Failing", (Broken,), {"fails": fails}))
    told = record_steps(tmp_path, "comet")
    assert words in told[0] and told[0].startswith("comet cannot be written")
    assert len(told) == 1
    kept = read_jsonl(tmp_path / "metrics.jsonl")
    assert [one["step"] for one in kept if one["kind"] == "task"] == [1, 2, 3]


def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    hanging = type("Hanging", (Broken,), {"log": lambda *given: release.wait(60) and None})
    monkeypatch.setitem(TRACKERS, "comet", hanging)
    monkeypatch.setattr(TrackerSink, "END_SECONDS", 0.1)
    (told,) = record_steps(tmp_path, "comet")
    release.set()
    assert "has not ended" in told


# -- the real packages ----------------------------------------------------------------------------

# First steps, or those of a run that is resumed.
_RUN = """
import sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/metrics"]
from test_trackers import CONFIG, TrackerSink, steps
name, place, resumed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
steps(TrackerSink(name, place, CONFIG, resumed), *((3,) if resumed else (1, 2)))
"""


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(), reason="needs the trackers; run `make setup-trackers`"
)
@pytest.mark.parametrize("name", TRACKERS)
def test_the_real_package_without_a_network(tmp_path: Path, name: str) -> None:
    """Started, ended, and continued in another process, all offline."""
    python, place = ENVIRONMENT / "bin" / "python", tmp_path / "run"
    place.mkdir()
    environment = {"HOME": str(tmp_path), "PATH": f"{python.parent}:/usr/bin:/bin"}
    for resumed in ("0", "2"):
        command = [python, "-c", _RUN, name, place, resumed]
        own = environment | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, check=True, timeout=300, env=own)
    run_id = (place / f"{name}_run_id.txt").read_text()
    READERS[name](place, run_id, python)


def read_mlflow(place: Path, run_id: str, python: Path) -> None:
    if (place / "mlflow.db").exists():
        with sqlite3.connect(place / "mlflow.db") as database:
            rows = database.execute("select step, value from metrics where key = 'train/loss'")
            assert sorted(rows) == [(1, 2.5), (2, 2.5), (3, 2.5)]
        return
    (file,) = place.glob(f"mlruns/*/{run_id}/metrics/train/loss")
    assert [line.split()[1:] for line in file.read_text().splitlines()] == [
        ["2.5", str(step)] for step in (1, 2, 3)
    ]


def read_aim(place: Path, run_id: str, python: Path) -> None:
    # Opened for reading alone, Aim shows a run only once its server has indexed it.
    code = (
        "import json, sys; from aim import Run; from aim.storage.context import Context; "
        "run = Run(sys.argv[2], repo=sys.argv[1], system_tracking_interval=None, "
        "log_system_params=False, capture_terminal_logs=False); "
        "steps, (values, *_) = run.get_metric('train/loss', Context({})).data.items_list(); "
        "print(json.dumps([steps, values])); print(run['config']['Engine.max_steps'])"
    )
    done = subprocess.run([python, "-c", code, place / "aim", run_id], check=True, text=True,
                          stdout=subprocess.PIPE, timeout=120)  # fmt: skip
    losses, most = done.stdout.strip().splitlines()[-2:]
    assert json.loads(losses) == [[1, 2, 3], [2.5, 2.5, 2.5]] and most == "3"


def read_swanlab(place: Path, run_id: str, python: Path) -> None:
    logs = [*place.glob(f"swanlab/run-*-{run_id}/run-{run_id}.swanlab")]
    assert len(logs) == 2 and all(b"train/loss" in log.read_bytes() for log in logs)


def read_comet(place: Path, run_id: str, python: Path) -> None:
    found = []
    for archive in (place / "comet").glob(f"{run_id}*.zip"):
        messages = zipfile.ZipFile(archive).read("messages.json").splitlines()
        metrics = [json.loads(line)["payload"].get("metric") for line in messages]
        found += [m["step"] for m in metrics if m and m["metricName"] == "train/loss"]
    assert sorted(found) == [1, 2, 3]


READERS = {"mlflow": read_mlflow, "aim": read_aim, "swanlab": read_swanlab, "comet": read_comet}
