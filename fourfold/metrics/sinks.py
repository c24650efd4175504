"""Metric sinks: the records of a run to the console, `metrics.jsonl` and trackers.

Everything becomes one flat record with a kind (run, train, eval, test, task, samples, event,
notice), a step and a time, and every sink gets every record. Rank 0 opens sinks; the other ranks
use `Sinks()`, which has nowhere to write to.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TextIO, runtime_checkable

from fourfold.atomic_files import replace_text
from fourfold.errors import UserError, heard_or_not
from fourfold.metrics.jsonl import FILE_NAME, RUN, JsonLines, RunFacts, parse_line, timestamp
from fourfold.metrics.lines import FleetXLines, LineStyle, sample_lines
from fourfold.metrics.meter import Step
from fourfold.metrics.trackers import TensorBoard, TrackerSink, WeightsAndBiases
from fourfold.terminal import ProgressBar, duration, is_terminal

if TYPE_CHECKING:
    from fourfold.metrics.progress import KubeflowProgress
    from fourfold.metrics.prometheus import MetricsPort


class MetricSink(Protocol):
    name: str

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class StepSink(MetricSink, Protocol):
    """One that is told of every step, whether or not there is a record of it."""

    def end_step(self, step: int, loss: float, tokens: int) -> None: ...


@runtime_checkable
class RewindingSink(MetricSink, Protocol):
    """One that drops what it has of the steps after one that the run goes back to."""

    def rewind(self, step: int) -> None: ...


@dataclass(frozen=True)
class TextSample:
    """A text that a run wrote."""

    prompt: str
    text: str  # without the prompt


@runtime_checkable
class SampleSink(MetricSink, Protocol):
    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None: ...


class Sinks:
    """Turns what happens into records and hands each to every sink.

    No record is worth a run: a sink that cannot write is reported once, to the others, and the run
    continues.
    """

    def __init__(self, *sinks: MetricSink, step: int = 0) -> None:
        self._sinks = sinks
        self._step = step
        self._failing: set[str] = set()

    def run(self, facts: RunFacts) -> None:
        """For programs that read the records; people read the notices."""
        self._write(RUN, asdict(facts))

    def train(self, record: Step) -> None:
        self._write("train", asdict(record))

    def end_step(self, step: int, loss: float, tokens: int) -> None:
        """Every step, for a progress bar; records are made at the end of logging windows."""
        for sink in self._sinks:
            if isinstance(sink, StepSink):
                with self._surviving(sink):
                    sink.end_step(step, loss, tokens)

    def evaluation(
        self,
        name: Literal["eval", "test"],
        *,
        step: int,
        epoch: int,
        batch: int,
        loss: float,
        seconds: float,
        batches: int,
        ema_loss: float | None = None,
    ) -> None:
        """An evaluation of `batches` batches that took `seconds` in all, after `step`; `ema_loss`
        is that of the average of the weights, where one is kept."""
        batch_seconds = seconds / batches
        self._write(
            name,
            {
                "step": step,
                "epoch": epoch,
                "batch": batch,
                "loss": float(loss),
                "seconds": seconds,
                "batches": batches,
                "batch_seconds": batch_seconds,
                "steps_per_second": 1 / batch_seconds if batch_seconds > 0 else 0.0,
                **({} if ema_loss is None else {"ema_loss": float(ema_loss)}),
            },
        )

    def task(
        self, name: str, kind: str, numbers: Mapping[str, float], *, step: int, seconds: float
    ) -> None:
        """A task that was measured after `step`."""
        told = {"task": name, "measure": kind, "seconds": seconds, "numbers": dict(numbers)}
        self._write("task", {"step": step, **told})

    def samples(self, samples: Sequence[TextSample], *, step: int, seconds: float) -> None:
        """Texts that the run wrote after `step`. They have a file of their own; the record says
        that there are some."""
        self._write("samples", {"step": step, "number": len(samples), "seconds": seconds})
        for sink in self._sinks:
            if isinstance(sink, SampleSink):
                with self._surviving(sink):
                    sink.write_samples(step, samples)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something that happened to the run: a save, a skipped update, a stop."""
        assert not {"kind", "event", "time"} & fields.keys(), "these say when and what, already"
        self._write("event", {"event": kind, **fields})

    def notice(self, *lines: str, level: Literal["INFO", "WARNING", "ERROR"] = "INFO") -> None:
        """Words for the reader of the log, one log line each."""
        for line in lines:
            self._write("notice", {"level": level, "text": line})

    def seal(self) -> None:
        """With a checkpoint: what was recorded so far can be proved unchanged later."""
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                with self._surviving(sink):
                    sink.seal()

    def rewind(self, step: int) -> None:
        """The run continues after an earlier step."""
        self._step = step
        for sink in self._sinks:
            if isinstance(sink, RewindingSink):
                with self._surviving(sink):
                    sink.rewind(step)

    def close(self) -> None:
        """The console last: it is told of those that cannot be closed, on a disk that is gone."""
        while self._sinks:
            *others, sink = self._sinks
            self._sinks = tuple(others)
            with self._surviving(sink):
                sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        # Every record has a step, so that a resumed run knows which ones to drop.
        self._step = fields.get("step", self._step)
        stamp = {"kind": kind, "step": self._step, "time": timestamp()}
        record = {**stamp, **_plain(fields), "kind": kind}
        for sink in self._sinks:
            with self._surviving(sink):
                sink.write(record)

    @contextmanager
    def _surviving(self, sink: MetricSink) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                self.notice(
                    f"{sink.name} cannot be written ({error.strerror or error}); the run continues",
                    level="WARNING",
                )
        else:
            self._failing.discard(sink.name)


