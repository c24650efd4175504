"""Run directories as one document of plain numbers and texts, which the page and the table show.

    open_runs(paths)             a RunReader for each directory
    RunReader.read()             takes in what was written since; whether there was anything
    document_of(readers, ...)    the document

`metrics.jsonl` is read from where the last reading ended, and as a whole again when the run has
replaced it. Curves are thinned out to a number of points that keeps every spike. Whatever the files
hold, the document has finite numbers, and texts of bounded length: it is foreign data, which the
page never takes for markup.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.errors import UserError
from fourfold.metrics.jsonl import FILE_NAME, RUN, parse_line
from fourfold.metrics.plot import thin_out
from fourfold.watch.goodput import Entry, Moment, Window, number_of, spend
from fourfold.watch.run_files import (
    MOST_CHARACTERS,
    SAMPLE_BYTES,
    Json,
    documents_of,
    finite,
    inside,
    is_held,
    max_steps_of,
    samples_of,
    shorten,
    whole,
)

PAGE = ("fourfold.watch", "page.html")  # package and name of the page that shows documents

# Points of a curve over all runs of a page, so that a page stays small however many there are.
MOST_POINTS, FEWEST_POINTS = 900, 120
MOST_SPIKES, MOST_WARNINGS = 20, 12
MOST_GROUPS, MOST_TASKS = 24, 12  # curves of layers and of tasks
# Name of a curve -> where a training record has it.
CURVES: dict[str, Callable[[Json], float | None]] = {
    "loss": lambda r: number_of(r, "loss"),
    "learning_rate": lambda r: number_of(r, "learning_rate"),
    "grad_norm": lambda r: number_of(r, "grad_norm"),
    "tokens_per_second": lambda r: number_of(r, "ips_total"),
    "mfu": lambda r: number_of(r, "mfu"),
    "memory": lambda r: number_of(r, "device_bytes") or number_of(r, "rss_bytes"),
    "busy_most": lambda r: number_of(inside(r, "ranks"), "busy_seconds_most"),
    "busy_median": lambda r: number_of(inside(r, "ranks"), "busy_seconds_median"),
    "busy_least": lambda r: number_of(inside(r, "ranks"), "busy_seconds_least"),
    "communication": lambda r: number_of(inside(r, "ranks"), "communication_share"),
    "bubble": lambda r: number_of(inside(r, "ranks"), "bubble_share"),
}
# How the names of curves begin that are not of this table, and the number of a task that is drawn.
LAYERS, TASKS = "layers/", "task/"
MAIN_NUMBERS = ("accuracy", "perplexity", "acc_norm", "acc")


def open_runs(paths: Iterable[Path]) -> list[RunReader]:
    """A reader for each directory, none of them twice."""
    found: dict[Path, RunReader] = {}
    for path in paths:
        directory = path.parent if path.name == FILE_NAME else path
        if not directory.is_dir():
            raise UserError(
                f"{path}: no such directory; give a run's own (Engine.save_load.output_dir)"
            )
        if not (directory / FILE_NAME).exists() and any(directory.glob(f"*/{FILE_NAME}")):
            inside = sorted(one.parent.name for one in directory.glob(f"*/{FILE_NAME}"))
            raise UserError(f"{path} is no run, but has runs inside: {', '.join(inside[:8])}")
        found.setdefault(directory.resolve(), RunReader(directory))
    names = [one.resolve().name for one in found]
    for directory, reader in found.items():
        alone = names.count(directory.name) == 1
        reader.name = directory.name if alone else f"{directory.parent.name}/{directory.name}"
    return list(found.values())


@dataclass
class RunReader:
    """The records of a run so far."""

    directory: Path
    name: str = ""
    entries: list[Entry] = field(default_factory=list)
    curves: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    last: Json = field(default_factory=dict)  # the newest training record
    tasks: dict[str, Json] = field(default_factory=dict)  # their newest numbers
    damaged: int = 0
    version: int = 0  # grows with what was read
    _place: tuple[int, int] = (0, 0)  # inode and offset of what is still to be read
    _ending: bytes = b""  # the bytes before the offset: another file has others

    def read(self) -> bool:
        try:
            with (self.directory / FILE_NAME).open("rb") as file:
                inode, offset = self._place
                status = os.fstat(file.fileno())
                is_same = status.st_ino == inode and status.st_size >= offset
                if is_same and offset:
                    file.seek(offset - len(self._ending))
                    is_same = file.read(len(self._ending)) == self._ending
                if not is_same:
                    self._forget()
                    offset = 0
                file.seek(offset)
                content = file.read()
        except FileNotFoundError:
            return False  # a run that has just begun
        except OSError as error:
            raise UserError(
                f"{self.directory / FILE_NAME}: cannot be read ({error.strerror})"
            ) from error
        whole = content[: content.rfind(b"\n") + 1]
        self._place = (status.st_ino, offset + len(whole))
        self._ending = (self._ending + whole)[-64:]
        for line in whole.splitlines():
            self._take(parse_line(line) if line.strip() else {})
        if whole or not is_same:
            self.version += 1
        return bool(whole)

    def _forget(self) -> None:
        self.entries, self.curves, self.last, self.tasks = [], {}, {}, {}
        self.damaged, self._ending = 0, b""

    def _take(self, record: Json | None) -> None:
        if not record:
            self.damaged += record is None
            return
        kind, step, when = record.get("kind"), record.get("step"), time_of(record)
        if not isinstance(step, int) or not isinstance(kind, str) or when is None:
            self.damaged += 1
        elif kind == "train":
            self._take_steps(record, step, when)
        else:
            if kind == "task":
                self._take_task(record, step)
            if kind in ("eval", "test"):
                self._add(kind, step, number_of(record, "loss"))
                self._add(f"{kind}_ema", step, number_of(record, "ema_loss"))
            self.entries.append(Moment(kind, step, when, record))

    def _take_steps(self, record: Json, step: int, when: float) -> None:
        phases = inside(record, "seconds")
        self.entries.append(
            Window(
                step,
                when,
                batch=_seconds(record, "batch_seconds"),
                reader=_seconds(record, "reader_seconds"),
                evaluate=_seconds(phases, "evaluate"),
                save=_seconds(phases, "save"),
            )
        )
        for name, value in CURVES.items():
            self._add(name, step, value(record))
        norms = inside(record, "layer_norms")
        for group in list(norms)[:MOST_GROUPS]:
            self._add(LAYERS + shorten(group, 40), step, number_of(norms, group))
        self.last = record

    def _take_task(self, record: Json, step: int) -> None:
        name, numbers = shorten(record.get("task", ""), 60), inside(record, "numbers")
        self.tasks[name] = {
            shorten(key, 40): finite(number_of(numbers, key)) for key in list(numbers)[:16]
        }
        key = next((one for one in MAIN_NUMBERS if one in numbers), next(iter(numbers), None))
        if key is not None and len(self.tasks) <= MOST_TASKS:
            self._add(f"{TASKS}{name}, {shorten(key, 40)}", step, number_of(numbers, key))

    def _add(self, name: str, step: int, value: float | None) -> None:
        if value is not None:
            steps, values = self.curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)

    @property
    def moments(self) -> list[Moment]:
        return [entry for entry in self.entries if isinstance(entry, Moment)]


# -- the document -------------------------------------------------------------------------------


def document_of(
    readers: Sequence[RunReader], price: float | None = None, known: Sequence[int] = ()
) -> Json:
    """All runs; one whose version is `known` by its place is left out (null)."""
    most = max(FEWEST_POINTS, MOST_POINTS // max(len(readers), 1))
    runs = [
        None if place < len(known) and known[place] == reader.version else _run(reader, most, price)
        for place, reader in enumerate(readers)
    ]
    # A run that ended without a word differs from one at work by its process alone.
    states = [state_of(reader) for reader in readers]
    made = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"made": made, "runs": runs, "states": states}


def _run(reader: RunReader, most: int, price: float | None) -> Json:
    moments, last = reader.moments, reader.last
    spent = spend(reader.entries, _dropped_times(reader))
    facts = next((m.fields for m in reversed(moments) if m.kind == RUN), {})
    losses = reader.curves.get("loss", ([], []))
    bad = [step for step, loss in zip(*losses) if not math.isfinite(loss)]
    return {
        "name": shorten(reader.name, 80),
        "version": reader.version,
        "layout": shorten(facts.get("layout", ""), 80),
        "processes": whole(facts, "world_size"),
        "step": whole(last, "step"),
        "max_steps": max_steps_of(reader.directory),
        "tokens": whole(last, "tokens"),
        "began": reader.entries[0].time if reader.entries else None,
        "curves": {
            name: _thinned(*pair, max(32, most // 8) if name.startswith(LAYERS) else most)
            for name, pair in reader.curves.items()
        },
        "tasks": reader.tasks,
        "samples": samples_of(reader.directory, SAMPLE_BYTES * most // MOST_POINTS),
        "not_finite": bad[:200],
        "skipped": whole(last, "skipped"),
        "spikes": _spikes(reader.directory, moments),
        "prediction": _prediction(moments),
        "warnings": _warnings(moments, reader.damaged),
        "seconds": {part: round(value, 3) for part, value in spent.seconds.items()},
        "wall": round(spent.wall, 3),
        "starts": spent.starts,
        "goodput": finite(spent.goodput),
        "cost": None
        if price is None
        else {
            "price": price,
            "parts": {p: s / 3600 * price for p, s in spent.device_seconds.items()},
            "total": sum(spent.device_seconds.values()) / 3600 * price,
        },
    }


def state_of(reader: RunReader) -> Json:
    """Whether the run is at work, and if not, why it ended."""
    if not reader.entries:
        return {"state": "waiting", "why": "nothing is recorded yet", "since": None}
    last = reader.entries[-1]
    age = time.time() - last.time
    told = {"since": last.time, "age": round(max(age, 0.0), 1)}
    start = max((p for p, e in enumerate(reader.entries) if _kind(e) == RUN), default=0)
    said = [e for e in reader.entries[start:] if isinstance(e, Moment)]
    if is_held(reader.directory, age):
        return {"state": "running", "why": "", **told}
    for moment in reversed(said):
        if moment.is_end:
            finished = not moment.text.startswith("stopped by ")
            why = "all steps are done" if finished else shorten(moment.text)
            return {"state": "finished" if finished else "stopped", "why": why, **told}
    return {"state": "crashed", "why": _cause(reader, said), **told}


def _cause(reader: RunReader, said: Sequence[Moment]) -> str:
    """Of a run that did not say that it ends: what is known of it."""
    when = datetime.fromtimestamp(reader.entries[-1].time).strftime("%Y-%m-%d %H:%M:%S")
    why = (
        f"no end is recorded: it failed or was killed after step {reader.entries[-1].step}, {when}"
    )
    errors = [m.text for m in said if m.kind == "notice" and m.fields.get("level") == "ERROR"]
    lines = errors[-1:] or _error_lines(reader.directory / "logs", reader.entries[-1].time)
    return shorten(". ".join([why, *lines]), 2 * MOST_CHARACTERS)


def _error_lines(logs: Path, since: float) -> list[str]:
    """The last line of a traceback in the ranks' logs of that start."""
    form = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt)\b|fourfold: ).*")
    for file in sorted(logs.rglob("*.log"))[:1024] if logs.is_dir() else []:
        try:
            if file.stat().st_mtime < since - 1:
                continue
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - 65536))
                lines = stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        found = [line for line in lines if form.match(line)]
        if found:
            return [f"{file.name}: {found[-1]}"]
    return []


