"""Records on disk: JSONL, TensorBoard read back, W&B through a stand-in, secrets kept out."""

from __future__ import annotations

import errno
import io
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.errors import DataError, UserError
from fourfold.metrics import Console, Sinks, Step, open_sinks, read_jsonl
from fourfold.metrics.jsonl import JsonLines
from fourfold.metrics.trackers import redact


def open_quiet(directory: Path, **options: Any) -> Sinks:
    quiet: dict[str, Any] = {"tensorboard": False, "console": Console(io.StringIO())}
    return open_sinks(directory, **(quiet | options))


def steps_of(directory: Path, kind: str = "train") -> list[int]:
    records = read_jsonl(directory / "metrics.jsonl")
    return [record["step"] for record in records if record["kind"] == kind]


def test_every_kind_of_record_is_kept(tmp_path: Path, make_step: Callable[..., Step]) -> None:
    with open_quiet(tmp_path / "a" / "run") as sinks:
        sinks.notice("hello\nworld", level="WARNING")
        sinks.train(make_step(1))
        sinks.evaluation("eval", step=1, epoch=0, batch=0, loss=3.0, seconds=4.0, batches=2)
        sinks.event("skipped", samples=np.array([4, 5]), where=Path("x"))
        sinks.evaluation("test", step=1, epoch=0, batch=0, loss=3.5, seconds=4.0, batches=2)
    records = read_jsonl(tmp_path / "a" / "run" / "metrics.jsonl")
    assert [record["kind"] for record in records] == ["notice", "train", "eval", "event", "test"]
    notice, train, evaluation, event, _ = records
    assert notice["text"] == "hello\nworld" and notice["level"] == "WARNING" and notice["step"] == 0
    assert {key: value for key, value in train.items() if key != "kind"} == vars(make_step(1))
    assert evaluation["loss"] == 3.0 and evaluation["batch_seconds"] == 2.0
    assert event["event"] == "skipped" and event["samples"] == [4, 5] and event["where"] == "x"
    assert event["step"] == 1 and "T" in event["time"]


def test_each_record_is_on_disk_at_once(tmp_path: Path, make_step: Callable[..., Step]) -> None:
    """A process killed after a record leaves the record."""
    sinks = open_quiet(tmp_path)
    sinks.train(make_step(1))
    assert steps_of(tmp_path) == [1]
    sinks.close()
    sinks.close()


def test_what_json_lacks_is_valid_json_and_comes_back(
    tmp_path: Path, make_step: Callable[..., Step]
) -> None:
    with open_quiet(tmp_path) as sinks:
        sinks.train(make_step(1, loss=math.nan, grad_norm=math.inf, seconds={"save": -math.inf}))
        sinks.notice("NaN")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    raw = json.loads(lines[0], parse_constant=refuse)
    assert (raw["loss"], raw["grad_norm"]) == ("NaN", "Infinity")
    train, notice = read_jsonl(tmp_path / "metrics.jsonl")
    assert math.isnan(train["loss"]) and train["grad_norm"] == math.inf
    assert train["seconds"] == {"save": -math.inf}
    assert notice["text"] == "NaN"


def test_a_resumed_run_has_one_history(tmp_path: Path, make_step: Callable[..., Step]) -> None:
    with open_quiet(tmp_path) as sinks:
        for step in range(1, 8):
            sinks.train(make_step(step))
            sinks.event("after", step=step)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with open_quiet(tmp_path, resume_step=4) as sinks:
        for step in range(5, 10):
            sinks.train(make_step(step))
    assert steps_of(tmp_path) == list(range(1, 10))
    *after, lost = [r for r in read_jsonl(tmp_path / "metrics.jsonl") if r["kind"] == "event"]
    assert [record["step"] for record in after] == [1, 2, 3, 4]
    assert (lost["event"], lost["step"], lost["last_step"]) == ("lost_steps", 4, 7)
    assert (tmp_path / "metrics.jsonl.bak").read_bytes() == before
    (notice,) = [r for r in read_jsonl(tmp_path / "metrics.jsonl") if r["kind"] == "notice"]
    assert "dropped 6 records" in notice["text"] and notice["step"] == 4


