"""What the page shows of a run's files beside `metrics.jsonl`.

    samples_of(directory, most_bytes)    prompts, and what followed each at which step
    documents_of(directory, report)      the documents of a spike
    max_steps_of(directory)              of the newest checkpoint
    is_held(directory, age)              whether a process is at work there

All of it is foreign data, read with bounds; what is no value of the kind expected is left out.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.metrics.jsonl import parse_line
from fourfold.metrics.sinks import SAMPLES_NAME
from fourfold.watch.goodput import number_of

Json = dict[str, Any]

MOST_DOCUMENTS = 8  # of a spike
MOST_REPORT_BYTES = 16 << 20
SILENT_SECONDS = 600.0  # after which a run on another machine is taken for dead
SAMPLE_BYTES = 40_000  # of a page, for the samples of all runs
MOST_PROMPTS, MOST_STEPS = 16, 60
MOST_FILE_BYTES = 4 << 20  # read from its end
LONGEST = 400  # characters of a text


def samples_of(directory: Path, most_bytes: int) -> Json:
    """`prompts`, and for each step that is kept its texts in their order.

    The file may be long, and a page is small: prompts are there once, texts are cut, and of many
    steps those are kept that lie evenly between the first and the last.
    """
    by_step = _texts(directory / SAMPLES_NAME)
    prompts = list(dict.fromkeys(prompt for row in by_step.values() for prompt in row))
    prompts = prompts[:MOST_PROMPTS]
    steps = sorted(by_step)
    for number in (MOST_STEPS, 30, 15, 8, 4, 2, 1):
        rows = [
            {"step": step, "texts": [by_step[step].get(prompt) for prompt in prompts]}
            for step in evenly(steps, number)
        ]
        found = {"prompts": prompts, "steps": rows}
        if len(json.dumps(found)) <= most_bytes:
            return found
    return {"prompts": [], "steps": []}


def evenly(steps: list[int], most: int) -> list[int]:
    """At most that many of them, the first and the last among them; one is the last."""
    if len(steps) <= most:
        return steps
    if most == 1:
        return steps[-1:]
    places = {round(i * (len(steps) - 1) / (most - 1)) for i in range(most)}
    return [steps[place] for place in sorted(places)]


def _texts(file: Path) -> dict[int, dict[str, str]]:
    """By step and prompt; whatever else the file holds is left out."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - MOST_FILE_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return {}
    found: dict[int, dict[str, str]] = {}
    for line in lines[size > MOST_FILE_BYTES :]:
        record = parse_line(line)
        if not record:
            continue
        step, prompt, text = record.get("step"), record.get("prompt"), record.get("text")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            continue
        if isinstance(prompt, str) and isinstance(text, str):
            found.setdefault(step, {})[shorten(prompt, LONGEST)] = shorten(text, LONGEST)
    return found


# -- spikes, checkpoints, the lock ---------------------------------------------------------------


def documents_of(directory: Path, report: object) -> Json:
    """What a spike's report says, if it is where reports are."""
    if not isinstance(report, str) or not re.fullmatch(r"spikes/[\w.-]{1,80}\.json", report):
        return {"documents": [], "gradient_norms": {}}
    told = read_json(directory / report)
    rows, norms = told.get("documents"), told.get("gradient_norms")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    norms = norms if isinstance(norms, dict) else {}
    kept = {shorten(name, 60): number_of(norms, name) for name in list(norms)[:128]}
    return {
        "documents": [_document(row) for row in rows[:MOST_DOCUMENTS]],
        "gradient_norms": {name: value for name, value in kept.items() if finite(value)},
    }


def _document(row: Json) -> Json:
    worst = row.get("worst")
    words = [one for one in worst if isinstance(one, dict)] if isinstance(worst, list) else []
    return {
        "file": shorten(Path(str(row.get("file", ""))).name, 80),
        "document": whole(row, "document"),
        "sample": whole(row, "sample"),
        "share": finite(number_of(row, "share")),
        "excess": finite(number_of(row, "excess")),
        "mean": finite(number_of(row, "mean")),
        "texts": [shorten(one.get("text", "")) for one in words[:3]],
    }


def max_steps_of(directory: Path) -> int | None:
    """As the newest checkpoint has it."""
    try:
        newest = (directory / "latest").read_text(errors="replace")[:100].strip()
    except OSError:
        return None
    if not re.fullmatch(r"step_\d{1,18}", newest):
        return None
    config = inside(read_json(directory / newest / "state.json"), "config")
    return whole(inside(config, "Engine"), "max_steps")


def is_held(directory: Path, age: float) -> bool:
    """Whether a process holds the directory. Its lock is read, not taken."""
    owner = read_json(directory / ".lock")
    process = owner.get("pid")
    if not isinstance(process, int) or process <= 0:
        return False
    if owner.get("host") != socket.gethostname():
        return age < SILENT_SECONDS
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


# -- foreign values -------------------------------------------------------------------------------

MOST_CHARACTERS = 400


def shorten(value: object, most: int = MOST_CHARACTERS) -> str:
    """As text of bounded length, without halves of characters that JSON can hold."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= most else text[: most - 1] + "…"


def inside(record: Mapping[str, Any], name: str) -> Json:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def whole(record: Mapping[str, Any], name: str) -> int | None:
    value = record.get(name)
    is_whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    return value if is_whole else None


def read_json(path: Path) -> Json:
    """A small JSON object of a run's; empty if there is none that can be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_REPORT_BYTES + 1)
        value = json.loads(content) if len(content) <= MOST_REPORT_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
