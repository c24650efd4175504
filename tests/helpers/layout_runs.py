"""Whole runs of the tiny model under a layout: on forked ranks, or as the command in a process.

What is proven here goes through `Engine.fit` and `fourfold train`, and is read from what they leave
behind: `metrics.jsonl`, checkpoints, the console.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

# Drawn with at the end of every run; imported once here instead of by every forked rank.
import matplotlib.figure  # noqa: F401
import torch

from fourfold import checkpoint
from fourfold.cli import main
from fourfold.config import Config
from fourfold.data import Batch
from fourfold.engine import Engine, build_engine
from fourfold.metrics import read_jsonl
from helpers.layout_table import Case
from helpers.ranks import on_ranks
from helpers.traces import Workshop

T = TypeVar("T")
Prepare = Callable[[Engine], object]

# Small and silent: what is not asked for is neither computed nor written.
SMALL = (
    "Data.batch_size.global_batch_size=8",
    "Data.batch_size.micro_batch_size=2",
    "Engine.eval_freq=0",
    "Engine.test_iters=0",
)
# A command that has not ended by then never will.
COMMAND_SECONDS = 300.0


class Runs:
    """A directory of runs, each in its own below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workshop = Workshop(folder)

    def on_ranks(
        self, layout: str, name: str, work: Callable[[Engine], T], *overrides: str
    ) -> list[T]:
        """What `work` returns on each rank, given an engine of the run `name`."""
        world = Case(layout).world
        return on_ranks(
            world, lambda rank: work(build_engine(self.config(layout, name, *overrides), world))
        )

    def config(self, layout: str, name: str, *overrides: str) -> Config:
        case = Case(layout)
        return self.workshop.config(case.world, name, [*SMALL, *case.overrides(), *overrides])

    def fit(self, layout: str, name: str, *overrides: str, prepare: Prepare | None = None) -> Path:
        """Train to the end or to a stop; the run's directory."""

        def train(engine: Engine) -> None:
            if prepare is not None:
                prepare(engine)
            engine.fit()

        self.on_ranks(layout, name, train, *overrides)
        return self.folder / name

    def command(
        self, layout: str, name: str, *overrides: str, options: tuple[str, ...] = ()
    ) -> list[str]:
        """The words of `fourfold train` for such a run."""
        case = Case(layout)
        settings = [*self.workshop.settings(name), *SMALL, *case.overrides(), *overrides]
        given = [word for setting in settings for word in ("-o", setting)]
        return [
            *("train", "-c", str(self.workshop.yaml), "--nproc", str(case.world)),
            *options,
            *given,
        ]


# -- what a run left behind -----------------------------------------------------------------------


def records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == kind]


def losses(run: Path) -> list[float]:
    """Of every training step; each must be there once."""
    told = records(run)
    assert [record["step"] for record in told] == list(range(1, len(told) + 1))
    return [record["loss"] for record in told]


def notices(run: Path) -> str:
    return "\n".join(record["text"] for record in records(run, "notice"))


def tensors(step_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, whoever wrote it."""
    names = checkpoint.tensor_names(step_dir)
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
    checkpoint.load(step_dir, found)
    return found


def different(one: Path, other: Path) -> list[str]:
    """Names of the tensors of two checkpoints that are not equal to the bit."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


# -- things to do to a run ------------------------------------------------------------------------


def in_step(engine: Engine, step: int, act: Callable[[], object]) -> None:
    """Call `act` on this rank before the forward pass of `step`."""
    run = engine.runner.run

    def spied(batch: Batch, current: int, scale: float = 1.0) -> torch.Tensor:
        if current == step:
            act()
        return run(batch, current, scale)

    engine.runner.run = spied  # type: ignore[method-assign]


# -- the command ----------------------------------------------------------------------------------


class Command:
    """`fourfold ...` in a process forked from this one, which has everything imported.

    As a context it leaves nothing behind: the ranks of a command that is killed end with it.
    """

    def __init__(
        self, words: list[str], console: Path, prepare: Callable[[], object] | None = None
    ) -> None:
        """`prepare` is called in the new process before anything else."""
        self.console = console
        self.code: int | None = None
        console.write_text("")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, console, prepare)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.ended() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, told by the log each writes to."""
        found = {}
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except FileNotFoundError:
            return {}
        for child in children:
            try:
                log = Path(f"/proc/{child}/fd/1").readlink()
            except OSError:
                continue
            if log.name.startswith("rank_"):
                found[int(log.stem.removeprefix("rank_"))] = int(child)
        return found

    def ended(self) -> int | None:
        """The exit code, if the command has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        """Until it ends; its exit code."""
        deadline = time.monotonic() + COMMAND_SECONDS
        while (code := self.ended()) is None:
            assert time.monotonic() < deadline, f"the command hangs\n{self.said()}"
            time.sleep(0.01)
        return code

    def said(self) -> str:
        return self.console.read_text()


def _become(words: list[str], console: Path, prepare: Callable[[], object] | None) -> NoReturn:
    code = 99
    # Kept, because streams that own their descriptors would close them when they are replaced.
    streams = sys.stdout, sys.stderr
    try:
        assert streams
        output = os.open(console, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        sys.argv = ["fourfold", *words]
        if prepare is not None:
            prepare()
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
