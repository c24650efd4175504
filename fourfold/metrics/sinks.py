"""Where the records of a run go: the console, `metrics.jsonl`, TensorBoard, W&B.

Everything becomes one flat record with a kind (train, eval, test, event, notice), a step and a
time, and every sink is given every record. Rank 0 opens sinks; the other ranks use `Sinks()`,
which has nowhere to write to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from fourfold.errors import UserError
from fourfold.metrics.console import Console
from fourfold.metrics.jsonl import FILE_NAME, JsonLines
from fourfold.metrics.lines import LineStyle
from fourfold.metrics.meter import Step, timestamp
from fourfold.metrics.trackers import TensorBoard, WeightsAndBiases


class Sink(Protocol):
    name: str

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Turns what happens into records and hands each to every sink.

    No record is worth a run: a sink that cannot write is named once, to the others, and the run
    goes on.
    """

    def __init__(self, *sinks: Sink, step: int = 0) -> None:
        self._sinks = sinks
        self._step = step
        self._failing: set[str] = set()

    def train(self, record: Step) -> None:
        self._write("train", asdict(record))

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
    ) -> None:
        """An evaluation of `batches` batches that took `seconds` in all, after `step`."""
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
            },
        )

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something that happened to the run: a save, a skipped update, a stop."""
        assert not {"kind", "event", "time"} & fields.keys(), "these say when and what, already"
        self._write("event", {"event": kind, **fields})

    def notice(self, *lines: str, level: Literal["INFO", "WARNING", "ERROR"] = "INFO") -> None:
        """Words for the reader of the log, one log line each."""
        for line in lines:
            self._write("notice", {"level": level, "text": line})

    def close(self) -> None:
        for sink in self._sinks:
            with self._surviving(sink):
                sink.close()
        self._sinks = ()

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
    def _surviving(self, sink: Sink) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                self.notice(
                    f"{sink.name} cannot be written ({error.strerror or error}); the run goes on",
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
    run_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    console: Console | None = None,
    style: LineStyle | None = None,
    max_steps: int | None = None,
    resume_step: int = 0,
) -> Sinks:
    """Open everything a run writes its metrics to, under `output_dir` (TensorBoard's files, if
    asked for, under a directory of their own).

    `resume_step` is the last step already done; what an earlier run recorded beyond it is
    dropped. `max_steps` gives the progress display of a terminal its end, `style` the lines their
    form; a `console` that was made elsewhere is used as it is.
    """
    directory, config = Path(output_dir), _plain(config or {})
    if console is None:
        console = Console(max_steps=max_steps, start_step=resume_step, style=style)
    sinks: list[Sink] = [console]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if wandb:
            sinks.append(WeightsAndBiases(directory, run_name, config, resume_step))
        if tensorboard:
            sinks.append(
                TensorBoard(Path(tensorboard_dir or directory / "tensorboard"), config, resume_step)
            )
        # Last, for it changes what an earlier run left: nothing after it can be refused.
        jsonl = JsonLines(directory / FILE_NAME, resume_step)
    except OSError as error:
        raise UserError(
            f"{directory}: metrics cannot be written there ({error.strerror}); choose an output "
            "directory you can write to"
        ) from error
    sinks.append(jsonl)
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