# -- parts of it --------------------------------------------------------------------------------


def _thinned(steps: list[int], values: list[float], most: int) -> Json:
    pairs = [(s, v) for s, v in zip(steps, values) if math.isfinite(v) and abs(s) < 2**53]
    pairs.sort(key=lambda pair: pair[0])
    x = np.array([pair[0] for pair in pairs], dtype=np.float64)
    y = np.array([pair[1] for pair in pairs], dtype=np.float64)
    last = pairs[-1][1] if pairs else None
    x, y = thin_out(x, y, most)
    return {
        "x": [int(step) for step in x],
        "y": [float(f"{value:.5g}") for value in y],
        "last": last,
    }


def _spikes(directory: Path, moments: Sequence[Moment]) -> list[Json]:
    """Of events, with the documents of their reports. A rewind drops the event of its spike, and
    tells what it was; so a step can have been a spike more than once."""
    found: list[Json] = []
    for moment in moments:
        if moment.event not in ("spike", "rewind"):
            continue
        step = whole(moment.fields, "spike_step") or moment.step
        spike = {
            "step": step,
            "loss": finite(number_of(moment.fields, "loss")),
            "loss_limit": finite(number_of(moment.fields, "loss_limit")),
            "grad_norm": finite(number_of(moment.fields, "grad_norm")),
            "norm_limit": finite(number_of(moment.fields, "norm_limit")),
            "action": shorten(moment.fields.get("action", moment.event), 20),
            **documents_of(directory, moment.fields.get("report")),
        }
        found.append(spike)
    return found[-MOST_SPIKES:]


