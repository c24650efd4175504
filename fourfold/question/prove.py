"""Proving a run: its files, its data and its log, and its steps computed again.

    files    every checkpoint's bytes against its manifest
    data     token files against their manifests; their fingerprint against the checkpoints'
    log      against its seal, against itself, and against the configuration
    steps    from each checkpoint to the next: losses, gradient norms and evaluations against the
             log, and the weights, moments and state that result against the next checkpoint

On the run's layout, torch and kind of processor steps must agree to the bit; elsewhere losses and
norms to `TOLERANCE` and tensors to `TENSOR_TOLERANCE` of their norm. Whoever changes a weight and
the hashes over it is found by the steps; whoever changes a measured time is found by the seal.
A `Discrepancy` names the file, the step and the tensor or field.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fourfold import checkpoint
from fourfold.config import Config
from fourfold.config.batch_schedule import LeftOut
from fourfold.data.datasets import manifest_section, prefix_of
from fourfold.engine.saving import state_of, tensors_to_load
from fourfold.errors import CheckpointError, DataError, UserError
from fourfold.metrics import Sinks
from fourfold.metrics.jsonl import FILE_NAME, check_seal
from fourfold.parallel import layout_of
from fourfold.question.history import RunHistory, Segment, on_ranks, scratch_directory
from fourfold.question.records import missing_records, record_problems
from fourfold.question.replay import TOLERANCE, agree, differences
from fourfold.shards import Shard
from fourfold.signals import StopRequest
from fourfold.terminal import count_of
from fourfold.tools.tokens.verify import verify

if TYPE_CHECKING:
    from fourfold.engine import Engine

# Relative, of a tensor's norm, where bits cannot be the same. Adam makes a step of the rounding of
# a gradient that is nearly zero.
TENSOR_TOLERANCE = 1e-2
# Of a checkpoint's state: what follows from the steps before it.
OF_STATE = (
    *("step", "consumed_samples", "optimizer_updates", "skipped_updates", "loss_scale"),
    *("data_fingerprint", "tokenizer", "masks", "split_rounding", "mixture", "left_out", "spikes"),
)


@dataclass(frozen=True)
class Discrepancy:
    """Something that is not as the run left it, or not what its steps come to."""

    what: str  # file, data, log, loss, evaluation, tensor, state
    where: str  # the file
    text: str
    step: int | None = None
    name: str | None = None  # of the tensor or the field

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        name = "" if self.name is None else f"{self.name}: "
        return f"{self.where}: {step}{name}{self.text}"


@dataclass
class Proof:
    """The proof of a run; `steps` goes through it and yields findings as they come."""

    run: Path
    overrides: Sequence[str] = ()
    nproc: int | None = None
    findings: list[Discrepancy] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def steps(
        self, sample: int | None = None, every: bool = False, seed: int = 0
    ) -> Iterator[Discrepancy]:
        """Look at everything; recompute all steps, or as many as `sample` drawn at random."""
        history = RunHistory(self.run)
        with scratch_directory() as scratch:
            sound: list[int] = []
            for finding in self._files(history, sound):
                yield self._note(finding)
            for look in (self._data, self._log):
                for finding in look(history, scratch):
                    yield self._note(finding)
            for segment in self._chosen(history, sample, every, seed):
                for finding in self._segment(history, segment, sound, scratch):
                    yield self._note(finding)

    def _note(self, finding: Discrepancy) -> Discrepancy:
        self.findings.append(finding)
        return finding

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "findings": [asdict(one) | {"message": str(one)} for one in self.findings],
            "checked": self.checked,
            "unchecked": self.unchecked,
        }

    # -- what lies there ----------------------------------------------------------------------

    def _files(self, history: RunHistory, sound: list[int]) -> Iterator[Discrepancy]:
        for step, directory in history.checkpoints.items():
            problems = checkpoint.verify(directory)
            for problem in problems:
                yield Discrepancy("file", str(directory), problem, step)
            if not problems:
                sound.append(step)
        self.checked.append(f"every byte of {count_of(len(history.checkpoints), 'checkpoint')}")

    def _data(self, history: RunHistory, scratch: Path) -> Iterator[Discrepancy]:
        newest = max(history.checkpoints)
        try:
            config = self._config(history.segment(max(newest, 1)), scratch)
            data = history.segment(max(newest, 1)).data(config)
        except (UserError, OSError) as error:
            yield Discrepancy("data", str(self.run), f"the data cannot be opened: {error}")
            return
        for source in data.sources:
            result = verify(prefix_of(source.path), config.Model.vocab_size)
            for problem in result.problems:
                yield Discrepancy("data", str(source.path), problem)
            sizes, hashes = (manifest_section(source.manifest, key) for key in ("bytes", "sha256"))
            if sizes.keys() != hashes.keys():
                text = "the manifest is damaged: it names sizes and hashes of different files"
                yield Discrepancy("data", str(source.path), text)
            self.checked += [f"{source.path}: {text}" for text in result.checked]
            for text in result.unchecked:
                if source.manifest is not None:
                    # It was whole when it was written.
                    yield Discrepancy("data", str(source.path), f"the manifest is damaged: {text}")
                else:
                    self.unchecked.append(f"{source.path}: {text}")
        for step in history.checkpoints:
            with suppress(CheckpointError):
                saved = history.state(step).get("data_fingerprint")
                segment = history.segment(max(step, 1))
                if segment.values != history.segment(max(newest, 1)).values:
                    continue  # the steps of that one open its data again
                if saved != data.train_fingerprint:
                    text = "the training data is not what the checkpoint was trained with"
                    yield Discrepancy("data", str(history.checkpoints[step]), text, step)
        data.close()

    def _log(self, history: RunHistory, scratch: Path) -> Iterator[Discrepancy]:
        file = self.run / FILE_NAME
        if not file.exists():
            yield Discrepancy("log", str(file), "there is none")
            return
        problem, since = check_seal(file)
        if problem is not None:
            yield Discrepancy("log", str(file), problem)
        elif since < 0:
            self.unchecked.append(f"{file}: what was measured; no seal was put on it")
        elif since:
            self.unchecked.append(f"{file}: what was measured in its last {since} bytes")
        try:
            records = history.records
        except DataError as error:
            yield Discrepancy("log", str(file), str(error))
            return
        last = max(history.checkpoints)

        @cache
        def config_of(step: int) -> Config:
            segment = history.segment(min(max(step, 1), max(last, 1)))
            config = self._config(segment, scratch)
            if segment.start is not None:
                state = history.state(segment.start)
                done, consumed = int(state["step"]), int(state["consumed_samples"])
                if consumed != config.batch_schedule.consumed(done):
                    config.continue_batches(done, consumed)
            return config

        try:
            for problem in record_problems(records, config_of):
                yield Discrepancy("log", str(file), problem)
            for step in missing_records(records, last, config_of):
                yield Discrepancy("log", str(file), "the record of this step is missing", step)
        except UserError as error:
            yield Discrepancy("log", str(file), f"the configuration cannot be read: {error}")
        self.checked.append(f"{count_of(len(records), 'record')} of the log")

    # -- what is computed again ---------------------------------------------------------------

    def _chosen(
        self, history: RunHistory, sample: int | None, every: bool, seed: int
    ) -> list[Segment]:
        """The segments to recompute: all, or those of steps drawn at random."""
        last = max(history.checkpoints)
        if last == 0 or not (every or sample):
            self.unchecked.append("the steps: none was recomputed; see --sample and --all")
            return []
        try:
            if every:
                self.checked.append(f"all {last} steps, recomputed")
                return history.segments()
            drawn = random.Random(seed).sample(range(1, last + 1), min(sample or 0, last))
            segments = {history.segment(step).end: history.segment(step) for step in sorted(drawn)}
            self.checked.append(f"the steps {sorted(drawn)}, recomputed with those around them")
            return list(segments.values())
        except (CheckpointError, UserError):
            return []  # found among the files

    def _segment(
        self, history: RunHistory, segment: Segment, sound: list[int], scratch: Path
    ) -> Iterator[Discrepancy]:
        """One stretch between checkpoints; from an earlier one where its first is damaged."""
        end = segment.end
        assert end is not None
        start = max((step for step in sound if step < end), default=None)
        if start is not None and history.state(start).get("weights_only"):
            start = None
        segment = Segment(history, start, end, segment.values)
        try:
            config = self._config(segment, scratch)
            world = layout_of(config).world_size
            facts = history.facts(end)
            threads = None if facts is None else facts.threads
            asked = Recomputed(segment, config, world)
            code, answer = on_ranks(world, scratch, asked.run, config, threads)
        except (UserError, OSError, AssertionError) as error:
            text = f"the steps up to it cannot be computed: {error}"
            yield Discrepancy("file", str(history.checkpoints[end]), text, end)
            return
        if code:
            text = "the steps up to it cannot be computed; see above"
            yield Discrepancy("file", str(history.checkpoints[end]), text, end)
            return
        for row in answer:
            yield Discrepancy(**row)

    def _config(self, segment: Segment, scratch: Path) -> Config:
        size = self.nproc or segment.layout.world_size
        config = segment.config(scratch, self.overrides, size)
        if not any(text.startswith("Data.dataset.cache_dir=") for text in self.overrides):
            # Indices are built anew: those in a cache may be what is damaged.
            config.Data.dataset.cache_dir = str(scratch / "cache")
        return config


class Kept:
    """A sink that keeps what an evaluation says."""

    name = "memory"

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class Recomputed:
    """The steps of a segment again, on every rank."""

    def __init__(self, segment: Segment, config: Config, world_size: int) -> None:
        self.segment = segment
        self.config = config
        self.world_size = world_size
        history = segment.history
        assert segment.end is not None
        facts = history.facts(segment.end)
        same = str(layout_of(config)) == str(segment.layout)
        self.exact = same and not differences(facts)
        self.tolerance = 0.0 if self.exact else TOLERANCE
        self.records = {
            (record["kind"], record["step"]): record
            for record in history.records
            if record.get("kind") in ("train", "eval", "test")
        }
        self.found: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]] | None:
        """What was found, on rank 0."""
        end = self.segment.end
        assert end is not None
        engine = self.segment.build(self.config, self.world_size)
        if engine.step == 0 and 0 in self.segment.history.checkpoints:
            self._compare_checkpoint(engine, 0)
        while engine.step < end:
            result = engine.advance()
            expected = engine.outcome(result)
            self._compare_record(
                "train",
                engine.step,
                {
                    "loss": result.loss,
                    "grad_norm": result.norm,
                    "loss_scale": expected.loss_scale,
                    "skipped": expected.skipped,
                    "epoch": expected.epoch,
                },
            )
            if ("eval", engine.step) in self.records:
                self._compare_evaluation(engine, "eval")
        if ("test", end) in self.records and end == self.config.Engine.max_steps:
            self._compare_evaluation(engine, "test")
        self._compare_checkpoint(engine, end)
        rank = engine.mesh.rank
        engine.data.close()
        if engine.claim is not None:
            engine.claim.release()
        found = [json.loads(text) for text in engine.mesh.gather(json.dumps(self.found))]
        engine.mesh.close()
        if rank:
            return None
        # Ranks that hold the same find the same.
        rows = {(row["what"], row["step"], row["name"]): row for rows in found for row in rows}
        return list(rows.values())

    def _add(self, what: str, where: Path, text: str, step: int, name: str) -> None:
        told = Discrepancy(what, str(where), text, step, name)
        self.found.append(asdict(told))

    def _compare_record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        record = self.records.get((kind, step))
        if record is None:
            return
        for name, value in values.items():
            if not agree(value, record.get(name), self.tolerance):
                text = f"{value!r} when computed again, {record.get(name)!r} in the log"
                what = "loss" if kind == "train" else "evaluation"
                self._add(what, self.segment.history.directory / FILE_NAME, text, step, name)

    def _compare_evaluation(self, engine: Engine, kind: str) -> None:
        section, kept = self.config.Engine, Kept()
        stop = StopRequest(engine.output_dir, watches_file=False)
        if kind == "eval":
            engine.evaluate(Sinks(kept), "eval", section.eval_iters, stop)
        else:
            engine.evaluate(Sinks(kept), "test", section.test_iters, stop)
        for record in kept.records:
            names = [name for name in ("loss", "ema_loss", "epoch") if name in record]
            self._compare_record(kind, engine.step, {name: record[name] for name in names})

    # -- tensors ------------------------------------------------------------------------------

    def _compare_checkpoint(self, engine: Engine, step: int) -> None:
        """Weights, moments and state as computed here with those of a checkpoint, even if its
        hashes do not fit: that is how a damaged tensor gets its name."""
        directory = self.segment.history.checkpoints[step]
        held = tensors_to_load(engine.runner, engine.optimizer)
        saved = {name: shard.of(torch.empty_like(shard.local)) for name, shard in held.items()}
        try:
            state = checkpoint.load(directory, saved, ranks=engine.ranks, hashes=False)
        except CheckpointError as error:
            self._add("file", directory, f"cannot be read: {error}", step, "")
            return
        for name, shard in held.items():
            text = self._difference(shard, saved[name])
            if text is not None:
                self._add("tensor", directory, text, step, name)
        computed = json.loads(json.dumps(state_of(engine)))
        there = _as_saved_first(state, engine)
        for name in OF_STATE:
            if computed.get(name) != there.get(name):
                if name in ("loss_scale", "spikes") and not self.exact:
                    continue
                text = f"{computed.get(name)!r} when computed again, {there.get(name)!r} there"
                self._add("state", directory / "state.json", text, step, name)

    def _difference(self, shard: Shard, saved: Shard) -> str | None:
        ours, theirs = shard.local, saved.local
        if not ours.numel() or torch.equal(as_bits(ours), as_bits(theirs)):
            return None
        if not self.exact:
            norm = float(ours.double().norm())
            away = float((ours.double() - theirs.double()).norm())
            if away <= TENSOR_TOLERANCE * norm or away < 1e-12:
                return None
        unequal = (as_bits(ours) != as_bits(theirs)).nonzero()
        first = unequal[0].tolist()
        place = [offset + inside for offset, inside in zip(shard.offsets, first)]
        here, there = ours[tuple(first)].item(), theirs[tuple(first)].item()
        return (
            f"{count_of(len(unequal), 'element')} of {ours.numel()} differ, the first at {place}: "
            f"{here!r} when computed again, {there!r} there"
        )


def _as_saved_first(state: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """A checkpoint that a run went back to was saved again, with the samples after it that are left
    out from then on, and one more in the count: without these."""
    there = dict(state)
    place = LeftOut.of(there.get("left_out") or []).end_of(int(there["consumed_samples"]))
    known = [pair for pair in there.pop("left_out", None) or [] if pair[0] < place]
    if known or engine.config.left_out:
        own = [pair for pair in engine.config.left_out.to_list() if pair[0] >= place]
        there["left_out"] = [*known, *own]
    if engine.spikes is not None and "spikes" in there:
        least = max(there["spikes"]["rewinds"] - engine.spikes.rewinds, 0)
        there["spikes"] = there["spikes"] | {"rewinds": there["spikes"]["rewinds"] - least}
    return there


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: -0.0 is not 0.0 here, and NaN is itself."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


def proof_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """For a terminal."""
    for finding in told["findings"]:
        yield f"finding: {finding['message']}"
    for text in told["checked"]:
        yield f"checked: {text}"
    for text in told["unchecked"]:
        yield f"not checked: {text}"
    count = len(told["findings"])
    yield f"{told['run']}: {count_of(count, 'finding') if count else 'as it was trained'}"
