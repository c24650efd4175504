"""Fake CUDA: one rank of any layout takes its real training steps, every tensor fake on cuda:0.

Tensors have a device, a shape and a type but no numbers (`FakeTensorMode`), and the process group
is torch's fake one. What a GPU would refuse, tensors of two devices in one operation, is refused;
what would make the host wait for the GPU is answered with some number and counted, with the line
that asked. Host tensors are real, as are files and logs.

It needs a library loaded before torch, so it is a process of its own that takes requests
(`Request`) and gives back what it saw (`Seen`), one JSON line each: see `FakeCuda`, its other end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent


@dataclass
class Request:
    yaml: str
    overrides: list[str]
    world: int = 1
    rank: int = 0
    generates: bool = False  # a few tokens instead of training steps
    plant: str | None = None  # a fault of `PLANTS`


@dataclass
class Wait:
    """The host waited for the device."""

    step: int
    what: str
    line: str  # of the package, that asked
    behind: int  # operations queued meanwhile; with none the device stands idle


@dataclass
class Seen:
    waits: list[Wait] = field(default_factory=list)
    operations: int = 0  # of the last step, on the device
    off_device: list[str] = field(default_factory=list)  # parameters that are not where they belong
    logged: list[int] = field(default_factory=list)  # steps
    error: str | None = None  # the last line of a traceback
    where: str = ""  # all of it


class FakeCuda:
    """The process, from outside."""

    def __init__(self, library: Path, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "helpers.fake_cuda", str(library)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HELPERS.parent), *sys.path])},
            )

    def run(self, request: Request) -> Seen:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(asdict(request)), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the process ended:\n{self.log.read_text()[-4000:]}"
        found = json.loads(answer)
        return Seen(**found | {"waits": [Wait(**wait) for wait in found["waits"]]})

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


# -- inside the process ---------------------------------------------------------------------------


def serve(library: str) -> None:
    import ctypes

    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is not an answer
    import torch

    from helpers import cuda_stand_in

    with cuda_stand_in.no_inference_mode():
        from helpers.fake_modes import answer
    torch.set_num_threads(1)
    cuda_stand_in.pretend()
    for line in sys.stdin:
        request = Request(**json.loads(line))
        seen = Seen()
        try:
            with planted(request.plant):
                answer(request, seen)
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
            seen.where = traceback.format_exc()
        print(json.dumps(asdict(seen)), file=answers, flush=True)


# -- planted faults -------------------------------------------------------------------------------


def _labels_on_the_host(arguments: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(runner: Any, batch: Any) -> Any:
        tokens, named = arguments(runner, batch)
        return tokens, named | {"labels": batch.labels}

    return faulty


def _reads_every_loss(run: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(runner: Any, *given: Any) -> Any:
        total = run(runner, *given)
        total.item()
        return total

    return faulty


def _host_vector_in_the_loss(run: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def faulty(runner: Any, *given: Any) -> Any:
        return run(runner, *given) + torch.zeros(3)

    return faulty


RUNNER = "fourfold.parallel.runner:Runner"
# By name: the class, its method, and what takes the method's place.
PLANTS = {
    "labels on the host": (RUNNER, "_arguments", _labels_on_the_host),
    "a vector of the host added": (RUNNER, "_run_micro_batches", _host_vector_in_the_loss),
    "an item()": (RUNNER, "_run_micro_batches", _reads_every_loss),
}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    place, method, fault = PLANTS[name]
    module, class_name = place.split(":")
    owner = getattr(importlib.import_module(module), class_name)
    right = getattr(owner, method)
    setattr(owner, method, fault(right))
    try:
        yield
    finally:
        setattr(owner, method, right)


if __name__ == "__main__":
    serve(sys.argv[1])