def _prediction(moments: Sequence[Moment]) -> Json | None:
    for moment in reversed(moments):
        if moment.event == "prediction":
            names = (
                "predicted_step_seconds",
                "measured_step_seconds",
                "predicted_bytes",
                "measured_bytes",
            )
            return {name: finite(number_of(moment.fields, name)) for name in names}
    return None


def _warnings(moments: Sequence[Moment], damaged: int) -> list[Json]:
    told = [
        {"step": m.step, "time": m.time, "level": str(m.fields["level"]), "text": shorten(m.text)}
        for m in moments
        if m.kind == "notice" and m.fields.get("level") in ("WARNING", "ERROR")
    ]
    if damaged:
        text = f"{damaged} damaged lines of {FILE_NAME} are left out"
        told.append({"step": 0, "time": None, "level": "WARNING", "text": text})
    return told[-MOST_WARNINGS:]


def _dropped_times(reader: RunReader) -> list[float]:
    """Of records that only the file before the last restart has, for runs that noted nothing."""
    try:
        content = (reader.directory / f"{FILE_NAME}.bak").read_bytes()
    except OSError:
        return []
    kept = {entry.time for entry in reader.entries}
    records = (parse_line(line) for line in content.splitlines())
    times = (time_of(record) for record in records if record)
    return [one for one in times if one is not None and one not in kept]


# -- foreign values -----------------------------------------------------------------------------


def time_of(record: Mapping[str, Any]) -> float | None:
    """Of a record, in seconds since the epoch."""
    try:
        return datetime.fromisoformat(str(record.get("time"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _seconds(record: Mapping[str, Any], name: str) -> float:
    value = number_of(record, name)
    return value if value is not None and 0.0 <= value < 1e9 else 0.0


def _kind(entry: Entry) -> str:
    return entry.kind if isinstance(entry, Moment) else "train"
