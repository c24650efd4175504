"""`fourfold`, with a record of every sample that its ranks train on.

    python recorded.py DIRECTORY train -c ...

Each rank appends to a file of its own in DIRECTORY: the round, the step and the samples it took,
and when it had done the step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command does, before torch

from fourfold.cli import main
from fourfold.data import Batch, Loader
from fourfold.metrics import Meter, Step, StepOutcome

directory = Path(sys.argv[1])
serve, count = Loader.batch, Meter.end_step


def note(**fields: object) -> None:
    line = {"round": os.environ.get("FOURFOLD_MEETING", ""), **fields, "time": time.time()}
    name = f"{socket.gethostname()}.{os.environ.get('FOURFOLD_ATTEMPT', '')}.{os.getpid()}"
    with (directory / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def batch(loader: Loader, step: int) -> Batch:
    taken = serve(loader, step)
    note(step=step + 1, samples=taken.sample_ids.tolist())
    return taken


def end_step(meter: Meter, outcome: StepOutcome) -> Step | None:
    note(done=outcome.step)
    return count(meter, outcome)


Meter.end_step = end_step  # type: ignore[method-assign]
Loader.batch = batch  # type: ignore[method-assign]
main(sys.argv[2:])