def open_sinks(
    output_dir: str | os.PathLike[str],
    *,
    tensorboard: bool = True,
    tensorboard_dir: str | os.PathLike[str] | None = None,
    wandb: bool = False,
    trackers: Sequence[str] = (),
    run_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    console: Console | None = None,
    style: LineStyle | None = None,
    max_steps: int | None = None,
    resume_step: int = 0,
    port: MetricsPort | None = None,
    progress: KubeflowProgress | None = None,
) -> Sinks:
    """Open everything a run writes its metrics to, under `output_dir` (TensorBoard's files, if
    asked for, under a directory of their own).

    `resume_step` is the last step already done; what an earlier run recorded beyond it is dropped.
    `max_steps` is the end of the progress bar on a terminal, `style` the form of the lines; a
    `console` that was made elsewhere is used as it is, and so are a metrics `port` and the
    `progress` of a TrainJob.
    """
    directory, config = Path(output_dir), _plain(config or {})
    if console is None:
        console = Console(max_steps=max_steps, start_step=resume_step, style=style)
    sinks: list[MetricSink] = [console]
    sinks += [sink for sink in (port, progress) if sink is not None]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if wandb:
            sinks.append(WeightsAndBiases(directory, run_name, config, resume_step))
        if tensorboard:
            sinks.append(
                TensorBoard(Path(tensorboard_dir or directory / "tensorboard"), config, resume_step)
            )
        sinks += [TrackerSink(name, directory, config, resume_step) for name in trackers]
        sinks.append(SampleLines(directory / SAMPLES_NAME, resume_step))
        # Last, because it changes what an earlier run left: nothing after it may fail.
        jsonl = JsonLines(directory / FILE_NAME, resume_step)
    except OSError as error:
        raise UserError(
            f"{directory}: metrics cannot be written there ({error.strerror}); choose an output "
            "directory you can write to"
        ) from error
    # They are closed from the last to the first, and what fails in that is still recorded.
    sinks.insert(1, jsonl)
    opened = Sinks(*sinks, step=resume_step)
    if jsonl.dropped:
        opened.notice(
            f"{directory / FILE_NAME}: dropped {jsonl.dropped} records of an earlier run beyond "
            f"step {resume_step}; the file as it was is {FILE_NAME}.bak"
        )
    return opened


