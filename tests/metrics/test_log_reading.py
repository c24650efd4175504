"""Logs read back: every format we print and those of others, and never a crash on the rest."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import DataError
from fourfold.metrics import Console, Sinks, Step, open_sinks
from fourfold.metrics.lines import FleetXLines, LineStyle, MegatronLines, perplexity
from fourfold.tools.targets import (
    MAX_LINE_BYTES,
    LogRecord,
    RunTarget,
    check_target,
    log_file,
    parse_line,
    read_log,
)

HERE = Path(__file__).parent
MEGATRON_LM = (
    " [2026-08-22 10:00:00.123456] iteration      100/     500 | consumed samples:        51200 | "
    "elapsed time per iteration (ms): 812.4 | throughput per GPU (TFLOP/s/GPU): 391.2 | "
    "learning rate: 1.500000E-04 | global batch size:   512 | lm loss: 6.543210E+00 | "
    "loss scale: 1.0 | grad norm: 0.812 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)


def test_the_published_log_of_megatron_deepspeed() -> None:
    *_, before, training, evaluation = read_log(HERE / "log_megatron_175b.txt")
    assert before.step == 10
    assert training == LogRecord("train", 2400, 9.002386, tokens_per_device=155.603)
    assert evaluation == LogRecord("eval", 2400, 9.009587, 8181.144)


def test_a_line_of_megatron_lm_has_no_speed_of_a_device() -> None:
    assert parse_line(MEGATRON_LM) == LogRecord("train", 100, 6.54321)
    assert parse_line("[default7]:" + MEGATRON_LM) == LogRecord("train", 100, 6.54321)
    text = " validation loss at iteration 100 on validation set | lm loss value: 2.0E+00 | "
    assert parse_line(text) == LogRecord("eval", 100, 2.0, math.exp(2.0))


def test_a_loss_that_megatron_left_out_is_missing() -> None:
    line = MEGATRON_LM.replace(" lm loss: 6.543210E+00 |", "")
    assert parse_line(line) == LogRecord("train", 100, None)


@pytest.mark.parametrize("name", ["log_one_gpu.txt", "log_eight_gpus.txt"])
def test_the_documents_logs_of_fleetx(name: str) -> None:
    lines = list(read_log(HERE / name))
    assert len(lines) == len((HERE / name).read_text().splitlines())
    assert all(line.kind == "train" and line.loss and line.tokens_per_device for line in lines)


def styles() -> list[LineStyle]:
    return [FleetXLines(), MegatronLines(100, 16, 1, 1.0)]


@pytest.mark.parametrize("style", styles(), ids=lambda style: type(style).__name__)
@pytest.mark.parametrize("colour", [False, True])
def test_what_we_print_we_read(
    style: LineStyle,
    colour: bool,
    make_step: Callable[..., Step],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return colour

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Stream()
    with Sinks(Console(stream, style=style)) as sinks:
        write(sinks, make_step)
    file = tmp_path / "log.txt"
    file.write_text(stream.getvalue())
    assert ("\x1b" in stream.getvalue()) == colour
    check(list(read_log(file)))


def test_the_records_of_a_run_directory(make_step: Callable[..., Step], tmp_path: Path) -> None:
    with open_sinks(tmp_path, tensorboard=False, console=Console(io.StringIO())) as sinks:
        write(sinks, make_step)
    file = log_file(tmp_path)
    with file.open("a") as stream:
        stream.write('{"kind": "train", "step": 9, "lo')  # the run was killed
    check(list(read_log(file)))


def write(sinks: Sinks, make_step: Callable[..., Step]) -> None:
    """Two steps and an evaluation between them, among other things."""
    sinks.notice("global steps are counted from 1", "iteration of what?")
    sinks.train(make_step(4, loss=2.5, ips=32.0, batch_seconds=0.5, global_batch_size=1))
    sinks.evaluation("eval", step=4, epoch=0, batch=1, loss=2.25, seconds=1.0, batches=2)
    sinks.event("saved", path="step_4")
    sinks.train(make_step(8, loss=1.5, ips=32.0, batch_seconds=0.5, global_batch_size=1))


def check(lines: list[LogRecord]) -> None:
    assert [(line.kind, line.step, line.loss) for line in lines] == [
        ("train", 4, 2.5),
        ("eval", 4, 2.25),
        ("train", 8, 1.5),
    ]
    assert lines[1].perplexity == pytest.approx(math.exp(2.25), rel=1e-6)
    assert [lines[0].tokens_per_device, lines[2].tokens_per_device] == [32.0, 32.0]


def test_a_nan_in_our_records_is_one() -> None:
    found = parse_line('{"kind": "train", "step": 3, "loss": "NaN", "ips": 5}')
    assert found and found.loss is not None and math.isnan(found.loss)


def test_an_endless_line_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    with file.open("w") as stream:
        for _ in range(3):
            stream.write("x" * MAX_LINE_BYTES)
        stream.write(f"{MEGATRON_LM}\n{MEGATRON_LM}\n")
    assert [line.step for line in read_log(file)] == [100]


def test_hostile_repetition_takes_no_time() -> None:
    for text in ("validation loss at iteration 1 ", "iteration     1/", "\x1b[1;", "[eval] epoch"):
        line = text * (MAX_LINE_BYTES // len(text))
        assert parse_line(line) is None


@pytest.mark.parametrize("name", ["nothing", "directory"])
def test_what_cannot_be_read_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(DataError, match=name):
        list(read_log(log_file(tmp_path / name)))


PIECES = """iteration |global step |[eval] epoch: 0,|lm loss: |loss: |, |nan|1e999|-|12|/|ips: |
validation loss at iteration |lm loss value: |lm loss PPL: |tokens/s|{|}|"kind": "train"|"step":"""
words = st.sampled_from([*PIECES.split("|"), " | ", "9" * 400, "\x1b[32m", "\r"])


@given(st.lists(words | st.text(max_size=5), max_size=12).map("".join))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    found = parse_line(text, last_step=3)
    if found is not None:
        assert found.step >= 0
        check_target([found], RunTarget(loss=1.0, ppl=1.0, tgs=1.0))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)


@given(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["train", "eval", "notice"]) | values, "step": values},
        optional={"loss": values, "ips": values},
    )
)
def test_no_record_makes_the_reader_fail(record: dict[str, object]) -> None:
    found = parse_line(json.dumps(record))
    if found is not None:
        check_target(
            [found, LogRecord("train", 5, 1.0)], RunTarget(step=5, loss=1.0, ppl=1.0, tgs=1.0)
        )


@given(st.binary(max_size=200) | st.just(b'{"kind": "train", "step": 1, "loss": ' + b"9" * 5000))
def test_no_bytes_make_the_reader_fail(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("logs") / "log"
    file.write_bytes(content)
    list(read_log(file))


def test_a_perplexity_read_back_is_the_one_that_was_printed(tmp_path: Path) -> None:
    """Beyond exp(20) all of Fourfold prints the bound, and so does what reads its logs."""
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"kind": "eval", "step": 1, "loss": 31.0}\n')
    [line] = read_log(log)
    assert line.perplexity == perplexity(31.0) == pytest.approx(math.exp(20))
