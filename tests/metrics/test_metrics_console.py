"""The log lines: rebuilt from their numbers, they equal the ones in the documents."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError, report, say
from fourfold.metrics import Console, Sinks, Step
from fourfold.metrics.lines import escape, log_line, train_message
from fourfold.terminal import duration

HERE = Path(__file__).parent
# As printed for 8 GPUs, 2048 tokens per step; the escape characters came out as spaces.
EIGHT_GPUS = (HERE / "log_eight_gpus.txt").read_text().splitlines()
# As printed for one GPU, 8192 tokens per step.
ONE_GPU = (HERE / "log_one_gpu.txt").read_text().splitlines()

FIELDS = re.compile(
    r"\[(?P<time>\d{4}-[^]]+)\] \[    INFO\].* - global step (?P<step>\d+), epoch: (?P<epoch>\d+), "
    r"batch: (?P<batch>\d+), loss: (?P<loss>\S+), avg_reader_cost: (?P<reader_seconds>\S+) sec, "
    r"avg_batch_cost: (?P<batch_seconds>\S+) sec, speed: (?P<steps_per_second>\S+) step/s, "
    r"ips_total: (?P<ips_total>\S+) tokens/s, ips: (?P<ips>\S+) tokens/s, "
    r"learning rate: (?P<learning_rate>\S+)"
)


def parse(line: str) -> dict[str, str]:
    found = FIELDS.search(line)
    assert found, line
    return found.groupdict()


def rebuild(line: str, colour: bool) -> str:
    fields = parse(line)
    when = fields.pop("time").replace(",", ".").replace(" ", "T")
    whole = ("step", "epoch", "batch")
    record = {name: int(v) if name in whole else float(v) for name, v in fields.items()}
    return log_line(train_message(record), when, colour=colour)


@pytest.mark.parametrize("line", ONE_GPU)
def test_plain_lines_equal_the_documents(line: str) -> None:
    assert rebuild(line, colour=False) == line


@pytest.mark.parametrize("line", EIGHT_GPUS)
def test_coloured_lines_equal_the_documents(line: str) -> None:
    coloured = rebuild(line, colour=True)
    assert coloured.startswith("\x1b[32m[")
    assert coloured.replace("\x1b", " ").strip() == line


@pytest.mark.parametrize(
    ("line", "tokens", "world"),
    [(line, 2048, 8) for line in EIGHT_GPUS] + [(line, 8192, 1) for line in ONE_GPU],
)
def test_our_rates_are_the_documents_rates(line: str, tokens: int, world: int) -> None:
    """From the printed cost of a batch, within what its last printed digit leaves open."""
    fields = {name: float(value) for name, value in parse(line).items() if name != "time"}
    fastest = tokens / (fields["batch_seconds"] - 5e-6)
    slowest = tokens / (fields["batch_seconds"] + 5e-6)
    assert slowest - 0.5 <= fields["ips_total"] <= fastest + 0.5
    assert slowest / world - 0.5 <= fields["ips"] <= fastest / world + 0.5
    assert fields["steps_per_second"] == pytest.approx(1 / fields["batch_seconds"], abs=0.006)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def said(stream: io.StringIO, speak: Callable[[Sinks], None], **options: Any) -> str:
    with Sinks(Console(stream, **options)) as sinks:
        speak(sinks)
    return stream.getvalue()


def test_elsewhere_than_on_a_terminal_lines_are_plain(make_step: Callable[..., Step]) -> None:
    text = said(io.StringIO(), lambda sinks: sinks.train(make_step(7)), max_steps=10)
    assert text == (
        "[2022-07-27 12:42:46,601] [    INFO] - global step 7, epoch: 0, batch: 6, "
        "loss: 10.300000000, avg_reader_cost: 0.01000 sec, avg_batch_cost: 0.50000 sec, "
        "speed: 2.00 step/s, ips_total: 2048 tokens/s, ips: 1024 tokens/s, "
        "learning rate: 1.00000e-04\n"
    )


def terminal_text(
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    speak: Callable[[Sinks], None],
    now: Iterator[float],
) -> str:
    """What a terminal of so many columns gets to see of a run of 3614 steps resumed at 10."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with Sinks(Console(stream, max_steps=3614, start_step=10, clock=lambda: next(now))) as sinks:
        speak(sinks)
    return stream.getvalue()