def _plain(value: Any) -> Any:
    """`value` as JSON's own types; arrays and tensors become lists, the unknown its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


# -- the console --------------------------------------------------------------------------------


class Console:
    """Writes the records of a run as lines to `stream`, by default standard output.

    The lines are FleetX's unless another `style` is named. On a terminal the prefix of lines that
    have one is coloured, and with `max_steps` a progress bar below the log takes the place of the
    lines of steps; elsewhere the lines are plain.
    """

    name = "the console"

    def __init__(
        self,
        stream: TextIO | None = None,
        max_steps: int | None = None,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        style: LineStyle | None = None,
    ) -> None:
        self._style = style or FleetXLines()
        self._stream = stream if stream is not None else sys.stdout
        terminal = is_terminal(self._stream)
        self._colour = terminal and not os.environ.get("NO_COLOR")
        self._bar = ProgressBar(self._stream, redraws=False) if terminal else None
        self._steps = (
            StepProgress(self._bar, max_steps, start_step, clock)
            if self._bar is not None and max_steps is not None
            else None
        )

    def write(self, record: Mapping[str, Any]) -> None:
        with heard_or_not(self._stream):
            # Made also where they are not shown: a style may count from line to line.
            lines = self._style.lines(record, self._colour)
            if record["kind"] == "train" and self._steps is not None:
                return
            for line in lines:
                self._print(line)

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        with heard_or_not(self._stream):
            for line in sample_lines(step, samples, timestamp(), self._colour):
                self._print(line)

    def end_step(self, step: int, loss: float, tokens: int) -> None:
        """A step, whether or not it gets a record; `tokens` are those of this step."""
        if self._steps is not None:
            with heard_or_not(self._stream):
                self._steps.end_step(step, loss, tokens)

    def close(self) -> None:
        if self._bar:
            with heard_or_not(self._stream):
                self._bar.close()

    def _print(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._bar:
            self._bar.print_above(line)
        else:
            print(line, file=self._stream, flush=True)


class StepProgress:
    """The progress bar of a run: step, loss, speed, time spent and time left."""

    SECONDS_BETWEEN = 0.1  # two redraws, at least
    STEPS_OF_RATE = 20  # the speed shown is the median of the last ones

    def __init__(
        self, bar: ProgressBar, max_steps: int, start_step: int, clock: Callable[[], float]
    ) -> None:
        self._bar = bar
        self._max_steps = max_steps
        self._start_step = start_step
        self._clock = clock
        self._start = self._last_step = clock()
        self._last_shown = -math.inf
        self._rates: deque[float] = deque(maxlen=self.STEPS_OF_RATE)

    def end_step(self, step: int, loss: float, tokens: int) -> None:
        now = self._clock()
        # Not the mean: a step with an evaluation or a save in it says nothing about the others.
        self._rates.append(tokens / max(now - self._last_step, 1e-9))
        self._last_step = now
        if now - self._last_shown < self.SECONDS_BETWEEN and step < self._max_steps:
            return
        self._last_shown = now
        self._show(step, loss, statistics.median(self._rates), now)

    def log(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """A step whose speed is known from elsewhere, such as a line of a log."""
        self._show(step, loss, tokens_per_second, self._clock())

    def _show(self, step: int, loss: float, rate: float | None, now: float) -> None:
        spent = now - self._start
        # Evaluations and saves are in this mean, so what is left includes theirs.
        each = spent / max(step - self._start_step, 1)
        left = f"{duration(each * max(self._max_steps - step, 0), short=True)} left"
        at = f"{step:,}/{self._max_steps:,}"
        speed = [] if rate is None else [f"{rate:,.0f} tokens/s"]
        self._bar.show(
            step / self._max_steps,
            "  ".join(
                [f"step {at}", f"loss {loss:.3f}", *speed, f"{duration(spent, short=True)}, {left}"]
            ),
            "  ".join([f"step {at}", f"loss {loss:.3f}", *speed, left]),
            "  ".join([at, f"loss {loss:.3f}", *speed, left]),
            "  ".join([at, f"loss {loss:.3f}", left]),
        )


# -- samples.jsonl ------------------------------------------------------------------------------

SAMPLES_NAME = "samples.jsonl"


class SampleLines:
    """Appends the texts that a run writes, one JSON object a line with step, prompt and text. There
    is no file before the first; what is of steps after `resume_step` is dropped."""

    name = SAMPLES_NAME

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self._path = path
        self.rewind(resume_step)

    def rewind(self, step: int) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_text(errors="replace").splitlines()
        kept = [line for line in lines if _step(parse_line(line.encode())) <= step]
        if kept != lines:
            replace_text(self._path, "".join(f"{line}\n" for line in kept))

    def write(self, record: Mapping[str, Any]) -> None:
        """Records go to other files."""

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        rows = [{"step": step, **asdict(sample)} for sample in samples]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def close(self) -> None:
        """It is open for the moment of writing only."""


def _step(record: Mapping[str, Any] | None) -> float:
    step = None if record is None else record.get("step")
    return step if isinstance(step, int) else math.inf
