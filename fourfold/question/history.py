"""The directory of a run, read only: which checkpoint stands before a step, and with which
configuration the step was computed.

A checkpoint holds the configuration of the process that saved it. A run may have been resumed with
another one, so the steps between two checkpoints were computed with that of the second; after the
last checkpoint, or before the first, there is only one to ask.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from fourfold import checkpoint
from fourfold.checkpoint.directory import history
from fourfold.config import Config
from fourfold.config.load import ConfigSource, apply_overrides
from fourfold.config.yaml_nodes import parse_document
from fourfold.data.provenance import StepSamples
from fourfold.engine.run_data import RunData, open_run_data
from fourfold.errors import CheckpointError, UserError
from fourfold.mesh import Layout
from fourfold.metrics.jsonl import FILE_NAME, RunFacts, read_facts, read_jsonl
from fourfold.parallel import layout_of

if TYPE_CHECKING:
    from fourfold.engine import Engine
    from fourfold.engine.resuming import OpenForeign

# What follows from the layout, and is derived anew where another one is asked for.
OF_LAYOUT = (
    "Engine.accumulate_steps",
    "Data.batch_size.local_batch_size",
    "Distributed.dp_degree",
    "Distributed.mp_degree",
    "Distributed.pp_degree",
    "Distributed.sharding.sharding_degree",
    "Model.sequence_parallel",
)


class RunHistory:
    """A run's directory. Nothing is written there."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise UserError(f"{directory} is no directory; name the output directory of a run")
        self.directory = directory
        try:
            found = history(directory)
        except OSError as error:
            raise UserError(f"{directory} cannot be read: {error.strerror}") from error
        if not found:
            raise CheckpointError(
                f"{directory} has no checkpoint, and nothing else says how the run was "
                "configured; name the output directory of a run that has saved"
            )
        # Steps beyond the last one saved are of a run that was abandoned for this one.
        newest = found[0].step
        self.checkpoints: dict[int, Path] = {
            one.step: one.directory
            for one in sorted(found, key=lambda one: one.step)
            if one.step <= newest and one.directory.suffix != ".old"
        }

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl; empty without one."""
        file = self.directory / FILE_NAME
        return read_jsonl(file) if file.exists() else []

    def recorded(self, step: int) -> dict[str, Any] | None:
        """The training record of a step, if it was logged."""
        for record in reversed(self.records):
            if record.get("kind") == "train" and record.get("step") == step:
                return record
        return None

    def facts(self, step: int) -> RunFacts | None:
        """What the process that computed a step knew of itself."""
        found = None
        for record in self.records:
            if record.get("kind") == "train" and record.get("step", 0) > step:
                break
            found = read_facts(record) or found
        return found

    def state(self, step: int) -> dict[str, Any]:
        return checkpoint.read_state(self.checkpoints[step])

    def segment(self, step: int) -> Segment:
        """The steps between two checkpoints among which `step` is."""
        if step < 1:
            raise UserError(f"--step {step}: the first step of a run is 1")
        before = [saved for saved in self.checkpoints if saved < step]
        after = [saved for saved in self.checkpoints if saved >= step]
        start = self._readable(before[::-1])
        if start is not None and self.state(start).get("weights_only"):
            start = None
        end = self._readable(after)
        named = end if end is not None else start
        if named is None:
            raise CheckpointError(f"no checkpoint of {self.directory} can be read")
        values = self.state(named).get("config")
        if not isinstance(values, dict):
            raise UserError(
                f"{self.checkpoints[named]} was not saved by training: it holds no configuration"
            )
        return Segment(self, start, end, values)

    def segments(self) -> list[Segment]:
        """All of them, from the beginning of the run to its last checkpoint."""
        return [self.segment(saved) for saved in self.checkpoints if saved > 0]

    def _readable(self, steps: Sequence[int]) -> int | None:
        for step in steps:
            try:
                self.state(step)
            except CheckpointError:
                continue
            return step
        return None


@dataclass(frozen=True)
class Segment:
    """The steps after checkpoint `start` (None: the run's beginning) up to `end` (None: open)."""

    history: RunHistory
    start: int | None
    end: int | None
    values: Mapping[str, Any]  # the resolved configuration they were computed with

    @property
    def first_step(self) -> int:
        return (self.start or 0) + 1

    @cached_property
    def layout(self) -> Layout:
        return layout_of(Config.model_validate(self.values))

    def config(
        self, scratch: Path, overrides: Sequence[str] = (), world_size: int | None = None
    ) -> Config:
        """The configuration of these steps, writing nowhere but to `scratch`.

        `world_size` other than the run's means one process: the same network, batch and data on
        another layout.
        """
        values: dict[str, Any] = {
            "Engine.save_load.output_dir": str(scratch),
            "Engine.save_load.auto_resume": False,
            "Engine.tensorboard": False,
            "Engine.wandb": False,
            "Profiler.enable": False,
        }
        if self.start is not None or self._starts_inside():
            values["Engine.save_load.ckpt_dir"] = None
        wanted = world_size or self.layout.world_size
        if not overrides and wanted == self.layout.world_size:
            # As it was resolved, to the letter.
            return Config.model_validate(_with_values(self.values, values))
        given = dict(self.values)
        if wanted != self.layout.world_size:
            given = _with_values(given, dict.fromkeys(OF_LAYOUT))
        text = yaml.safe_dump(_with_values(given, values), sort_keys=False)
        name = f"{self.history.directory}, as it was configured"
        source = ConfigSource(name, parse_document(text, name).value)
        tree = apply_overrides(source.tree, overrides, source.report)
        return ConfigSource(name, tree, source.report, len(overrides)).load(wanted)

    def _starts_inside(self) -> bool:
        """Whether the run was told to start from a checkpoint of its own."""
        named = ((self.values.get("Engine") or {}).get("save_load") or {}).get("ckpt_dir")
        return named is not None and (
            named == "latest"
            or Path(named).resolve().is_relative_to(self.history.directory.resolve())
        )

    # -- what is computed with ----------------------------------------------------------------

    def build(
        self,
        config: Config,
        world_size: int | None = None,
        open_foreign: OpenForeign | None = None,
    ) -> Engine:
        """An engine that stands where these steps begin; on every rank."""
        from fourfold.engine import build_engine
        from fourfold.engine.resuming import restore_from

        wanted = layout_of(config).world_size if world_size is None else world_size
        engine = build_engine(config, wanted, open_foreign=open_foreign)
        if self.start is not None:
            engine.take(restore_from(engine, self.history.checkpoints[self.start]))
        elif config.Engine.save_load.ckpt_dir is not None:
            engine.resume()
        return engine

    def data(self, config: Config) -> RunData:
        """The data alone, as it was read in these steps; no model is built."""
        data = open_run_data(config, layout_of(config))
        if self.start is not None:
            state, where = self.history.state(self.start), self.history.checkpoints[self.start]
            step, consumed = int(state["step"]), int(state["consumed_samples"])
            if consumed != config.batch_schedule.consumed(step):
                config.continue_batches(step, consumed)
                data.change_batches()
            data.restore(state, consumed, str(where))
        return data


def samples_of_step(data: RunData, config: Config, step: int) -> StepSamples:
    """What training step `step` of this data reads."""
    loader, last = data.loaders["train"], config.Engine.max_steps
    if not 1 <= step <= last:
        raise UserError(f"--step {step}: this run has the steps 1 to {last}")
    size = config.Data.batch_size.micro_batch_size
    return StepSamples(loader, step, layout_of(config).data_degree, size)


@contextmanager
def scratch_directory(name: str | None = None) -> Iterator[Path]:
    """Where an engine may write while a question is answered.

    Ranks that others started must agree on its `name`; each machine has its own.
    """
    if name is not None:
        place = Path(tempfile.gettempdir()) / name
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return
    with tempfile.TemporaryDirectory(prefix="fourfold-question-") as folder:
        yield Path(folder)


def on_ranks(
    world_size: int,
    scratch: Path,
    work: Callable[[], Any],
    config: Config,
    threads: int | None = None,
    *,
    apart: bool = False,
) -> tuple[int, Any]:
    """`work` on the ranks of this machine: the exit code, and what rank 0 returned, as JSON would.

    One process does it here, unless its memory is to end with it (`apart`); several are forked and
    watched as training is. `threads` are those of each, as the run had them: they decide how sums
    are cut.
    """
    if world_size == 1 and not apart:
        with _threads(threads):
            return 0, json.loads(json.dumps(work()))
    from fourfold.launch.supervisor import supervise
    from fourfold.parallel import preload
    from fourfold.processors import threads_of_rank

    preload(layout_of(config))
    answer = scratch / "answer.json"

    def answering() -> None:
        given = work()
        if given is not None:
            answer.write_text(json.dumps(given))

    code = supervise(
        answering,
        world_size,
        scratch / "logs",
        hang_seconds=config.Distributed.timeout_seconds,
        stop_seconds=config.Distributed.timeout_seconds,
        threads=threads or threads_of_rank(world_size, take_turns=layout_of(config).pp > 1),
        echo=lambda line: None,
    )
    return code, json.loads(answer.read_text()) if code == 0 else None


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None and number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _with_values(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with these keys set, by their paths."""
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    for path, value in values.items():
        *outer, name = path.split(".")
        inner = copy
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return copy
