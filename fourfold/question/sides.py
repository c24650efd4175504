"""The two sides of a bisection: what each is, and how it is started.

Each side runs in processes of its own, as training starts them; of another environment by its
Python, which is asked for `fourfold bisect --record`. The reference and its rounded twin are one
process each, here, after both sides: at no time are there two.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fourfold.config import Config, load_config
from fourfold.errors import RunError, UserError
from fourfold.parallel import layout_of
from fourfold.question.bisect import SIDES, Verdict
from fourfold.question.history import on_ranks, scratch_directory
from fourfold.question.noise import (
    OF_REFERENCE,
    RoundedStep,
    record_reference,
    record_rounded,
    record_update,
)
from fourfold.question.screening import judge
from fourfold.question.step_trace import StepTrace, record_step

# A question, not a run: nothing is followed, logged or served.
QUIET = (
    "Engine.save_load.auto_resume=False",
    "Engine.tensorboard=False",
    "Engine.wandb=False",
    "Engine.metrics_port=null",
    "Profiler.enable=False",
)
OpenForeignOf = Callable[[Config, Path], Any]


@dataclass(frozen=True)
class Side:
    """A file with overrides, and where it is computed."""

    file: Path
    overrides: Sequence[str] = ()
    python: Path | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Bisection:
    """One step on two sides, from the same beginning."""

    sides: Sequence[Side]
    step: int | None = None
    start: Path | None = None
    open_foreign: OpenForeignOf | None = None

    def run(self, keep: Path | None = None) -> Verdict:
        """Compute both sides and the reference, and compare them."""
        with _folder(keep) as folder:
            for side in self.sides:
                self.check(side)
            traces = {}
            for name, side in zip(SIDES, self.sides, strict=True):
                self.record(side, folder / name)
                traces[name] = StepTrace(folder / name)
            steps = {trace.facts["step"] for trace in traces.values()}
            if len(steps) > 1:
                raise UserError(
                    f"the sides begin differently: A computed step {traces['A'].facts['step']}, B "
                    f"step {traces['B'].facts['step']}; name one checkpoint with --from"
                )
            return judge(traces, OneProcess(self, folder, traces["A"]))

    def check(self, side: Side) -> None:
        """Refuse what has no reference: masks that another layout or precision draws otherwise."""
        config = load_config(side.file, list(side.overrides))
        model, first = config.Model, load_config(self.sides[0].file, list(self.sides[0].overrides))
        if model.attention_probs_dropout_prob > 0:
            raise UserError(
                f"Model.attention_probs_dropout_prob={model.attention_probs_dropout_prob:g}: the "
                "kernel of each precision draws masks of its own, so no two could be compared; add "
                "-o Model.attention_probs_dropout_prob=0"
            )
        sizes = [one.Data.batch_size.micro_batch_size for one in (first, config)]
        if model.hidden_dropout_prob > 0 and (model.sequence_parallel or sizes[0] != sizes[1]):
            raise UserError(
                f"Model.hidden_dropout_prob={model.hidden_dropout_prob:g}: masks are drawn for "
                "each micro-batch, and under sequence parallelism for each rank's positions; the "
                "two sides drop differently, so add -o Model.hidden_dropout_prob=0"
            )

    def record(self, side: Side, directory: Path) -> dict[str, Any]:
        """Compute and write down a side; its facts."""
        if side.python is not None:
            return self._record_elsewhere(side, directory)
        with scratch_directory() as scratch:
            config = load_config(side.file, self.overrides(side, scratch))
            world = layout_of(config).world_size
            opened = None if self.open_foreign is None else partial(self.open_foreign, config)
            work = partial(record_step, config, world, directory, self.step, open_foreign=opened)
            directory.mkdir(parents=True, exist_ok=True)
            code, facts = on_ranks(world, scratch, work, config, side.threads, apart=True)
        if code or not isinstance(facts, dict):
            raise RunError(f"{side.file}: the step could not be computed (exit code {code})")
        return facts

    def overrides(self, side: Side, scratch: Path) -> list[str]:
        start = [] if self.start is None else [f"Engine.save_load.ckpt_dir={self.start.resolve()}"]
        return [*side.overrides, *QUIET, f"Engine.save_load.output_dir={scratch}", *start]

    def _record_elsewhere(self, side: Side, directory: Path) -> dict[str, Any]:
        words = [str(side.python), "-m", "fourfold", "bisect", "-c", str(side.file)]
        words += [word for one in side.overrides for word in ("-o", one)]
        words += ["--record", str(directory)]
        if self.step is not None:
            words += ["--step", str(self.step)]
        if self.start is not None:
            words += ["--from", str(self.start)]
        if side.threads is not None:
            words += ["--a-threads", str(side.threads)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UserError(f"{side.python} cannot be started: {error.strerror}") from error
        if done.returncode:
            raise UserError(f"{' '.join(words)} failed: {done.stderr.strip()[-2000:]}")
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts


@dataclass(frozen=True)
class OneProcess:
    """The references: one process with the settings of A that change the numbers."""

    bisection: Bisection
    folder: Path
    side: StepTrace

    def exact(self, row: int | None) -> StepTrace:
        def record(config: Config, directory: Path, opened: Any) -> object:
            return record_reference(config, directory, self.bisection.step, opened, row)

        return StepTrace(self._record(_named("reference", row), record, row))

    def rounded(self, exact: StepTrace, roundoff: float, row: int | None) -> RoundedStep:
        def record(config: Config, directory: Path, opened: Any) -> object:
            return record_rounded(config, directory, exact, roundoff, opened, row)

        name = _named(f"rounded_to_{roundoff:g}", row)
        return RoundedStep.read(self._record(name, record, row))

    def update(self) -> StepTrace:
        def record(config: Config, directory: Path, opened: Any) -> object:
            return record_update(config, directory, self.side, opened)

        return StepTrace(self._record("update", record))

    def _record(
        self, name: str, record: Callable[[Config, Path, Any], object], row: int | None = None
    ) -> Path:
        bisection, directory = self.bisection, self.folder / name
        side = bisection.sides[0]
        own = load_config(side.file, list(side.overrides))
        sizes = own.Data.batch_size
        # A sample is a row, except where masks are drawn for a micro-batch.
        alone = row is not None and own.Model.hidden_dropout_prob == 0
        micro_batch_size = 1 if alone else sizes.micro_batch_size
        with scratch_directory() as scratch:
            given = [
                *bisection.overrides(side, scratch),
                *OF_REFERENCE,
                f"Data.batch_size.global_batch_size={sizes.global_batch_size}",
                f"Data.batch_size.micro_batch_size={micro_batch_size}",
            ]
            config = load_config(side.file, given, 1)
            foreign = bisection.open_foreign
            directory.mkdir(parents=True, exist_ok=True)
            record(config, directory, None if foreign is None else partial(foreign, config))
        return directory


def _named(name: str, row: int | None) -> str:
    return name if row is None else f"{name}_row_{row}"


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with scratch_directory() as scratch:
            yield scratch
        return
    if keep.exists() and any(keep.iterdir()):
        raise UserError(f"--keep {keep} has files already; name a directory that is new or empty")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep
