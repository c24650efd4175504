"""`fourfold`, with a record of every sample that its ranks train on.

    python recorded.py DIRECTORY train -c ...

Each rank appends to a file of its own in DIRECTORY: the round, the step and the samples it took.
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

directory = Path(sys.argv[1])
serve = Loader.batch


def batch(loader: Loader, step: int) -> Batch:
    taken = serve(loader, step)
    line = {
        "round": os.environ.get("FOURFOLD_MEETING", ""),
        "step": step + 1,
        "samples": taken.sample_ids.tolist(),
        "time": time.time(),
    }
    name = f"{socket.gethostname()}.{os.environ.get('FOURFOLD_ATTEMPT', '')}.{os.getpid()}"
    with (directory / name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return taken


Loader.batch = batch  # type: ignore[method-assign]
main(sys.argv[2:])