def test_resuming_where_the_run_ended_changes_nothing(
    tmp_path: Path, make_step: Callable[..., Step]
) -> None:
    with open_quiet(tmp_path) as sinks:
        sinks.train(make_step(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    open_quiet(tmp_path, resume_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.seal"]


@pytest.mark.parametrize("torn", [1, 20, 200])
def test_a_torn_last_line_is_passed_over_and_mended(
    tmp_path: Path, make_step: Callable[..., Step], torn: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    with open_quiet(tmp_path) as sinks:
        for step in (1, 2, 3):
            sinks.train(make_step(step))
    path.write_bytes(path.read_bytes()[:-torn])
    left = [1, 2, 3] if torn == 1 else [1, 2]  # without its newline alone, a line is whole
    assert steps_of(tmp_path) == left
    with open_quiet(tmp_path, resume_step=3) as sinks:
        sinks.train(make_step(4))
    assert steps_of(tmp_path) == [*left, 4]


def test_a_damaged_line_in_the_middle_is_named_but_does_not_stop_a_resume(
    tmp_path: Path, make_step: Callable[..., Step]
) -> None:
    path = tmp_path / "metrics.jsonl"
    with open_quiet(tmp_path) as sinks:
        for step in (1, 2, 3):
            sinks.train(make_step(step))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30] + b"\xff\n" + lines[2])
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        read_jsonl(path)
    open_quiet(tmp_path, resume_step=3).close()
    assert steps_of(tmp_path) == [1, 3]


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,0naN\n', max_size=60).map(str.encode))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None
)
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    try:
        read_jsonl(path)
    except DataError as error:
        assert "line" in str(error)
    open_quiet(tmp_path, resume_step=1).close()
    read_jsonl(path)  # opening has mended it


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"[" * 200_000 + b"\n{}\n")
    with pytest.raises(DataError, match="line 1"):
        read_jsonl(path)


def test_a_missing_file_and_an_unusable_directory_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="metrics cannot be written"):
        open_quiet(tmp_path / "file")


