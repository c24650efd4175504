"""What differs between two runs, and the first step at which their numbers part.

    settings  keys of the resolved configuration, without places (directories, logs)
    data      fingerprint, tokenizer, masks; of two directories the first byte that differs
    machine   layout, number of threads, torch, processor, version of Fourfold

Numbers are losses and gradient norms of steps that both logged. They part where they differ: in a
bit if both runs computed with the same layout, threads, torch and kind of processor, otherwise by
more than `TOLERANCE`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.charts import BLUE, ORANGE, new_figure, save_png, style_axes, write_heading
from fourfold.metrics.plot import log_locator
from fourfold.question.history import RunHistory
from fourfold.question.replay import COMPARED, TOLERANCE, agree
from fourfold.terminal import table_lines

# Places and appearances: a run computes the same with others.
PLACES = (
    *("Engine.save_load.", "Engine.tensorboard", "Engine.wandb", "Engine.metrics", "Profiler."),
    *("Engine.logging_freq", "Engine.eval_", "Engine.test_iters", "Engine.check_replicas_freq"),
    *("Data.dataset.cache_dir", "Distributed.timeout_seconds", "Inference."),
    *("Generation.", "Eval.", "Global.peak_tflops", "Data.dataset.prefetch", "Engine.log_style"),
)
# Where a run begins is no place.
NO_PLACE = ("Engine.save_load.ckpt_dir",)
OF_MACHINE = ("layout", "world_size", "threads", "torch", "processor")
OF_DATA = ("data_fingerprint", "tokenizer", "masks", "split_rounding", "left_out")
PIECE = 1 << 20
BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 60


@dataclass(frozen=True)
class ByteDifference:
    """A file of the data that is not the same."""

    file: str
    first: int | None  # byte that differs; None where one side has no such file
    bytes: int  # that differ, or by which one file is longer


@dataclass
class RunDiff:
    runs: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    places: dict[str, tuple[Any, Any]]  # settings that no number depends on
    data: dict[str, tuple[Any, Any]]
    files: list[ByteDifference]
    machine: dict[str, tuple[Any, Any]]
    common_steps: int
    parts_at: int | None = None
    numbers: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # at that step
    tolerance: float = 0.0
    explained: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(one: RunHistory, other: RunHistory) -> RunDiff:
    """Read what both left behind; nothing is computed."""
    values = tuple(flat(_last_values(history)) for history in (one, other))
    different = differing(*values)
    states = [history.state(max(history.checkpoints)) for history in (one, other)]
    told = [_machine(history, state) for history, state in zip((one, other), states)]
    data = differing(*({key: state.get(key) for key in OF_DATA} for state in states))
    machine = differing(*told)
    exact = not machine.keys() & set(OF_MACHINE)
    found = RunDiff(
        (str(one.directory), str(other.directory)),
        {key: pair for key, pair in different.items() if not is_place(key)},
        {key: pair for key, pair in different.items() if is_place(key)},
        data,
        list(_files(*values)) if "data_fingerprint" in data else [],
        machine,
        len(steps_of(one).keys() & steps_of(other).keys()),
        tolerance=0.0 if exact else TOLERANCE,
    )
    found.parts_at = parting(one, other, found.tolerance)
    if found.parts_at is not None:
        records = [steps_of(history)[found.parts_at] for history in (one, other)]
        found.numbers = {key: (records[0].get(key), records[1].get(key)) for key in COMPARED}
    return found


def parting(one: RunHistory, other: RunHistory, tolerance: float) -> int | None:
    """The first step that both logged with different numbers."""
    ours, theirs = steps_of(one), steps_of(other)
    for step in sorted(ours.keys() & theirs.keys()):
        a, b = ours[step], theirs[step]
        if not all(agree(a.get(key), b.get(key), tolerance) for key in COMPARED):
            return step
    return None


def steps_of(history: RunHistory) -> dict[int, dict[str, Any]]:
    """The training records by step; of one computed twice, the last."""
    return {record["step"]: record for record in history.records if record["kind"] == "train"}


def is_place(key: str) -> bool:
    return key.startswith(PLACES) and key not in NO_PLACE


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with their sections, as `-o` names them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        key: (one.get(key), other.get(key))
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    }


def _last_values(history: RunHistory) -> Mapping[str, Any]:
    return history.segment(max(max(history.checkpoints), 1)).values


def _machine(history: RunHistory, state: Mapping[str, Any]) -> dict[str, Any]:
    facts = history.facts(max(history.checkpoints))
    told = {} if facts is None else {name: getattr(facts, name) for name in OF_MACHINE}
    return {**told, "fourfold": state.get("version")}


# -- bytes of data --------------------------------------------------------------------------------


def _files(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[ByteDifference]:
    """Which files of two data directories differ, and where first."""
    places = [values.get("Data.dataset.input_dir") for values in (one, other)]
    if not all(isinstance(place, str) for place in places):
        return
    folders = [Path(str(place)) for place in places]
    if folders[0] == folders[1] or not all(folder.is_dir() for folder in folders):
        return
    for name in sorted({file.name for folder in folders for file in folder.iterdir()}):
        pair = [folder / name for folder in folders]
        if not all(file.is_file() for file in pair):
            if any(file.is_file() for file in pair):
                yield ByteDifference(name, None, 0)
            continue
        found = _bytes_apart(*pair)
        if found is not None:
            yield ByteDifference(name, *found)


def _bytes_apart(one: Path, other: Path) -> tuple[int, int] | None:
    first, count, at = None, 0, 0
    with one.open("rb") as ours, other.open("rb") as theirs:
        while (a := ours.read(PIECE)) + (b := theirs.read(PIECE)):
            common = min(len(a), len(b))
            if a != b:
                left = np.frombuffer(a, np.uint8, common)
                wrong = np.flatnonzero(left != np.frombuffer(b, np.uint8, common))
                place = int(wrong[0]) if len(wrong) else common
                first = at + place if first is None else first
                count += len(wrong) + abs(len(a) - len(b))
            at += common
    return None if first is None else (first, count)


# -- to look at -----------------------------------------------------------------------------------


def plot_both(one: RunHistory, other: RunHistory, found: RunDiff, path: Path) -> None:
    """Losses and gradient norms of both, and where they part."""
    figure = new_figure(9, 6, heading_share=0.055)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, key in zip(panels, COMPARED):
        style_axes(axes)
        for history, colour, dashes in ((one, BLUE, "-"), (other, ORANGE, "--")):
            records = steps_of(history)
            steps = [step for step in sorted(records) if records[step].get(key) is not None]
            values = [float(records[step][key]) for step in steps]
            label = history.directory.name
            axes.plot(steps, values, dashes, color=colour, linewidth=1.4, label=label)
        if found.parts_at is not None:
            axes.axvline(found.parts_at, color="#999999", linewidth=0.8)
        axes.set_ylabel(key.replace("_", " "))
    panels[1].set_xlabel("step")
    panels[0].legend(frameon=False)
    low, high = panels[0].get_ylim()
    if low > 0:
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_locator(log_locator(low, high))
    at = "equal" if found.parts_at is None else f"apart from step {found.parts_at}"
    write_heading(figure, f"{one.directory.name} and {other.directory.name}", at)
    save_png(figure, path)


def curves(one: RunHistory, other: RunHistory) -> Iterator[str]:
    """Both losses as a line of blocks each, on one scale."""
    series = [
        [float(record["loss"]) for _, record in sorted(steps_of(history).items())]
        for history in (one, other)
    ]
    finite = [value for values in series for value in values if np.isfinite(value)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    for history, values in zip((one, other), series):
        every = max(1, -(-len(values) // COLUMNS))
        drawn = ""
        for value in values[::every]:
            share = (value - low) / (high - low) if high > low else 0.0
            drawn += BLOCKS[round(share * (len(BLOCKS) - 1))] if np.isfinite(value) else "?"
        yield f"  {drawn}  {history.directory.name}"
    yield f"  loss from {low:.4g} to {high:.4g}"


def diff_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """For a terminal."""
    one, other = told["runs"]
    yield f"{one} and {other}: {told['common_steps']:,} steps in both logs"
    for title in ("settings", "data", "machine", "places"):
        if told[title]:
            yield f"{title}:"
            rows = [(key, _short(a), _short(b)) for key, (a, b) in told[title].items()]
            yield from (f"  {line}" for line in table_lines(rows))
    for file in told["files"]:
        where = "only on one side" if file["first"] is None else f"from byte {file['first']:,}"
        yield f"  {file['file']}: {where}, {file['bytes']:,} bytes differ"
    if told["parts_at"] is None:
        within = "to the bit" if told["tolerance"] == 0 else f"to {told['tolerance']:g}"
        yield f"the numbers of all common steps agree {within}"
    else:
        yield f"the numbers part at step {told['parts_at']}:"
        rows = [(key, repr(a), repr(b)) for key, (a, b) in told["numbers"].items()]
        yield from (f"  {line}" for line in table_lines(rows))
    if told["explained"] is not None:
        yield from explained_lines(told["explained"])


def explained_lines(told: Mapping[str, Any]) -> Iterator[str]:
    tried = f"{told['replays']} replays of the steps {told['from_step'] + 1} to {told['to_step']}"
    if told["reason"]:
        yield f"the reason ({tried}):"
        yield from (f"  {name}" for name in told["reason"])
    else:
        yield f"no reason found ({tried}): {told['why_not']}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= COLUMNS else f"{text[: COLUMNS - 3]}..."