def test_a_terminal_shows_colour_and_progress(
    make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    def four_steps(sinks: Sinks) -> None:
        for step in (11, 12, 13):
            sinks.end_step(step, 10.0 - step / 100, 2048)
        sinks.train(make_step(13))
        sinks.evaluation("eval", step=13, epoch=0, batch=9, loss=9.5, seconds=5.0, batches=10)
        sinks.end_step(14, 9.6, 2048)

    times = iter([0.0, 1.0, 2.0, 3.0, 40.0])
    text = terminal_text(monkeypatch, 100, four_steps, times)
    assert "global step" not in text, "the bar takes the place of the lines of steps"
    assert re.search(r"\x1b\[32m\[.*\[eval\] epoch: 0, batch: 9, loss: 9.500000000", text)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "step 11/3,614" in plain and "loss 9.890" in plain
    # The speed is that of most steps, the time left that of all: 40 s for 4 steps, 3600 to go.
    assert "step 14/3,614  loss 9.600  2,048 tokens/s  0:40, 10:00:00 left" in plain


def test_a_narrow_terminal_has_a_shorter_bar_and_fewer_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for columns in (36, 40, 50, 60, 72, 80, 120):
        text = terminal_text(
            monkeypatch, columns, lambda sinks: sinks.end_step(11, 9.9, 2048), iter([0.0, 1.0])
        )
        drawn = next(line for line in re.split(r"[\r\n]", text) if "11/3,614" in line)
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
        assert plain.rstrip().endswith("1:00:03 left") and len(plain.rstrip()) <= columns
        assert "loss 9.900" in plain and ("tokens/s" in plain) == (columns > 50)
        assert ("0:01, " in plain) == (columns >= 72)


def test_the_bar_is_drawn_ten_times_a_second_at_most_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def steps(sinks: Sinks) -> None:
        for step in (11, 12, 13, 3614):
            sinks.end_step(step, 9.9, 2048)

    text = terminal_text(monkeypatch, 100, steps, iter([0.0, 1.0, 1.05, 1.2, 1.21]))
    shown = [f"step {step}/" in text.replace(",", "") for step in (11, 12, 13, 3614)]
    assert shown == [True, False, True, True]


def test_no_color_is_respected(
    make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in said(Terminal(), lambda sinks: sinks.train(make_step(1)))


def test_a_dumb_terminal_gets_plain_lines(
    make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = said(Terminal(), lambda sinks: sinks.train(make_step(1)), max_steps=10)
    assert "\x1b" not in text and text.count("\n") == 1


@pytest.mark.parametrize("name", ["eval", "test"])
def test_evaluation_lines(name: str) -> None:
    text = said(
        io.StringIO(),
        lambda sinks: sinks.evaluation(
            name,  # type: ignore[arg-type]
            step=100,
            epoch=0,
            batch=99,
            loss=3.25,
            seconds=5.0,
            batches=10,
        ),
    )
    assert text.endswith(
        f"] [    INFO] - [{name}] epoch: 0, batch: 99, loss: 3.250000000, "
        f"avg_{name}_cost: 0.50000 sec, speed: 2.00 step/s\n"
    )


def test_notices_and_events_share_the_prefix() -> None:
    def speak(sinks: Sinks) -> None:
        sinks.notice("first", "second", level="WARNING")
        sinks.event("skipped", step=5, samples=[1, 2], reason="loss is nan")

    first, second, third = said(io.StringIO(), speak).splitlines()
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[ WARNING\] - first", first)
    assert second.endswith("[ WARNING] - second")
    assert third.endswith("[    INFO] - [skipped] step: 5, samples: [1, 2], reason: loss is nan")


@given(st.text())
def test_a_message_stays_one_printable_line(text: str) -> None:
    assert escape(text).isprintable()
    output = said(io.StringIO(), lambda sinks: sinks.notice(text))
    assert len(output.splitlines()) == 1 and output.endswith("\n")


def test_escapes_are_readable_and_words_untouched() -> None:
    assert escape("a\nb\x1b[2J\t\u202e") == "a\\nb\\x1b[2J\\t\\u202e"
    assert escape("größe 模型") == "größe 模型"


def test_a_stream_that_cannot_encode_a_character_gets_its_escape() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Sinks(Console(stream)).notice("größe")
    assert b"gr\\xf6\\xdfe" in raw.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (3909.4, "1:05:09"), (2 * 86400 + 3 * 3600, "2d 03:00:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_short_durations_have_no_empty_hours() -> None:
    assert [duration(309, short=True), duration(3909, short=True)] == ["5:09", "1:05:09"]


@pytest.fixture
def deserted() -> Iterator[TextIO]:
    """A pipe that nobody reads any more, as standard output is behind `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    yield stream
    stream.close()  # raises if it still holds what cannot be written


def test_a_reader_that_went_away_is_no_error(
    deserted: TextIO, make_step: Callable[..., Step]
) -> None:
    with Sinks(Console(deserted, max_steps=3)) as sinks:
        for step in (1, 2, 3):
            sinks.train(make_step(step))
    say("goes nowhere", deserted)


def test_an_error_that_nobody_can_read_still_has_its_exit_code(
    deserted: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", deserted)
    assert report(UserError("unheard")) == 2
    assert report(ValueError("unheard")) == 1


def test_a_full_disk_takes_some_lines_and_not_the_run(make_step: Callable[..., Step]) -> None:
    with open("/dev/full", "w") as full, Sinks(Console(full)) as sinks:
        sinks.train(make_step(1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
        sinks.train(make_step(2))