def read_tensorboard(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_has_the_numbers_and_no_history_beyond_a_resume(
    tmp_path: Path, make_step: Callable[..., Step]
) -> None:
    with open_quiet(tmp_path, tensorboard=True, config={"wandb_key": "hush", "a": 1}) as sinks:
        for step in range(1, 6):
            sinks.train(make_step(step, mfu=0.5))
        sinks.evaluation("eval", step=5, epoch=0, batch=4, loss=3.0, seconds=1.0, batches=1)
    with open_quiet(tmp_path, tensorboard=True, resume_step=3) as sinks:
        sinks.train(make_step(4, loss=1.0))
        sinks.notice("not a number")
    events = read_tensorboard(tmp_path)
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert losses[-1][1] == 1.0
    assert losses[0][1] == pytest.approx(make_step(1).loss)
    tags = set(events.Tags()["scalars"])
    assert {"train/learning_rate", "speed/ips", "speed/mfu", "seconds/forward_backward"} <= tags
    assert "train/loss_scale" not in tags  # there was none
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"hush" not in config and b'"a": 1' in config


def test_tensorboard_keeps_evaluations(tmp_path: Path) -> None:
    with open_quiet(tmp_path, tensorboard=True) as sinks:
        sinks.evaluation("eval", step=5, epoch=0, batch=4, loss=3.0, seconds=1.0, batches=1)
        sinks.evaluation("test", step=6, epoch=0, batch=5, loss=2.0, seconds=1.0, batches=1)
    events = read_tensorboard(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(5, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("test/loss")] == [(6, 2.0)]


class FakeRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.logged: list[dict[str, float]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert step_metric in (None, "step")

    def log(self, numbers: dict[str, float]) -> None:
        self.logged.append(numbers)

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_one_run_across_a_resume_and_no_secrets(
    tmp_path: Path, make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[FakeRun] = []
    module = types.ModuleType("wandb")
    module.init = lambda **options: runs.append(FakeRun(options)) or runs[-1]  # type: ignore
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = {"Global": {"api_key": "hush", "seed": 1}}
    for resume_step in (0, 1, 0):
        options = {"wandb": True, "run_name": "gpt", "config": config, "resume_step": resume_step}
        with open_quiet(tmp_path, **options) as sinks:
            sinks.train(make_step(resume_step + 1))
            sinks.notice("no numbers")
    first, resumed, fresh = runs
    assert first.options["name"] == "gpt"
    assert first.options["config"] == {"Global": {"api_key": "[redacted]", "seed": 1}}
    assert first.options["id"] == resumed.options["id"] != fresh.options["id"]
    assert [numbers["step"] for numbers in first.logged + resumed.logged] == [1, 2]
    assert first.logged[0]["train/loss"] == make_step(1).loss and first.finished


def test_missing_wandb_names_the_extra_and_leaves_the_history_alone(
    tmp_path: Path, make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quiet(tmp_path) as sinks:
        sinks.train(make_step(1))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'fourfold\[wandb\]'"):
        open_quiet(tmp_path, wandb=True)
    assert steps_of(tmp_path) == [1]


def test_redaction() -> None:
    config = {
        "wandb_api_key": "a",
        "hf_token": "b",
        "Password": 1234,
        "nested": [{"client_secret": {"deep": "c"}, "lr": 1e-3}],
        "tokenizer": "./gpt2",
        "max_tokens": 100,
        "eos_token_id": 50256,
        "empty_key": None,
        "use_token_loss": True,
    }
    assert redact(config) == config | {
        "wandb_api_key": "[redacted]",
        "hf_token": "[redacted]",
        "Password": "[redacted]",
        "nested": [{"client_secret": "[redacted]", "lr": 1e-3}],
    }
    assert config["Password"] == 1234


def test_sinks_without_a_place_to_write_are_silent(
    make_step: Callable[..., Step], capsys: pytest.CaptureFixture[str]
) -> None:
    with Sinks() as sinks:
        sinks.train(make_step(1))
        sinks.notice("nobody hears this")
    assert capsys.readouterr().out == ""


def test_importing_metrics_is_light() -> None:
    code = (
        "import sys, fourfold.metrics; "
        "print([m for m in ('matplotlib', 'tensorboard', 'wandb', 'rich') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


class Flaky:
    """A file that takes so many bytes, and then no more."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 10**9

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_is_told_once_and_loses_no_record(
    tmp_path: Path, make_step: Callable[..., Step]
) -> None:
    jsonl, shown = JsonLines(tmp_path / "metrics.jsonl"), io.StringIO()
    flaky = jsonl._file = Flaky(jsonl._file)  # type: ignore[assignment]
    with Sinks(Console(shown), jsonl) as sinks:
        sinks.train(make_step(1))
        flaky.room = 100  # less than a line, so one is torn
        sinks.train(make_step(2))
        sinks.train(make_step(3))
        assert steps_of(tmp_path) == [1], "and no part of a line behind it"
        flaky.room = 10**9
        sinks.train(make_step(4))
        assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert shown.getvalue().count("metrics.jsonl cannot be written (No space left") == 1
    assert shown.getvalue().count("global step") == 4


def test_a_sink_that_cannot_even_close_hides_no_error(
    tmp_path: Path, make_step: Callable[..., Step]
) -> None:
    class Dead:
        name = "the dead one"
        closed = 0

        def write(self, record: Any) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        def close(self) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

    shown = io.StringIO()
    with (
        pytest.raises(ValueError, match="the real one"),
        Sinks(Dead(), Console(shown), JsonLines(tmp_path / "metrics.jsonl")) as sinks,
    ):
        sinks.train(make_step(1))
        raise ValueError("the real one")
    assert steps_of(tmp_path) == [1]
    assert shown.getvalue().count("the dead one cannot be written (Transport endpoint") == 1


def test_a_disk_that_is_gone_is_told_and_not_raised(
    tmp_path: Path, make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only or unmounted in the middle of a run: neither records nor their end raise."""
    console = io.StringIO()
    sinks = open_quiet(tmp_path, console=Console(console))

    def gone(lines: JsonLines) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(JsonLines, "_write_all", gone)
    sinks.train(make_step(1))
    sinks.close()
    assert console.getvalue().count("metrics.jsonl cannot be written") == 1
    lines = open_quiet(tmp_path, console=Console(console))
    lines.close()
    assert console.getvalue().count("metrics.jsonl cannot be written") == 2, "also at the end alone"
